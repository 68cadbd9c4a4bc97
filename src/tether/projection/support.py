"""Which ids of a vocabulary are kept: the most likely ones, the sampled one, those of two supports."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection.solve import may_ask
from tether.settings import check_support_size

#: Marks a slot of ids that holds nothing.
EMPTY = -1


def check_ids(ids: Tensor, vocabulary: int, *, lowest: int = EMPTY, name: str = "ids") -> None:
    """Refuse what is no integer in [0, vocabulary), but for empty slots where `lowest` is theirs.

    A vocabulary of 0 is a head that is empty at rest: nothing is known of it. An accelerator is not asked.
    """
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InvalidInputError(
            f"{name} must be integers, got {ids.dtype}. They are indices, not a mask of them."
        )
    if not (may_ask(ids) and ids.numel() and vocabulary):
        return
    least, most = int(ids.min()), int(ids.max())
    if least < lowest or most >= vocabulary:
        empty = f" or be {EMPTY} for an empty slot" if lowest == EMPTY else ""
        raise InvalidInputError(
            f"{name} must lie in [0, {vocabulary}){empty}; found {least if least < lowest else most}."
        )


def select_support(
    logits: Tensor, top_k: int, *, mass: float = 1.0, keep_ids: Tensor | None = None
) -> Tensor:
    """The ids of the `top_k` largest logits, [..., min(top_k, V)], ties broken by the lowest id.

    `mass` and `keep_ids` as in `SparseLogProbs.from_logits`; with `keep_ids` there is one slot more,
    empty where the id is among the others already. Any increasing transform of the logits selects
    the same ids as long as mass is 1.

    Raises:
        InvalidInputError: top_k < 1, mass outside (0, 1], or keep_ids that do not fit.
    """
    check_support_size(top_k, mass)
    if keep_ids is not None:
        if keep_ids.shape != logits.shape[:-1]:
            raise InvalidInputError(
                f"keep_ids must be one id a row, {tuple(logits.shape[:-1])}, got {tuple(keep_ids.shape)}."
            )
        check_ids(keep_ids.clamp_min(EMPTY), logits.shape[-1], name="keep_ids")
    ids = top_k_lowest_id(logits, min(top_k, logits.shape[-1]))
    if mass < 1.0:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        ids = trim_to_mass(ids, logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True), mass)
    return ids if keep_ids is None else append_kept_id(ids, keep_ids)


def trim_to_mass(ids: Tensor, log_probs: Tensor, mass: float) -> Tensor:
    """Empty the slots of sorted ids that are not needed to hold `mass`."""
    if mass == 1.0:
        return ids
    probs = log_probs.exp()
    return torch.where(probs.cumsum(-1) - probs < mass, ids, EMPTY)


def append_kept_id(ids: Tensor, keep_ids: Tensor) -> Tensor:
    """Add one slot for an id that must be present, empty where it is already or negative, [..., K + 1].

    Negative is what padding has, such as -100.
    """
    keep = keep_ids.to(ids.dtype).unsqueeze(-1)
    spare = (ids == keep).any(-1, keepdim=True) | (keep < 0)
    return torch.cat((ids, torch.where(spare, EMPTY, keep)), -1)


def top_k_lowest_id(values: Tensor, k: int) -> Tensor:
    """Ids of the k largest values by falling value, equal values by rising id, [..., k].

    Equals ``values.sort(descending=True, stable=True).indices[..., :k]`` without sorting everything.
    torch.topk leaves the order of ties open, and bfloat16 logits tie often.
    """
    size = values.shape[-1]
    top, ids = values.topk(min(k + 1, size), dim=-1)
    if may_ask(values) and not bool((top[..., 1:] == top[..., :-1]).any()):
        return ids[..., :k]  # nothing is tied, so there is one order
    top, ids = top[..., :k], ids[..., :k]
    last = top[..., -1:]
    above = (top > last).sum(-1, keepdim=True)
    # Rank the ties with the k-th value by id; those that fit fill the slots after the larger values.
    tied = values == last
    rank = tied.cumsum(-1, dtype=torch.int32)
    chosen = tied & (rank <= k - above)
    index = torch.arange(size, device=values.device)
    slots = torch.where(chosen, above + rank - 1, k)
    filled = torch.cat((ids, ids[..., :1]), -1).scatter(-1, slots.long(), index.expand_as(values))[..., :k]
    order = filled.argsort(-1)
    filled = filled.gather(-1, order)
    by_value = values.gather(-1, filled).argsort(dim=-1, descending=True, stable=True)
    return filled.gather(-1, by_value)


def union_of_ids(first: Tensor, second: Tensor) -> Tensor:
    """Every id of either side once, [..., K1 + K2], sorted, empty slots last."""
    both = torch.cat((first.long(), second.long()), -1)  # whose largest number is no id
    last = torch.iinfo(both.dtype).max
    both = torch.where(both == EMPTY, last, both).sort(-1).values
    repeated = torch.zeros_like(both, dtype=torch.bool)
    repeated[..., 1:] = both[..., 1:] == both[..., :-1]
    both = torch.where(repeated, last, both).sort(-1).values
    return torch.where(both == last, EMPTY, both)


def rising(ids: Tensor) -> Tensor:
    """Ids sorted along the last dimension; NumPy takes a tenth of torch's time for short rows on a CPU."""
    if ids.device.type != "cpu":
        return ids.sort(-1).values
    return torch.from_numpy(np.sort(ids.numpy(), axis=-1))
