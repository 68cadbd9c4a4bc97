"""PPO's clipped surrogate, with DAPO's asymmetric range and the dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_at_least, read_tokens


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    dual_clip: float | None = None,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A): stop pushing a token whose ratio has moved enough.

    With `dual_clip` = c > 1, the loss of a token with negative advantage is at most -c A, so that a
    ratio that exploded cannot dominate the batch.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        clip_ratio_low, clip_ratio_high: half-widths of the range of ratios; .2 and .28 for DAPO's
            "clip-higher".
        dual_clip: c, or None for none; 3 to 10 are usual.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens whose gradient a clip took, the dual one
        included), `ratio_mean` and `ratio_max`.

    Raises:
        InvalidInputError: shapes that do not fit, a negative range, c <= 1.

    Source: PPO (arXiv 1707.06347, eq. 7), dual clip (arXiv 1912.09729, eq. 5), DAPO (arXiv
    2503.14476, eq. 8).

    Example:
        >>> import torch
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2)
        >>> new = torch.tensor([[0.5, 0.1]])
        >>> result = ppo_clip(new, old, torch.tensor([1.0]), mask)
        >>> round(result.loss.item(), 4), result.metrics["clipped"].item()
        (-1.1526, 0.5)
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("clip_ratio_low", clip_ratio_low, 0.0, "0.2 is usual")
    check_at_least("clip_ratio_high", clip_ratio_high, 0.0, "0.2 is usual")
    if dual_clip is not None:
        check_at_least("dual_clip", dual_clip, 1.0, "3 to 10 are usual, None for none", above=True)
    plain = -tokens.ratio * tokens.advantages
    clipped = -tokens.ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * tokens.advantages
    token_loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        floor = torch.minimum(token_loss, -dual_clip * tokens.advantages)
        token_loss = torch.where(tokens.advantages < 0, floor, token_loss)
    loss = aggregate(token_loss, response_mask, loss_agg_mode, max_response_length=max_response_length)
    return PolicyLoss(loss, tokens.metrics(tokens.ratio, token_loss != plain))
