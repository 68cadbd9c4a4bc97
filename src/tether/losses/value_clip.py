"""The critic's loss in PPO: squared error, with a clip on how far values move in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_at_least
from tether.projection.tokens import masked_mean


def value_clip(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip_range: float | None = 0.5,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2: the critic, too, moves only so far a batch.

    Where the value has moved further than c towards its target, the gradient is zero; a value that moved
    away keeps one.

    Args:
        values: the critic's, before each token, [B, T].
        old_values: the same when the batch was sampled, [B, T]; no gradient.
        returns: what to learn, such as the second result of `tether.advantages.gae`, [B, T]; no gradient.
        response_mask: [B, T].
        clip_range: c, in the unit of the rewards; None for no clip. .5 is verl's, .2 PPO's first code's.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and the metric `clipped` (fraction of tokens whose gradient the clip took).

    Raises:
        InvalidInputError: shapes that do not fit, or a range that is not positive.

    Source: the implementation of PPO (arXiv 1707.06347) in OpenAI Baselines, described in Engstrom et al.
    (arXiv 2005.12729, section 3).

    Example:
        >>> import torch
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2)
        >>> result = value_clip(torch.tensor([[0.8, 0.1]]), old, torch.ones(1, 2), mask)
        >>> round(result.loss.item(), 3), result.metrics["clipped"].item()  # (.25 + .81) / 4
        (0.265, 0.5)
    """
    for name, tensor in (("old_values", old_values), ("returns", returns), ("response_mask", response_mask)):
        if values.dim() != 2 or tensor.shape != values.shape:
            raise InvalidInputError(
                f"values and {name} must both be [B, T], got {tuple(values.shape)} and {tuple(tensor.shape)}."
            )
    if clip_range is not None:
        check_at_least("clip_range", clip_range, 0.0, "0.5 by default, None for none", above=True)
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, old_values, returns = (
        torch.where(response_mask > 0, tensor.to(dtype), 0.0)
        for tensor in (values, old_values.detach(), returns.detach())
    )
    plain = (values - returns).square()
    clipped = plain
    if clip_range is not None:
        near = values.clamp(min=old_values - clip_range, max=old_values + clip_range)
        clipped = (near - returns).square()
    loss = aggregate(
        torch.maximum(plain, clipped) / 2,
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    return PolicyLoss(loss, {"clipped": masked_mean((clipped > plain).to(plain.dtype), response_mask)})
