"""TROLL: the policy gradient of the projected policy, plus a pull of the network towards it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss, check_tokens, sequence_log_ratio
from tether.losses.project import Policy, project_tokens
from tether.losses.sampler import Bound
from tether.losses.tokens import ratio_of, read_tokens
from tether.projection.sampled import SampledPolicy
from tether.projection.solve import may_ask
from tether.projection.sparse import SparseLogProbs
from tether.projection.tokens import ProjectedTokens, masked_mean
from tether.settings import Region, SparseSupport, TROLLSettings, check_alpha, check_choice

RatioLevel = Literal["token", "sequence"]
"""The ratio of each token, or GSPO's of its sequence."""


def troll(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    response_ids: Tensor,
    new: Policy,
    old: Policy | SampledPolicy,
    kl_bound: Bound = TROLLSettings.kl_bound,
    alpha: float = TROLLSettings.alpha,
    policy_weights: Tensor | None = None,
    support: SparseSupport = "bucket",
    region: Region = TROLLSettings.region,
    ratio_level: RatioLevel = "token",
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """Minimise -π(o)/q(o) A + alpha KL(p ‖ sg[π]), with π the projection of p on KL(π ‖ q) <= bound.

    p is the network's distribution of a token, q the old policy's, o the sampled token. Where p is
    inside the bound, π = p and the loss is the plain policy gradient. Where it is outside, the ratio
    is that of the projection, whose gradient has no component that would leave the region further,
    and the regression pulls the network back to the projection.

    With ``ratio_level="sequence"`` the ratio is GSPO's, the geometric mean over the sequence's
    projected token ratios; use ``loss_agg_mode="seq-mean-token-mean"`` with it, as GSPO does.

    Args:
        log_probs, old_log_probs: exact log-probabilities of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        response_ids: the sampled tokens, [B, T] integer.
        new, old: both policies: log-probabilities [B, T, V], `SparseLogProbs` [B, T, K] or `HiddenStates`; or
            `old` the policy that sampled, a `SampledPolicy`, and its `log_probs` as `old_log_probs`.
        kl_bound: in nats, a token (or a sequence's mean token); `math.inf` for no trust region. Also a tensor
            of bounds [B, T], or a `LagBound`.
        alpha: weight of the regression, not negative.
        policy_weights: of the policy gradient alone, [B, T]: see `troll_objective` and, for the decoupled
            form, `tether.losses.truncated_weights`.
        support, region: as in `tether.project_sparse`.
        ratio_level: "token" or "sequence".
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `kl_mean`, `kl_max` (before the projection), `kl_projected_mean`,
        `kl_projected_max` (after it; not under an infinite bound), `projected` and `unconverged` (fractions;
        of the latter, any is a row on which the solver failed), and, if `old` has
        a `log_tail_min`, `certified` and `uncertain` (fractions; see `ProjectedTokens`),
        `mean_step` (over projected tokens, 1 if there are none), `regression`, `entropy` (of the given
        distribution: a sparse one's is a lower bound; none of hidden states with a sampler's report),
        `tail_mass`, `ratio_mean`, `ratio_max`.

    Raises:
        InvalidInputError: shapes that do not fit, negative alpha, or what the projection refuses.

    Source: TROLL (arXiv 2510.03817, eq. 5-7).

    Example:
        >>> import torch
        >>> old = torch.tensor([[[0.7, 0.2, 0.1]]]).log()
        >>> new = torch.tensor([[[0.1, 0.2, 0.7]]]).log().requires_grad_()
        >>> ids, mask = torch.tensor([[2]]), torch.ones(1, 1)
        >>> result = troll(new[..., 2], old[..., 2], torch.ones(1), mask, response_ids=ids, new=new, old=old)
        >>> round(result.metrics["ratio_max"].item(), 2), result.metrics["projected"].item()
        (1.88, 1.0)
    """
    check_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_alpha(alpha)
    tokens = project_tokens(
        new, old, response_ids, response_mask,
        log_probs=log_probs, old_log_probs=old_log_probs, kl_bound=kl_bound, support=support, region=region,
    )  # fmt: skip
    objective = troll_objective(
        tokens, advantages, response_mask,
        alpha=alpha, ratio_level=ratio_level, policy_weights=policy_weights,
    )  # fmt: skip
    loss = aggregate(
        objective.token_loss, response_mask, loss_agg_mode, max_response_length=max_response_length
    )
    entropy = tokens.entropy if tokens.entropy is not None else _entropy(new)
    known = {} if entropy is None else {"entropy": masked_mean(entropy.detach(), response_mask)}
    return PolicyLoss(loss, objective.metrics | known)


@dataclass(frozen=True)
class TROLLObjective:
    """TROLL's loss of each token, for whoever aggregates it, and what to watch."""

    token_loss: Tensor
    """-w ratio A + alpha regression, [B, T]; differentiable."""
    ratio: Tensor
    """projected / old of each token or of its sequence, [B, T]; differentiable."""
    metrics: dict[str, Tensor]
    """Those of `troll`, but for the entropy."""


def troll_objective(
    tokens: ProjectedTokens,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    alpha: float = TROLLSettings.alpha,
    ratio_level: RatioLevel = "token",
    policy_weights: Tensor | None = None,
) -> TROLLObjective:
    """-w π(o)/q(o) A + alpha KL(p ‖ sg[π]) of each token: the objective, wherever the tokens come from.

    Args:
        tokens: from `project_tokens`, or from `tether.ops.linear_trust_region` with `old_log_probs` put in,
            [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        alpha, ratio_level: as in `troll`.
        policy_weights: w, weights of the policy gradient alone, [B, T], such as those that correct for
            another sampler or leave out tokens.

    Raises:
        InvalidInputError: shapes that do not fit, a negative alpha, or tokens without `old_log_probs`.

    Source: TROLL (arXiv 2510.03817, eq. 5-7).

    Example:
        >>> import torch
        >>> old = torch.tensor([[[0.7, 0.2, 0.1]]]).log()
        >>> tokens = project_tokens(old, old, torch.tensor([[0]]), torch.ones(1, 1))
        >>> troll_objective(tokens, torch.tensor([2.0]), torch.ones(1, 1)).token_loss.tolist()
        [[-2.0]]
    """
    check_alpha(alpha)
    read = read_tokens(tokens.projected_log_probs, tokens.old_log_probs, advantages, response_mask)
    # A NaN there would take the policy gradient out and leave the regression's: nothing would look broken.
    if may_ask(read.old_log_probs) and bool(read.old_log_probs.isnan().any()):
        raise InvalidInputError(
            "The old policy's log-probabilities of sampled tokens are NaN. If nobody computed them, pass "
            "old_log_probs to project_tokens; or its network overflowed."
        )
    ratio = read.ratio
    check_choice("ratio_level", ratio_level, get_args(RatioLevel))
    if ratio_level == "sequence":
        ratio = ratio_of(sequence_log_ratio(read.log_ratio, response_mask))
    token_loss = -ratio * read.advantages
    if policy_weights is not None:
        if policy_weights.shape != response_mask.shape:
            raise InvalidInputError(
                f"policy_weights must be [B, T] = {tuple(response_mask.shape)}, got "
                f"{tuple(policy_weights.shape)}."
            )
        token_loss = token_loss * policy_weights
    if alpha > 0:
        token_loss = token_loss + alpha * tokens.regression
    return TROLLObjective(token_loss, ratio, tokens.metrics(response_mask) | read.metrics(ratio))


def _entropy(policy: Policy) -> Tensor | None:
    """None for hidden states at a sampler's ids, whose entropy nobody computed."""
    if isinstance(policy, SparseLogProbs):
        return policy.detach().entropy()
    if not isinstance(policy, Tensor):
        return None
    log_probs = policy.detach()
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    return -torch.where(torch.isneginf(log_probs), 0.0, log_probs.exp() * log_probs).sum(-1)
