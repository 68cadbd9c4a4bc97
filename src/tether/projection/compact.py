"""An old policy small enough to keep for millions of tokens: rows as long as they need to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection.divergence import log1mexp
from tether.projection.sparse import EMPTY, SparseLogProbs

#: How log-probabilities are stored.
Precision = Literal["float32", "float16"]


@dataclass(frozen=True)
class CompactLogProbs:
    """`SparseLogProbs` without its empty slots, in compressed rows (CSR): plain tensors and offsets.

    A row that a mass threshold cut to a few ids takes the memory of a few ids: 8 bytes each (6 with
    float16) and 12 to 20 bytes for the row. Make one with `pack`, get the rows back with `unpack`.

    With float16 a log-probability is off by up to 2^-11 of itself, so rows are renormalised as they are
    unpacked (a divergence of some 3e-5 nats to what was packed), without changing the kept id's; as that is
    another distribution than the one recorded, nothing can be certified with it.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[9.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
        >>> few = SparseLogProbs.from_logits(logits, top_k=3, mass=0.99)
        >>> compact = CompactLogProbs.pack(few)
        >>> compact.ids.tolist(), compact.offsets.tolist(), compact.nbytes
        ([0, 0, 1, 2], [0, 1, 4], 72)
        >>> compact.unpack().ids.tolist()
        [[0, -1, -1], [0, 1, 2]]
    """

    ids: Tensor
    """Vocabulary ids of all rows, one after the other, [E] int32."""
    log_probs: Tensor
    """Their log-probabilities, [E] float32 or float16."""
    offsets: Tensor
    """Where each row starts in the two above, and where the last one ends, [R + 1] int64."""
    log_tail: Tensor
    """Log of the mass of all other ids, [R] float32."""
    log_tail_min: Tensor | None
    """As in `SparseLogProbs`, [R] float32."""
    kept: Tensor | None
    """Where each row's kept id is among all ids, [R] int64; -1 in rows without one. Only with float16."""
    kept_log_probs: Tensor | None
    """Its log-probability, [R] float32."""
    shape: torch.Size
    """Of the rows, without the ids: R is their number."""
    width: int
    """Ids of the longest row; 1 where all rows are empty, so that a maximum over ids exists."""

    @classmethod
    def pack(
        cls, rows: SparseLogProbs, *, precision: Precision = "float32", keep_ids: Tensor | None = None
    ) -> CompactLogProbs:
        """Leave out what is empty.

        Args:
            rows: distributions [..., K]; gradients end here. Rows may be empty altogether.
            precision: of all log-probabilities but those of `keep_ids` and the tails.
            keep_ids: one id a row, [...], whose log-probability stays float32: the sampled token. Needed
                with float16; with float32 everything stays as it is.

        Raises:
            InvalidInputError: float16 without `keep_ids`, or `keep_ids` of another shape.
        """
        if precision not in ("float32", "float16"):
            raise InvalidInputError(f'precision must be "float32" or "float16", got {precision!r}.')
        if precision == "float16" and (keep_ids is None or keep_ids.shape != rows.log_tail.shape):
            raise InvalidInputError(
                "float16 needs keep_ids, the sampled tokens, which stay float32, of shape "
                f"{tuple(rows.log_tail.shape)}, got {None if keep_ids is None else tuple(keep_ids.shape)}."
            )
        ids = rows.ids.reshape(rows.log_tail.numel(), rows.ids.shape[-1])
        log_probs = rows.log_probs.detach().float().reshape(ids.shape)
        held = ids != EMPTY
        lengths = held.sum(-1)
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        at = held.nonzero(as_tuple=True)
        flat_ids, flat = ids[at].int(), log_probs[at]
        kept = kept_log_probs = None
        if precision == "float16":
            assert keep_ids is not None
            match = held & (ids == keep_ids.reshape(-1, 1))
            place = offsets[:-1] + (held.cumsum(-1) * match).sum(-1) - 1
            kept = torch.where(match.any(-1), place, -1)
            kept_log_probs = torch.where(match, log_probs, -torch.inf).amax(-1)
            flat = flat.half()
        least = None if precision == "float16" else rows.log_tail_min
        return cls(
            ids=flat_ids,
            log_probs=flat,
            offsets=offsets,
            log_tail=rows.log_tail.detach().float().flatten(),
            log_tail_min=None if least is None else least.float().flatten(),
            kept=kept,
            kept_log_probs=kept_log_probs,
            shape=rows.log_tail.shape,
            width=max(1, int(lengths.max())) if lengths.numel() else 1,
        )

    @property
    def nbytes(self) -> int:
        """Memory of all tensors together."""
        tensors = (self.ids, self.log_probs, self.offsets, self.log_tail, self.log_tail_min, self.kept,
                   self.kept_log_probs)  # fmt: skip
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def unpack(self) -> SparseLogProbs:
        """The rows as they were, their ids first and empty slots last, [..., width], float32."""
        rows = self.log_tail.numel()
        lengths = self.offsets.diff()
        row = torch.repeat_interleave(
            torch.arange(rows, device=lengths.device), lengths, output_size=self.ids.numel()
        )
        slot = torch.arange(self.ids.numel(), device=lengths.device) - self.offsets[row]
        ids = torch.full((rows, self.width), EMPTY, dtype=torch.long, device=self.ids.device)
        log_probs = torch.full((rows, self.width), -torch.inf, dtype=torch.float32, device=self.ids.device)
        ids[row, slot], log_probs[row, slot] = self.ids.long(), self.log_probs.float()
        log_tail = self.log_tail
        if self.kept is not None and self.kept_log_probs is not None:
            log_probs, log_tail = self._renormalised(log_probs, row, slot)
        least = None if self.log_tail_min is None else self.log_tail_min.view(self.shape)
        return SparseLogProbs(
            ids.view(*self.shape, self.width),
            log_probs.view(*self.shape, self.width),
            log_tail.view(self.shape),
            least,
        )

    def _renormalised(self, log_probs: Tensor, row: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Scale everything but the kept ids, which are exact, to the mass those leave."""
        assert self.kept is not None
        assert self.kept_log_probs is not None
        has_kept = self.kept >= 0
        rows = has_kept.nonzero().squeeze(-1)
        places = self.kept[rows]
        others = log_probs.clone()
        others.index_put_((row[places], slot[places]), others.new_full((), -torch.inf))
        total = torch.cat((others, self.log_tail[:, None]), -1).logsumexp(-1)
        left = torch.where(has_kept, log1mexp(self.kept_log_probs), 0.0)
        # Where rounding leaves nothing to share, or there was nothing, the others stay as they are.
        shift = torch.where(total.isfinite() & left.isfinite(), left - total, 0.0)
        shift = torch.where(self.offsets.diff() > 0, shift, 0.0)
        others = others + shift[:, None]
        others[row[places], slot[places]] = self.kept_log_probs[rows]
        return others, self.log_tail + shift
