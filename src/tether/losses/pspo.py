"""PSPO: smooth the new probabilities towards the old ones before taking the ratio."""

from __future__ import annotations

from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_share, read_tokens


def pspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    smoothing: float = 0.1,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-((1 - smoothing) r + smoothing) A: the ratio of (1 - smoothing) new + smoothing old to old.

    The smoothed policy is nearer to the old one in total variation and in KL by construction. Mind
    that the gradient is exactly (1 - smoothing) times that of `unclipped`: with an optimiser that
    does not see scale, such as Adam, only the gradient's clip and other terms of the loss can
    tell the two apart.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        smoothing: the paper's alpha, in [0, 1).
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `ratio_mean` and `ratio_max` (smoothed).

    Raises:
        InvalidInputError: shapes that do not fit, or smoothing outside [0, 1).

    Source: PSPO (arXiv 2509.21282, the smoothed ratio).

    Example:
        >>> import torch
        >>> old, mask = torch.zeros(1, 1), torch.ones(1, 1)
        >>> round(pspo(torch.tensor([[2.0]]).log(), old, torch.tensor([1.0]), mask).loss.item(), 4)
        -1.9
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_share("smoothing", smoothing, "0.1 is usual", from_zero=True)
    ratio = (1 - smoothing) * tokens.ratio + smoothing
    loss = aggregate(
        -ratio * tokens.advantages, response_mask, loss_agg_mode, max_response_length=max_response_length
    )
    return PolicyLoss(loss, tokens.metrics(ratio))
