"""The exact top-K of wide rows from the maxima of groups of ids."""

from __future__ import annotations

from torch import Tensor, arange, cat, where

from tether.errors import InvalidInputError
from tether.projection.support import top_k_lowest_id

#: Neighbouring ids whose largest logit stands for them.
GROUP = 128


def group_maxima(logits: Tensor) -> Tensor:
    """The largest logit of every whole group of `GROUP` neighbouring ids, [N, V] -> [N, V // GROUP]."""
    return _whole_groups(logits).amax(-1)


def top_k_by_groups(logits: Tensor, top_k: int, maxima: Tensor | None = None) -> Tensor:
    """Find the most likely ids of wide rows by reading a few groups of them again, not everything.

    Equals ``logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]``: by falling logit,
    ties by lowest id. The K groups with the largest maxima, ties by lowest group, hold the K largest
    logits: an id outside them is preceded by the K groups' maxima, each larger or as large with a lower
    id. Ids beyond the last whole group are always read. Rows too narrow to gain are searched directly.

    Args:
        logits: [N, V] without NaN; -inf is allowed.
        top_k: how many ids, at most V.
        maxima: `group_maxima` of the same logits, if they are at hand.

    Returns:
        Ids [N, top_k], int64.

    Raises:
        InvalidInputError: top_k outside [1, V].

    Example:
        >>> import torch
        >>> logits = torch.zeros(1, 1000)
        >>> logits[0, 700] = 1.0
        >>> top_k_by_groups(logits, 3).tolist()
        [[700, 0, 1]]
    """
    vocabulary = logits.shape[-1]
    if not 1 <= top_k <= vocabulary:
        raise InvalidInputError(f"top_k must lie in [1, {vocabulary}], the ids there are, got {top_k!r}.")
    groups = vocabulary // GROUP
    if 2 * top_k >= groups:
        return top_k_lowest_id(logits, top_k)
    maxima = group_maxima(logits) if maxima is None else maxima
    # By rising id, so that a lower position among the candidates is a lower id.
    chosen = top_k_lowest_id(maxima, top_k).sort(-1).values
    candidates = _groups_at(logits, chosen)
    if groups * GROUP < vocabulary:
        candidates = cat((candidates, logits[..., groups * GROUP :]), -1)
    position = top_k_lowest_id(candidates, top_k)
    slot = position // GROUP
    found = chosen.gather(-1, slot.clamp_max(top_k - 1)) * GROUP + position % GROUP
    return where(slot < top_k, found, position + (groups - top_k) * GROUP)


def _whole_groups(logits: Tensor) -> Tensor:
    groups = logits.shape[-1] // GROUP
    return logits[..., : groups * GROUP].unflatten(-1, (groups, GROUP))


def _groups_at(logits: Tensor, chosen: Tensor) -> Tensor:
    """The logits of the chosen groups of each row, [N, V] at [N, K] -> [N, K * GROUP]."""
    groups = logits.shape[-1] // GROUP
    if not logits.is_contiguous() or logits.shape[-1] % GROUP:
        return _whole_groups(logits).gather(-2, chosen[..., None].expand(*chosen.shape, GROUP)).flatten(-2)
    first = arange(logits.shape[0], device=logits.device)[:, None] * groups
    return logits.view(-1, GROUP).index_select(0, (first + chosen).flatten()).view(logits.shape[0], -1)
