"""Which rows of a packed micro-batch predict the response tokens that count, and which of them are here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tether.errors import ConfigError
from tether.ops.logits import VocabularyShard

SequenceShard = Callable[[], tuple[int, int]]


@dataclass(frozen=True)
class Partition:
    """How the rows of a micro-batch are spread over processes."""

    sequence: SequenceShard
    """Rank and size of the group each sequence is cut over."""
    vocabulary: Callable[[int], VocabularyShard | None]
    """From the columns of this process's logits to the shard they are."""
    alignment: int = 1
    """Each packed sequence is padded to a multiple of this many positions."""


@dataclass(frozen=True)
class CountedTokens:
    """The response tokens with a positive mask that this process sees, in the order of the batch."""

    rows: Tensor
    """Rows of this process's logits that predict them, [N]."""
    sampled_ids: Tensor
    """The tokens themselves, [N]."""
    index: Tensor
    """Their places among all counted tokens of the micro-batch, [N]."""
    per_sequence: Tensor
    """Counted tokens of each sequence, [B]; of the whole micro-batch."""


def counted_tokens(
    data: TensorDict, columns: int, shard: tuple[int, int] = (0, 1), alignment: int = 1
) -> CountedTokens:
    """Find them in a micro-batch whose sequences lie one after the other.

    A token's logits are one position before it. With sequence parallelism the packed sequence is cut
    into equal slices and each process has the logits of one.

    Args:
        data: verl's micro-batch: jagged `input_ids`, `responses` and `response_mask`.
        columns: how many positions this process has logits of.
        shard: rank and size of the sequence-parallel group.
        alignment: each sequence is padded to a multiple of this many positions (Megatron).

    Raises:
        ConfigError: a batch of verl's v0 trainer, whose tensors are padded.
    """
    refuse_padded_batch(data)
    offsets = data["input_ids"].offsets()
    whole = offsets.diff()
    starts = (whole + -whole % alignment).cumsum(0) - (whole + -whole % alignment)
    lengths = data["responses"].offsets().diff()
    mask = data["response_mask"].values() > 0
    device = offsets.device
    token = torch.arange(int(lengths.sum()), device=device)
    sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=device), lengths)
    within = token - (lengths.cumsum(0) - lengths)[sequence]
    rows = (starts + whole - lengths - 1)[sequence] + within
    per_sequence = torch.zeros_like(lengths).index_add_(0, sequence, mask.to(lengths.dtype))
    rows, sampled = rows[mask], data["responses"].values()[mask]
    rank, _ = shard
    first = rank * columns
    here = (rows >= first) & (rows < first + columns)
    return CountedTokens(rows[here] - first, sampled[here], here.nonzero().squeeze(-1), per_sequence)


def refuse_padded_batch(data: TensorDict) -> None:
    """Refuse the v0 trainer, which pads and drops every field it does not know."""
    if not all(_is_jagged(data[name]) for name in ("input_ids", "responses", "response_mask")):
        raise ConfigError(
            "This batch is padded, as those of verl's v0 trainer are; that trainer also drops what TROLL "
            "records of the old policy. Set trainer.use_v1=True."
        )


def spread(values: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Values of counted tokens at their positions, zero elsewhere, [1, columns]; differentiable."""
    return values.new_zeros(columns).index_put((rows,), values)[None]


def _is_jagged(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_nested and tensor.layout == torch.jagged
