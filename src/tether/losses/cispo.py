"""CISPO: clip the importance weight, not the update."""

from __future__ import annotations

from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_at_least, read_tokens, weighted_log_likelihood


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float = 4.0,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A log π: every token keeps a gradient, none a huge weight.

    PPO's clip drops a token whose ratio has moved; rare but decisive tokens move first. Here the
    clipped ratio only weighs the policy gradient, so no token is lost.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        clip_ratio_low: None for no lower bound, as the paper trains.
        clip_ratio_high: largest weight less 1. The paper publishes no value; 4, a largest weight of 5,
            is ScaleRL's.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens whose weight was clipped), `ratio_mean` and
        `ratio_max` (before the clip). The loss is no surrogate: only its gradient means something.

    Raises:
        InvalidInputError: shapes that do not fit, or a negative range.

    Source: MiniMax-M1 (arXiv 2506.13585, the CISPO objective); ScaleRL (arXiv 2510.13786) for the bound.

    Example:
        >>> import torch
        >>> new = torch.tensor([[-0.1, -1.0]]).requires_grad_()
        >>> old, mask = torch.tensor([[-2.5, -1.0]]), torch.ones(1, 2)
        >>> cispo(new, old, torch.tensor([1.0]), mask).loss.backward()
        >>> new.grad  # minus half the weights 5 (11.02 clipped) and 1
        tensor([[-2.5000, -0.5000]])
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("clip_ratio_high", clip_ratio_high, 0.0, "4 lets weights grow to 5")
    if clip_ratio_low is not None:
        check_at_least("clip_ratio_low", clip_ratio_low, 0.0, "None for no lower bound")
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(0.0 if clip_ratio_low is None else 1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = aggregate(
        weighted_log_likelihood(tokens, weight),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    return PolicyLoss(loss, tokens.metrics(ratio, weight != ratio))
