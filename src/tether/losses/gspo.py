"""GSPO: the clip on a sequence's geometric-mean ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss, sequence_log_ratio
from tether.losses.tokens import check_at_least, ratio_of, read_tokens


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
    loss_agg_mode: LossAggMode = "seq-mean-token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-min(s A, clip(s, 1 - low, 1 + high) A) with s the geometric mean of a sequence's token ratios.

    Rewards belong to sequences, so the ratio does too: a sequence is kept or dropped whole. The range
    is a thousandth of PPO's because a mean over hundreds of tokens moves that much less.

    With advantages [B, T] this is GSPO-token, whose value uses s for every token and whose gradient
    gives each token its own advantage; for advantages [B] both are the same.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        clip_ratio_low, clip_ratio_high: half-widths of the range of s.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens in clipped sequences), `ratio_mean` and
        `ratio_max` (of s).

    Raises:
        InvalidInputError: shapes that do not fit, or a negative range.

    Source: GSPO (arXiv 2507.18071, eq. 5, 7 and 13-14).

    Example:
        >>> import torch
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2)
        >>> result = gspo(torch.tensor([[0.3, 0.1]]), old, torch.tensor([1.0]), mask)
        >>> round(result.metrics["ratio_max"].item(), 4), round(result.loss.item(), 4)
        (1.2214, -1.0004)
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("clip_ratio_low", clip_ratio_low, 0.0, "3e-4 in the paper")
    check_at_least("clip_ratio_high", clip_ratio_high, 0.0, "4e-4 in the paper")
    ratio = ratio_of(sequence_log_ratio(tokens.log_ratio, response_mask))
    plain = -ratio * tokens.advantages
    clipped = -ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * tokens.advantages
    loss = aggregate(
        torch.maximum(plain, clipped), response_mask, loss_agg_mode, max_response_length=max_response_length
    )
    return PolicyLoss(loss, tokens.metrics(ratio, clipped > plain))
