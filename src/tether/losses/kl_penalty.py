"""The policy gradient with a price on leaving the old policy: the softest of trust regions."""

from __future__ import annotations

from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss, looks_at_distributions_if
from tether.losses.divergences import Distribution, KLEstimate, kl_of_tokens
from tether.losses.tokens import check_at_least, read_tokens
from tether.projection.tokens import masked_max, masked_mean


@looks_at_distributions_if(lambda options: bool(options["kl_estimate"] == "exact"))
def kl_penalty(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float = 1.0,
    kl_estimate: KLEstimate = "k3",
    new: Distribution | None = None,
    old: Distribution | None = None,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-r A + kl_coef KL(old ‖ new): nothing is clipped, moving costs.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        kl_coef: the price of a nat; PPO tried .3 to 10.
        kl_estimate: "k1", "k2" or "k3" from the sampled token alone, or "exact" from `new` and `old`.
            The gradient of k1 is blind to how far the policy moved (it is -grad log π, of mean zero
            at the old policy); take it for comparison only.
        new, old: whole distributions, needed for "exact": log-probabilities [B, T, V], or
            `SparseLogProbs` [B, T, K] on the same ids.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `kl_mean`, `kl_max` (KL(old ‖ new) as estimated), `ratio_mean` and
        `ratio_max`.

    Raises:
        InvalidInputError: shapes that do not fit, a negative coefficient, or distributions that are
            missing.

    Source: PPO (arXiv 1707.06347, eq. 8, beta fixed).

    Example:
        >>> import torch
        >>> old, mask = torch.zeros(1, 1), torch.ones(1, 1)
        >>> new = torch.tensor([[2.0]]).log()  # k3 = 2 - 1 - log 2
        >>> round(kl_penalty(new, old, torch.tensor([1.0]), mask).loss.item(), 4)
        -1.6931
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("kl_coef", kl_coef, 0.0, "1 by default")
    kl = kl_of_tokens(tokens, kl_estimate, new, old)
    ratio = tokens.ratio
    loss = aggregate(
        -ratio * tokens.advantages + kl_coef * kl,
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    metrics = tokens.metrics(ratio)
    metrics["kl_mean"] = masked_mean(kl.detach(), response_mask)
    metrics["kl_max"] = masked_max(kl.detach(), response_mask)
    return PolicyLoss(loss, metrics)
