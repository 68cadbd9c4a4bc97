"""From one loss a token to one number: the four conventions of the field."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.tokens import check_at_least
from tether.settings import check_choice

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def aggregate(
    token_loss: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode = "token-mean",
    *,
    max_response_length: int | None = None,
) -> Tensor:
    """Reduce per-token losses [B, T] over the tokens that count.

    - ``token-mean``: every token weighs the same (DAPO; verl's default).
    - ``seq-mean-token-mean``: every sequence weighs the same (GRPO, GSPO).
    - ``seq-mean-token-sum``: long sequences weigh more.
    - ``seq-mean-token-sum-norm``: the same, divided by a constant length (Dr.GRPO), so that the scale
      does not depend on the responses' lengths.

    A sequence without a single token counts as a zero among the B that ``seq-mean-...`` divides by, so an
    empty mask gives 0 with zero gradient. TRL's losses divide by B as well, and so do verl's trainers, which
    hand their `agg_loss` the size of the whole batch. Called without one (`global_batch_size=None`), verl
    0.9.1 leaves such sequences out: its average is ours times B over the number of the others.

    Args:
        token_loss: [B, T]; values under a zero mask are ignored, even infinite ones.
        response_mask: [B, T], bool or 0/1.
        loss_agg_mode: see above.
        max_response_length: the constant of ``seq-mean-token-sum-norm``; T if not given.

    Raises:
        InvalidInputError: unknown mode, shapes that differ, or max_response_length < 1.

    Source: DAPO (arXiv 2503.14476, eq. 8), Dr.GRPO (arXiv 2503.20783, section 3).

    Example:
        >>> import torch
        >>> loss = torch.tensor([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0]])
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> [round(aggregate(loss, mask, mode).item(), 3) for mode in ("token-mean", "seq-mean-token-mean")]
        [3.0, 3.5]
    """
    if token_loss.shape != response_mask.shape or token_loss.dim() != 2:
        raise InvalidInputError(
            f"token losses and response_mask must both be [B, T], got {tuple(token_loss.shape)} and "
            f"{tuple(response_mask.shape)}."
        )
    check_choice("loss_agg_mode", loss_agg_mode, get_args(LossAggMode))
    # In half precision, more than a few hundred tokens cannot be counted.
    mask = response_mask.to(torch.promote_types(token_loss.dtype, torch.float32))
    kept = torch.where(mask > 0, token_loss, 0.0) * mask
    if loss_agg_mode == "token-mean":
        return kept.sum() / mask.sum().clamp_min(1)
    if loss_agg_mode == "seq-mean-token-mean":
        return (kept.sum(-1) / mask.sum(-1).clamp_min(1)).sum() / max(1, mask.shape[0])
    if loss_agg_mode == "seq-mean-token-sum":
        return kept.sum() / max(1, mask.shape[0])
    length = token_loss.shape[-1]
    if max_response_length is not None:
        check_at_least("max_response_length", max_response_length, 1, "None for T")
        length = max_response_length
    return kept.sum() / max(1, mask.shape[0] * length)
