"""TRM: leave out a whole sequence if the policy moved too far at any of its tokens."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss, looks_at_distributions_if
from tether.losses.divergences import Distribution, kl_of_tokens
from tether.losses.tokens import check_at_least, read_tokens
from tether.projection.tokens import masked_max, masked_mean
from tether.settings import check_choice

Estimate = Literal["exact", "k2", "k3"]
"""Without k1, which is negative for a token that became likelier, however far it moved."""


@looks_at_distributions_if(lambda options: bool(options["kl_estimate"] == "exact"))
def trm(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    new: Distribution | None = None,
    old: Distribution | None = None,
    kl_bound: float = 0.05,
    kl_estimate: Estimate = "exact",
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-M r A with M = 1 for sequences all of whose tokens have KL(old ‖ new) <= kl_bound, else 0.

    The error of the surrogate grows with a sequence's largest divergence, which a rule that looks
    at one token at a time cannot bound; so a violating sequence is left out whole. The averages still
    divide by all tokens or sequences, so that leaving out makes the update smaller (verl's rejection
    divides by what is left).

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        new, old: whole distributions, needed for ``kl_estimate="exact"``: log-probabilities [B, T, V],
            or `SparseLogProbs` [B, T, K] on the same ids.
        kl_bound: in nats, a token. The paper publishes no default; .05 is TROLL's.
        kl_estimate: "exact", or from the sampled token alone "k2" or "k3", the paper's stand-ins for
            trainers without the old distributions (noisy: one surprising token drops its sequence).
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens in sequences left out), `kl_mean`, `kl_max`
        (KL(old ‖ new)), `ratio_mean`, `ratio_max`.

    Raises:
        InvalidInputError: shapes that do not fit, a negative bound, an unknown estimate, or distributions
            that are missing.

    Source: TRM (arXiv 2512.23075, the masked surrogate with the max criterion; k2 and k3 its appendix).

    Example:
        >>> import torch
        >>> old = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).log()
        >>> new = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]).log()  # the second token: .51 nats
        >>> result = trm(new[..., 0], old[..., 0], torch.ones(1), torch.ones(1, 2), new=new, old=old)
        >>> result.metrics["clipped"].item(), result.loss.item() == 0
        (1.0, True)
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("kl_bound", kl_bound, 0.0, "0.05 by default")
    check_choice("kl_estimate", kl_estimate, get_args(Estimate))
    with torch.no_grad():
        kl = kl_of_tokens(tokens, kl_estimate, new, old)
        left_out = (kl > kl_bound).any(-1, keepdim=True).expand_as(kl)
    ratio = tokens.ratio
    loss = aggregate(
        torch.where(left_out, 0.0, -ratio * tokens.advantages),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    metrics = tokens.metrics(ratio, left_out)
    metrics["kl_mean"] = masked_mean(kl, response_mask)
    metrics["kl_max"] = masked_max(kl, response_mask)
    return PolicyLoss(loss, metrics)
