"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_at_least, ratio_of, read_tokens


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
    loss_agg_mode: LossAggMode = "seq-mean-token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-(prod_t of clipped r_t)^(1/T) A: one outlying token cannot dominate a geometric mean.

    Each token's ratio is clipped on the side on which its advantage pushes it, in log space and
    wider than PPO's, then a sequence's ratios are averaged geometrically. Unlike GSPO, which clips
    the mean, a token that went too far loses its gradient and the rest of its sequence does not.

    The paper's objective is the mean over sequences, which the default aggregation gives; the other
    modes weigh sequences by their lengths. With advantages [B, T] a token is clipped by its own sign,
    and the sequence's ratio multiplies the mean advantage.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        clip_ratio_low, clip_ratio_high: widths of the range of log r: ratios lie in
            [e^-low, e^high], [.67, 1.49] by default.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens), `ratio_mean` and `ratio_max` (of the
        sequences' clipped geometric means).

    Raises:
        InvalidInputError: shapes that do not fit, or a negative range.

    Source: GMPO (arXiv 2507.20673, the objective with token-level clip).

    Example:
        >>> import torch
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2)
        >>> result = gmpo(torch.tensor([[1.0, 0.0]]), old, torch.tensor([1.0]), mask)  # -e^((.4 + 0) / 2)
        >>> round(result.loss.item(), 4), result.metrics["clipped"].item()
        (-1.2214, 0.5)
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("clip_ratio_low", clip_ratio_low, 0.0, "0.4 in the paper")
    check_at_least("clip_ratio_high", clip_ratio_high, 0.0, "0.4 in the paper")
    log_ratio = tokens.log_ratio
    clipped = torch.where(
        tokens.advantages > 0, log_ratio.clamp_max(clip_ratio_high), log_ratio.clamp_min(-clip_ratio_low)
    )
    count = (response_mask > 0).sum(-1, keepdim=True).clamp_min(1)
    mean = (clipped * response_mask).sum(-1, keepdim=True) / count
    ratio = ratio_of(mean).expand_as(log_ratio)
    loss = aggregate(
        -ratio * tokens.advantages, response_mask, loss_agg_mode, max_response_length=max_response_length
    )
    return PolicyLoss(loss, tokens.metrics(ratio, (clipped != log_ratio) & (tokens.advantages != 0)))
