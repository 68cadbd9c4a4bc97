"""A sampler's records on their way through TRL's asynchronous trainer: worker, queue, packing and collator.

TRL's `RolloutSample` has one log-probability a token. Here the object in that place also knows the likeliest
ids of each token, so that whatever carries samples carries these, from the process that talks to vLLM to the
loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.errors import ConfigError, EngineError, InvalidInputError, TetherError
from tether.integrations.sampler_reports import Reported
from tether.integrations.trl_seam import TRL
from tether.projection import SampledPolicy
from tether.projection.sparse import EMPTY

#: What the collator adds to TRL's batch: of each loss term, [rows, M, K] and [rows, M].
IDS, LOG_PROBS, LOG_TAIL, STEP = "sampler_ids", "sampler_log_probs", "sampler_log_tail", "sampler_step"
#: Sequences that a queue remembers.
_REMEMBERED = 8
LOOK_AT_ITS_OUTPUT = "What it printed last says why; a checkpoint is there to continue from."
_FILL: dict[str, float] = {IDS: EMPTY, LOG_PROBS: -torch.inf, LOG_TAIL: 0.0, STEP: 0}


@dataclass(frozen=True, eq=False)
class SamplerRecords:
    """What takes the place of a `RolloutSample`'s ``old_log_probs``: of N sampled tokens of a sequence of L.

    Arrays alone, so that it travels between processes.

    Example:
        >>> from tether.integrations.sampler_reports import report_sequence
        >>> drawn = report_sequence([5], [[5, 7]], [[-0.1, -2.5]], 0)
        >>> records = SamplerRecords.of([0.0, 0.0, *drawn])  # two tokens of a prompt first
        >>> records.positions.tolist(), records.ids.tolist()
        ([2], [[5, 7]])
    """

    length: int
    """L."""
    positions: npt.NDArray[np.int64]
    """Of the sampled tokens in their sequence, [N]."""
    own: npt.NDArray[np.float32]
    """Their log-probabilities, [N]."""
    ids: npt.NDArray[np.int64]
    """[N, K]; `EMPTY` in unused slots."""
    log_probs: npt.NDArray[np.float32]
    """[N, K]."""

    @classmethod
    def of(cls, values: list[float]) -> SamplerRecords:
        """Of a sequence's log-probabilities: those of `report_sequence`, zeros where nothing was sampled."""
        positions = [i for i, value in enumerate(values) if isinstance(value, Reported)]
        reported = [value for value in values if isinstance(value, Reported)]
        width = max((value.block.ids.shape[1] for value in reported), default=1)
        ids = np.full((len(reported), width), EMPTY, dtype=np.int64)
        log_probs = np.full((len(reported), width), -np.inf, dtype=np.float32)
        for row, value in enumerate(reported):
            held = value.block.ids.shape[1]
            ids[row, :held] = value.block.ids[value.row]
            log_probs[row, :held] = value.block.log_probs[value.row]
        return cls(
            len(values),
            np.array(positions, dtype=np.int64),
            np.array(reported, dtype=np.float32),
            ids,
            log_probs,
        )

    def policy(
        self, input_ids: Tensor, mask: Tensor, *, truncated: bool, vocabulary_size: int
    ) -> SampledPolicy:
        """The policy that sampled the tokens under the mask [L], in their order.

        Raises:
            InvalidInputError: a token under the mask without a record, or what `SampledPolicy.from_report`
                refuses, by position in the sequence.
        """
        if self.length != len(input_ids):
            raise InvalidInputError(
                f"the records are of {self.length} tokens and the sequence has {len(input_ids)}. A "
                "record stands at its token's place, zeros where nothing was sampled."
            )
        at = torch.from_numpy(self.positions)
        known = torch.zeros(self.length, dtype=torch.bool).index_fill(0, at, value=True)
        missing = (mask > 0) & ~known
        if bool(missing.any()):
            raise InvalidInputError(
                f"sequence 0, position {int(missing.nonzero()[0])}: the sampler left no record of this "
                f"token, which the loss is taken over ({int(missing.sum())} in all). Records come from "
                "report_sequence; tokens that were not sampled belong under a zero of completion_mask."
            )
        width = self.ids.shape[1]
        ids = torch.full((1, self.length, width), EMPTY)
        log_probs = torch.full((1, self.length, width), -torch.inf)
        own = torch.zeros(1, self.length)
        ids[0, at], log_probs[0, at] = torch.from_numpy(self.ids), torch.from_numpy(self.log_probs)
        own[0, at] = torch.from_numpy(self.own)
        whole = SampledPolicy.from_report(
            input_ids[None], ids, log_probs, mask[None],
            sampled_log_probs=own, truncated=truncated, vocabulary_size=vocabulary_size,
        )  # fmt: skip
        return whole[0, mask > 0]


@dataclass(frozen=True, eq=False)
class CheckedRecords:
    """In the place of a sample's ``old_log_probs`` in the trainer's process."""

    policy: SampledPolicy
    """Of the tokens the loss is taken over, [N]."""
    step: int
    """Optimizer steps the sampler's weights had behind them."""
    positions: Tensor
    """[N]."""
    length: int

    def tolist(self) -> list[float]:
        """A log-probability a token, zero where nothing was sampled: what TRL packs."""
        numbers: list[float] = (
            torch.zeros(self.length, dtype=self.policy.log_probs.dtype)
            .index_copy(0, self.positions, self.policy.log_probs)
            .tolist()
        )
        return numbers


class CheckedQueue:
    """The rollout worker's queue as TRL reads it: records are checked as they come in.

    Args:
        inner: of the rollout worker.
        steps: the optimizer step at which each version of the policy was published.
        truncated: sampling keeps a set of ids, all of which are reported.
        vocabulary_size: of the model.
    """

    def __init__(self, inner: Any, steps: dict[int, int], *, truncated: bool, vocabulary_size: int) -> None:
        self._inner, self._steps = inner, steps
        self._truncated, self._vocabulary_size = truncated, vocabulary_size
        self._arrived = 0
        #: The latest sequences, a handful, of as many prompts.
        self.latest: deque[Tensor] = deque(maxlen=_REMEMBERED)
        self._group: int | None = None

    def qsize(self) -> int:
        """Samples that wait."""
        size: int = self._inner.qsize()
        return size

    def get(self, timeout: float | None = None) -> Any:
        """The next sample.

        Raises:
            queue.Empty: none within the timeout.
            EngineError: the process that fills it has ended.
            ConfigError: a worker that does not record, or a version that was never published.
            InvalidInputError: records that cannot be the sampler's, by sequence and position.
        """
        try:
            sample = self._inner.get(timeout=timeout)
        except (EOFError, OSError) as error:  # the latter in the middle of a sample
            raise EngineError(f"The process that writes rollouts has ended. {LOOK_AT_ITS_OUTPUT}") from error
        number, self._arrived = self._arrived, self._arrived + 1
        records = sample.old_log_probs
        if not isinstance(records, SamplerRecords):
            raise ConfigError(
                f"The rollout worker's samples have {type(records).__name__} as old_log_probs; the "
                "region around the sampler needs SamplerRecords.of(...) there "
                "(tether.integrations.trl_async_records)."
            )
        if sample.model_version not in self._steps:
            raise ConfigError(
                f"A sample is of version {sample.model_version} of the policy, which was never published "
                f"(published: {sorted(self._steps)}). A rollout worker must tag samples with what "
                "update_model_version told it."
            )
        mask = torch.as_tensor(sample.completion_mask).clone()
        mask[:1] = 0  # which nothing predicts
        try:
            policy = records.policy(
                torch.as_tensor(sample.input_ids), mask,
                truncated=self._truncated, vocabulary_size=self._vocabulary_size,
            )  # fmt: skip
        except InvalidInputError as error:
            named = str(error).replace("sequence 0,", f"sequence {number},", 1)
            raise InvalidInputError(
                f"prompt group {sample.group_id}, version {sample.model_version}: {named}"
            ) from error
        if sample.group_id != self._group:
            self._group = sample.group_id
            self.latest.append(torch.as_tensor(sample.input_ids))
        positions = mask.nonzero()[:, 0]
        checked = CheckedRecords(policy, self._steps[sample.model_version], positions, len(mask))
        return replace(sample, old_log_probs=checked)


class RecordCollator:
    """TRL's collator, and the records of each loss term beside its batch."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """TRL's batch of packed rows, with `IDS`, `LOG_PROBS`, `LOG_TAIL` and `STEP`.

        Raises:
            TetherError: loss terms in another order than samples and positions.
        """
        batch = self._collate(examples)
        rows = [[sample["old_log_probs"] for sample in row.samples] for row in examples[0]]
        width = max(records.policy.support.ids.shape[-1] for row in rows for records in row)
        added = [_row_entries(row, width) for row in rows]
        for index, row in enumerate(rows):
            packed = batch["old_log_probs"][index][batch["token_index"][index] >= 0]
            expected = torch.cat([records.policy.log_probs for records in row]).to(packed.dtype)
            if not torch.equal(packed, expected):
                raise TetherError(
                    "TRL packed the loss terms of a row in another order than samples and positions, so the "
                    f"records would be other tokens'. Tested is {TRL}."
                )
        for name, fill in _FILL.items():
            batch[name] = pad_sequence([entry[name] for entry in added], True, fill)
        return batch


def _row_entries(row: list[CheckedRecords], width: int) -> dict[str, Tensor]:
    """Of one row's loss terms: samples in their order, positions in theirs."""

    def widened(values: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(values, (0, width - values.shape[-1]), value=fill)

    supports = [records.policy.support for records in row]
    return {
        IDS: torch.cat([widened(of.ids, EMPTY) for of in supports]),
        LOG_PROBS: torch.cat([widened(of.log_probs, -torch.inf) for of in supports]),
        LOG_TAIL: torch.cat([of.log_tail for of in supports]),
        STEP: torch.cat([torch.full((len(of.ids),), records.step)
                         for of, records in zip(supports, row, strict=True)]),
    }  # fmt: skip
