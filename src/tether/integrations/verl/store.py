"""Where the old policy's records wait between the pass that makes them and the updates that need them.

`local`: in host memory of the worker that recorded them, page-locked where there is an accelerator. What
travels with a sequence of verl's batch is a handle. verl balances a batch over its workers before the old
pass and sends updates the same way, so a sequence comes back to the worker that recorded it.
`queue`: through TransferQueue with the batch. Only an LM head that is trained stays on the workers, a part on
each; the handle then says what pass it is of.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from tether.errors import TetherError
from tether.integrations.exact_head import HeadSnapshot
from tether.integrations.verl import carrier
from tether.integrations.verl.head import snapshot_bytes
from tether.integrations.verl_switch import SAMPLER_SWITCH

#: Each sequence's field of the batch: the pass, the worker and the place in its store.
HANDLE = "troll_old_handle"

_REMEDY = (
    "A batch must be scored by the worker that updates on it, one batch after the other; where a trainer "
    "cannot keep to that, set actor_rollout_ref.actor.policy_loss.troll_old_store=queue."
)


class Kept(Protocol):
    """Where an update finds the old policy."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The fields without which a batch cannot be updated on."""

    @property
    def remedy(self) -> str:
        """Why they may be missing, and what to do."""

    @property
    def nbytes(self) -> int:
        """Of all that waits here."""

    @property
    def record_seconds(self) -> float:
        """Of the pass that recorded them."""

    def take(self, batch: Any, device: Any) -> Mapping[str, Any]:
        """The fields of a micro-batch, jagged, on `device`."""


class OldPolicyStore:
    """Records of one batch at a time: a pass that scores the next one forgets the last."""

    def __init__(self, local: bool, worker: int, *, keeps_head: bool) -> None:
        self._local, self._worker = local, worker
        self._keeps = local or keeps_head
        self._pass = 0
        self._earlier: set[int] = set()
        self._rows: list[dict[str, Tensor]] = []
        self._kept_bytes = 0
        self.head: HeadSnapshot | None = None
        """The LM head their hidden states met; None if it is frozen, or if logits were recorded."""
        self.record_seconds = 0.0
        """Of the pass that recorded them."""
        self.remedy = (
            "the old policy was not scored by this engine. TROLL needs "
            "algorithm.rollout_correction.bypass_mode=False, so that verl recomputes old log-probabilities, "
            "and trainer.use_v1=True, which keeps what is recorded beside them; or, in its place, the policy "
            f"that sampled: {SAMPLER_SWITCH}, which records it."
        )

    @property
    def nbytes(self) -> int:
        """Of all that waits here."""
        return self._kept_bytes + snapshot_bytes(self.head)

    @property
    def needed(self) -> tuple[str, ...]:
        """The fields without which a batch cannot be updated on."""
        return (*((HANDLE,) if self._keeps else ()), *(() if self._local else carrier.FIELDS))

    @property
    def local(self) -> bool:
        """Whether records stay on the worker."""
        return self._local

    @contextmanager
    def recording(self) -> Iterator[None]:
        """For the pass that scores a batch; all processes enter it together."""
        self._earlier.add(self._pass)
        self._rows, self._kept_bytes, self.head = [], 0, None
        self._pass = _draw()
        start = time.perf_counter()
        yield
        self.record_seconds = time.perf_counter() - start

    def put(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep a micro-batch's records, jagged [B, j, ...] each, or let them travel.

        Returns:
            Fields of the batch, a handle for each sequence among them.
        """
        sequences = next(iter(fields.values())).shape[0]
        if not self._keeps:
            return dict(fields)
        handles = torch.tensor([self._pass, self._worker, 0], dtype=torch.long).expand(sequences, -1).clone()
        handles[:, 2] = torch.arange(len(self._rows), len(self._rows) + sequences)
        if self._local:
            kept = {name: _host_copy(field.values()) for name, field in fields.items()}
            self._kept_bytes += sum(values.nbytes for values in kept.values())
            split = {
                name: values.split(fields[name].offsets().diff().tolist())  # type: ignore[attr-defined]
                for name, values in kept.items()
            }
            self._rows += [{name: rows[i] for name, rows in split.items()} for i in range(sequences)]
            fields = {}
        else:
            self._rows += [{}] * sequences
        return {**fields, HANDLE: torch.nested.as_nested_tensor(list(handles), layout=torch.jagged)}

    def knows(self, batch: Any) -> bool:
        """Whether the old policy of every sequence of a batch can be found."""
        if any(name not in batch.keys() for name in self.needed):  # noqa: SIM118  (a TensorDict)
            return False
        return not self._keeps or all(self._trouble(*handle) is None for handle in handles(batch))

    def take(self, batch: Any, device: Any) -> Mapping[str, Any]:
        """The fields of a micro-batch again, jagged, on `device`.

        Raises:
            TetherError: a record that is not here, with the cause.
        """
        if not self._keeps:
            return batch
        found = handles(batch)
        for handle in found:
            trouble = self._trouble(*handle)
            if trouble is not None:
                raise TetherError(f"The old policy of a sequence is not here: {trouble} {_REMEDY}")
        if not self._local:
            return batch
        rows = [self._rows[place] for _, _, place in found]
        return {name: _together([row[name] for row in rows], device) for name in rows[0]}

    def _trouble(self, which: int, worker: int, place: int) -> str | None:
        """Why a handle leads nowhere, or None."""
        if which != self._pass:
            if which in self._earlier:
                return "a later batch was scored since, and one is kept at a time."
            return (
                "it was scored before this worker started. A resumed run must score its batches again: let "
                "verl recompute old log-probabilities (algorithm.rollout_correction.bypass_mode=False)."
            )
        if self._local and (worker != self._worker or place >= len(self._rows)):
            return f"worker {worker} scored it, and it came to worker {self._worker}."
        return None


def _draw() -> int:
    """A number for a pass that none had before, in whatever process; the same on all processes."""
    drawn = [secrets.randbits(62)]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(drawn, src=0)
    return drawn[0]


def handles(batch: Any) -> list[list[int]]:
    """Of a batch's sequences: the pass, the worker and the place in its store."""
    field = batch[HANDLE]
    return (field.values() if field.is_nested else field).view(-1, 3).tolist()


def _host_copy(values: Tensor) -> Tensor:
    """In host memory, page-locked if it comes from an accelerator, in one piece a micro-batch."""
    on_device = values.device.type != "cpu"
    kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_device)
    return kept.copy_(values.detach())


def _together(rows: list[Tensor], device: Any) -> Tensor:
    """One jagged tensor of rows that are copied straight to the device, none waiting for another."""
    lengths = torch.tensor([len(row) for row in rows])
    values = torch.empty((int(lengths.sum()), *rows[0].shape[1:]), dtype=rows[0].dtype, device=device)
    for part, row in zip(values.split(lengths.tolist()), rows, strict=True):
        part.copy_(row, non_blocking=True)
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(device)
    return torch.nested.nested_tensor_from_jagged(values, offsets)
