"""KL-Cov: a price on moving the few tokens of highest covariance, to keep the entropy up."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.covariance import number_of_tokens, token_covariance
from tether.losses.tokens import check_at_least, check_share, read_tokens
from tether.projection.tokens import masked_mean


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    kl_cov_ratio: float = 2e-4,
    kl_coef: float = 1.0,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-r A, and + kl_coef |log r| for the tokens whose covariance is among the highest.

    The tokens that drive the entropy down are not taken out, as in `clip_cov`, but held back. The
    fraction is of the tokens that count, rounded down, at least one; of equal covariances the earlier
    token is chosen, so nothing here is random.

    The paper writes the price as the token's KL(old ‖ new); |log r| is how the authors' code estimates
    it from the sampled token, and what this function computes.

    Means and shares are over the tokens of one call: a micro-batch, where a trainer splits its batches. In
    one of a single sequence with one advantage for all its tokens every covariance is 0.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        kl_cov_ratio: fraction of tokens that pay.
        kl_coef: the price.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens that pay), `covariance_mean`, `ratio_mean`,
        `ratio_max`.

    Raises:
        InvalidInputError: shapes that do not fit, a fraction outside (0, 1], or a negative price.

    Source: Cui et al. (arXiv 2505.22617, KL-Cov).

    Example:
        >>> import torch
        >>> old, mask = torch.log(torch.tensor([[0.8, 0.01], [0.8, 0.01]])), torch.ones(2, 2)
        >>> new = torch.log(torch.tensor([[0.9, 0.01], [0.8, 0.01]]))
        >>> result = kl_cov(new, old, torch.tensor([1.0, -1.0]), mask)
        >>> round(4 * result.loss.item(), 4)  # -.9 / .8 - 1 + 1 + 1, and log(.9 / .8) for the first
        -0.0072
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_share("kl_cov_ratio", kl_cov_ratio, "2e-4 is usual")
    check_at_least("kl_coef", kl_coef, 0.0, "1 in the paper")
    covariance = token_covariance(tokens)
    pays = _highest(covariance, number_of_tokens(tokens, kl_cov_ratio))
    ratio = tokens.ratio
    price = torch.where(pays, kl_coef * tokens.log_ratio.abs(), 0.0)
    loss = aggregate(
        -ratio * tokens.advantages + price,
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    metrics = tokens.metrics(ratio, pays)
    metrics["covariance_mean"] = masked_mean(covariance, covariance.isfinite())
    return PolicyLoss(loss, metrics)


def _highest(covariance: Tensor, count: int) -> Tensor:
    """The `count` highest entries as a mask, earlier ones first; never one that does not count (-inf)."""
    flat = covariance.flatten()
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen.index_fill_(0, flat.argsort(descending=True, stable=True)[:count], True)
    return (chosen & ~torch.isneginf(flat)).view_as(covariance)
