"""The old and the new policy as hidden states and LM heads: logits of both, and how far apart they can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.ops import memory
from tether.ops.checks import check_bias, check_vocabulary_size, check_weight
from tether.ops.head import VOCABULARY_BLOCK, Head
from tether.ops.hidden_states import HiddenStates
from tether.ops.memory import tokens_at_a_time
from tether.ops.rows import keep_rows
from tether.projection.solve import may_ask
from tether.projection.support import check_ids

# Logits of one policy a CPU takes through all passes of a projection at a time: 1 MiB of float32. More rows
# share the overhead of what is done once a block, fewer fit its cache together with the temporaries.
BLOCK_ELEMENTS = 1 << 18
# Rows of the head that are looked at for a centre of all, evenly spread.
_CENTRE_ROWS = 1 << 12


class OldRows(NamedTuple):
    """Rows of a block whose old logits were formed."""

    rows: Tensor
    """Which, [m], in rising order."""
    logits: Tensor | None
    """[m, vocabulary]; None if there are none."""
    plain: bool
    """Whether one of them was left to the plain path."""


@dataclass(frozen=True)
class PolicyPair:
    """Forms the logits of chosen rows under both policies, always in the same buffers."""

    head: Head
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    old: HiddenStates
    sequences: Tensor | None
    """The sequence of each row, [N], where a sequence shares one step."""
    buffers: Tensor
    """For logits of the new policy, and on a CPU of the old one. Few rows of a batch need their old logits as
    a rule, and an accelerator's memory is dear: it gets room for those alone, anew each time."""
    held: OldRows | None = None
    """If the buffers hold the new logits of all rows already: the old ones that there are. Both can be asked
    for once, in rising order."""
    kernels: bool = False
    """Whether Triton's kernels measure and project the rows."""

    @classmethod
    def of(
        cls,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        old: HiddenStates,
        sequences: Tensor | None = None,
        rows: int | None = None,
        kernels: bool = False,
    ) -> PolicyPair:
        """With buffers for so many rows, or for those of a block."""
        if rows is None:
            rows = max(1, tokens_at_a_time(hidden, weight.shape[0], hidden.shape[0]))
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        policies = 2 if may_ask(hidden) else 1
        buffers = memory.WORKSPACE.take(hidden, (policies, rows, weight.shape[0]), dtype)
        return cls(head, hidden, weight, bias, old, sequences, buffers, kernels=kernels)

    def block(self, rows: slice) -> PolicyPair:
        """Of some rows alone, in the same buffers."""
        support = None if self.old.support is None else self.old.support[rows]
        old = replace(self.old, hidden=self.old.hidden[rows], support=support)
        buffers = self.buffers[:, : rows.stop - rows.start]
        return replace(self, hidden=self.hidden[rows], old=old, buffers=buffers)

    def holding(self, held: OldRows) -> PolicyPair:
        """The same where the buffers hold all new logits."""
        return replace(self, held=held)

    @property
    def vocabulary(self) -> int:
        """Ids that can be sampled."""
        return self.head.vocabulary_size or self.weight.shape[0]

    def new_logits(self, rows: Tensor | slice) -> Tensor:
        """[n, V], padding included."""
        if self.held is not None:
            return self.buffers[0][rows] if isinstance(rows, slice) else keep_rows(self.buffers[0], rows)
        return self.head.logits(self.hidden[rows], self.weight, self.bias, self.buffers[0])

    def old_logits(self, rows: Tensor | slice) -> Tensor:
        """[n, vocabulary]."""
        weight, bias, hidden = self.old.weight, self.old.bias, self.old.hidden[rows]
        if weight is None:
            weight, bias = self.weight, self.bias
        buffer = (
            self.buffers[-1] if len(self.buffers) == 2 else self.buffers.new_empty((len(hidden), len(weight)))
        )
        return self.head.logits(hidden, weight, bias, buffer)[:, : self.vocabulary]

    def old_logits_of(self, block: Tensor | slice, acts: Tensor) -> tuple[Tensor | None, Tensor]:
        """Old logits [m, vocabulary] for the rows of a block that act, and which of them is each row's.

        Args:
            block: rows; a slice where the logits are held and nobody is asked which rows act.
            acts: [n] bool.

        Returns:
            None if there are no such rows; and [n], -1 at rows that do not act.
        """
        if isinstance(block, slice):
            assert self.held is not None
            place = torch.searchsorted(self.held.rows, torch.arange(len(acts), device=acts.device))
            return self.held.logits, torch.where(acts, place, -1)
        needed, place = block[acts.nonzero().squeeze(-1)], torch.where(acts, acts.cumsum(0) - 1, -1)
        if not needed.numel():
            return None, place
        if self.held is None:
            return self.old_logits(needed), place
        assert self.held.logits is not None
        return keep_rows(self.held.logits, torch.searchsorted(self.held.rows, needed)), place

    def blocks(self, rows: Tensor) -> Iterator[Tensor]:
        """Rows whose logits fit the buffers."""
        return iter(rows.split(self.buffers.shape[1])) if rows.numel() else iter(())

    def every_block(self) -> Iterator[slice]:
        """The same of all rows."""
        rows, size = len(self.hidden), self.buffers.shape[1]
        return (slice(start, min(start + size, rows)) for start in range(0, rows, size))

    def log_ratio_range(self) -> Tensor:
        """A bound on max - min over the vocabulary of log(new / old), [N].

        log(new / old) of an id is L (w_o . (h_n - h_o) + (w_n - w_o) . h_n + b_n - b_o) and a constant of the
        row, with L the slope of the logits; by Cauchy-Schwarz none of it can exceed the product of norms. A
        constant taken from all w_o changes nothing (but for soft-capping, which is not linear).
        """
        slope = self.head.logit_scale / self.head.temperature
        new, old = self.hidden.double(), self.old.hidden.double()
        weight, old_weight = self.weight[: self.vocabulary], self.old.weight
        base = weight if old_weight is None else old_weight[: self.vocabulary]
        # Any constant will do, so the mean of some rows will.
        some = base[:: max(1, len(base) // _CENTRE_ROWS)]
        centre = some.mean(0) if self.head.softcap is None else None
        largest_row = self._largest_row()
        reach = largest_row(base, minus_row=centre) * (new - old).norm(dim=-1)
        if old_weight is not None:
            if not _same(old_weight, self.weight):
                reach = reach + largest_row(weight, minus=base) * new.norm(dim=-1)
            if self.bias is not None and self.old.bias is not None:
                difference = (self.bias.double() - self.old.bias.double())[: self.vocabulary]
                # Impossible in both: NaN, and no part of either policy.
                reach = reach + difference.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax()
        return 2 * slope * reach * (1 + 1e-5)  # sums of squares are float32's

    def _largest_row(self) -> Callable[..., Tensor]:
        # The kernel reads rows whose columns lie side by side.
        heads = [head for head in (self.weight, self.old.weight) if head is not None]
        if not self.kernels or any(head.stride(1) != 1 for head in heads):
            return _largest_row
        from tether.ops.rows_triton import largest_row

        return largest_row


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same memory, so that their difference is zero."""
    return first.data_ptr() == second.data_ptr() and first.stride() == second.stride()


def rows_at_a_time(logits: Tensor) -> Iterator[slice]:
    """What a CPU core's cache holds, or on an accelerator an eighth of the rows of a block."""
    rows, vocabulary = logits.shape
    size = max(1, BLOCK_ELEMENTS // vocabulary)
    if not may_ask(logits):
        size = max(memory.WORKSPACE_ELEMENTS // vocabulary, memory.ACCELERATOR_ROWS) // 8
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _largest_row(weight: Tensor, *, minus: Tensor | None = None, minus_row: Tensor | None = None) -> Tensor:
    """The largest norm of a row of ``weight - minus - minus_row``, what fits the cache at a time."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    size = max(1, BLOCK_ELEMENTS // max(1, weight.shape[1])) if may_ask(weight) else VOCABULARY_BLOCK
    largest = weight.new_zeros((), dtype=dtype)
    scratch = weight.new_empty((min(size, weight.shape[0]), weight.shape[1]), dtype=dtype)
    for start in range(0, weight.shape[0], size):
        rows = slice(start, start + size)
        part = weight[rows].to(dtype)
        for taken in (None if minus is None else minus[rows].to(dtype), minus_row):
            if taken is not None:
                part = torch.sub(part, taken.to(dtype), out=scratch[: len(part)])
        largest = torch.maximum(largest, torch.linalg.vecdot(part, part).amax())
    return largest.double().sqrt()


def check_pair(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    old: HiddenStates,
    sequences: Tensor | None,
    vocabulary_size: int | None,
) -> None:
    """Refuse shapes that do not fit and ids outside the vocabulary."""
    if hidden.dim() != 2 or old.hidden.shape != hidden.shape or ids.shape != hidden.shape[:1]:
        raise InvalidInputError(
            "linear_trust_region needs hidden and old_hidden [N, D] and ids [N], got "
            f"{tuple(hidden.shape)}, {tuple(old.hidden.shape)} and {tuple(ids.shape)}. Flatten batch and "
            "time, and keep the tokens that count."
        )
    check_heads(hidden, weight, bias, old)
    check_vocabulary_size(vocabulary_size, weight.shape[0])
    rows = hidden.shape[:1]
    if old.support is not None and old.support.log_tail.shape != rows:
        raise InvalidInputError(
            f"old_support must be [{rows[0]}, K], a row a token, got {tuple(old.support.ids.shape)}."
        )
    if sequences is not None:
        if sequences.shape != rows:
            raise InvalidInputError(f"sequences must be [{rows[0]}], got {tuple(sequences.shape)}.")
        check_ids(sequences, 0, name="sequences")
        if may_ask(sequences) and bool((sequences < 0).any()):
            raise InvalidInputError(f"sequences must count from 0 on, got {int(sequences.min())}.")
    check_ids(ids, vocabulary_size or weight.shape[0], lowest=0)


def check_heads(hidden: Tensor, weight: Tensor, bias: Tensor | None, old: HiddenStates) -> None:
    """Refuse heads that do not fit the hidden states, or one another."""
    check_weight(hidden, weight)
    if old.weight is not None and weight.numel() and old.weight.shape != weight.shape:
        raise InvalidInputError(
            f"old_weight must be {tuple(weight.shape)}, as weight is, got {tuple(old.weight.shape)}."
        )
    if (old.bias is not None) != (bias is not None and old.weight is not None):
        raise InvalidInputError(
            "old_weight and old_bias are one head: give both where the head has a bias, or neither where "
            "it is frozen."
        )
    check_bias("bias", bias, weight)
    check_bias("old_bias", old.bias, weight)
