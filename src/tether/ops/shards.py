"""A vocabulary split over the processes of a group, and the most likely ids of all its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tether.projection.support import top_k_lowest_id


@dataclass(frozen=True)
class VocabularyShard:
    """This process's part of a vocabulary that is split over the processes of a group."""

    group: Any
    """A `torch.distributed` process group; its processes hold the shards in the order of their ranks."""
    start: int
    """The vocabulary id of this process's first column."""
    vocabulary_size: int
    """Columns of all processes together."""


def merge_top_k(ids: Tensor, logits: Tensor, top_k: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The best of every shard's best, most likely first, ties by lowest id: each is among its own shard's.

    Args:
        ids: of the whole vocabulary, this shard's most likely, [N, K_p] with K_p <= top_k.
        logits: theirs, [N, K_p].
        top_k: how many of all, the same on every process.

    Returns:
        Their ids, [N, top_k], the same on every process; and the column of `ids` each is from, [N, top_k],
        -1 where another process holds it.
    """
    # Shards narrower than top_k are filled up with what is impossible and beyond every id.
    held = ids.shape[-1]
    short = (0, top_k - held)
    ids = torch.nn.functional.pad(ids, short, value=shard.vocabulary_size)
    logits = torch.nn.functional.pad(logits, short, value=-torch.inf)
    by_id, order = _beside_each_other(ids, shard.group).sort(-1)  # so that ties go to the lowest
    best = top_k_lowest_id(_beside_each_other(logits, shard.group).gather(-1, order), top_k)
    column = order.gather(-1, best) - dist.get_rank(shard.group) * top_k
    own = (column >= 0) & (column < held)
    return by_id.gather(-1, best), torch.where(own, column, -1)


def _beside_each_other(values: Tensor, group: Any) -> Tensor:
    """Every shard's columns, in the order of ranks."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, -1)
