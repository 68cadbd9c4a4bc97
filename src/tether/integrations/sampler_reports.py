"""What a sampler said of each token, carried through code that only knows lists of log-probabilities.

TRL moves log-probabilities of sampled tokens as lists of floats: it cuts them at a length, appends later
turns, puts zeros where tools wrote. A `Reported` is such a float and also knows the distribution it came
from, so that records stay aligned with their tokens whatever TRL does with the lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from tether.errors import InvalidInputError
from tether.projection import SampledPolicy
from tether.projection.sparse import EMPTY


@dataclass(frozen=True, eq=False)
class ReportBlock:
    """Distributions of N sampled tokens, as reported."""

    ids: npt.NDArray[np.int64]
    """[N, K]; `EMPTY` in unused slots."""
    log_probs: npt.NDArray[np.float32]
    """[N, K]."""
    least: npt.NDArray[np.float32] | None = None
    """A number that no log-probability is below, [N], where whole distributions were at hand."""
    version: int | None = None
    """Of the weights that sampled, where the engine counts them."""


class Reported(float):
    """The log-probability of a sampled token, and where its distribution stands."""

    __slots__ = ("block", "row")
    block: ReportBlock
    row: int

    def __new__(cls, log_prob: float, block: ReportBlock, row: int) -> Reported:
        """A float, with its record."""
        made = float.__new__(cls, log_prob)
        made.block, made.row = block, row
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """As it travels between processes: tokens of one block go on sharing it."""
        return Reported, (float(self), self.block, self.row)


def at_reported_ids(ids: Tensor, log_tail: Tensor) -> dict[str, Tensor]:
    """Asks a sparse head for the network as a sampler's reports allow to see it (`SampledPolicy.see`)."""
    return {"support_ids": ids, "support_truncated": torch.isneginf(log_tail)}


def ids_to_ask_for(reported: int, kept: int | None, vocabulary_size: int | None = None) -> int:
    """How many of the likeliest ids vLLM is asked for, so that a truncated distribution is there as a whole.

    It may also keep ids that are as likely as the last of its top-k. Logits in half precision take few
    values, so that there often are some: in bfloat16 up to 8 beside SmolLM2's 64, at three tokens of four.

    Args:
        reported: ids wanted of any distribution.
        kept: the top-k that is sampled with; None, 0 or negative for all.
        vocabulary_size: there are no more than so many.

    >>> ids_to_ask_for(64, None), ids_to_ask_for(64, 20), ids_to_ask_for(64, 64), ids_to_ask_for(64, 64, 100)
    (64, 64, 128, 100)
    """
    twice = 2 * (kept or 0)
    return max(reported, twice if vocabulary_size is None else min(twice, vocabulary_size))


def report_sequence(
    completion_ids: list[int],
    ids: list[list[int]],
    log_probs: list[list[float | None]],
    sequence: int,
    version: int | None = None,
) -> list[Reported]:
    """One completion's records from an engine's lists: some ids of each token, the drawn one among them.

    `version` is of the weights that sampled, if the engine counts them.

    Raises:
        InvalidInputError: a drawn id that the engine did not report, by sequence and position.
    """
    width = max((len(row) for row in ids), default=0)
    padded = np.full((len(ids), width), EMPTY, dtype=np.int64)
    values = np.full((len(ids), width), -np.inf, dtype=np.float32)
    own = []
    for position, (drawn, row, numbers) in enumerate(zip(completion_ids, ids, log_probs, strict=True)):
        padded[position, : len(row)] = row
        values[position, : len(row)] = [np.nan if x is None else x for x in numbers]
        if drawn not in row:
            raise InvalidInputError(
                f"sequence {sequence}, position {position}: the engine drew id {drawn} and reported {row}. "
                "Ask for "
                "the drawn token's log-probability too (vLLM's logprobs does)."
            )
        own.append(float(values[position, row.index(drawn)]))
    block = ReportBlock(padded, values, version=version)
    return [Reported(value, block, position) for position, value in enumerate(own)]


def collect(
    reported: list[list[float]],
    completion_ids: Tensor,
    mask: Tensor,
    *,
    truncated: bool,
    vocabulary_size: int | None = None,
) -> SampledPolicy:
    """The policy that sampled a batch, [B, T], from the lists that came with it.

    Args:
        reported: a list a completion, with a `Reported` for each token of the model's own.
        completion_ids, mask: [B, T], padded on the right; a zero for what the model did not write.
        truncated: sampling kept a set of ids, all of which are reported.
        vocabulary_size: as in `SampledPolicy.from_report`.

    Raises:
        InvalidInputError: a token of the model's own without a record, or what `SampledPolicy` refuses.
    """
    shape = tuple(completion_ids.shape)
    turns = [turn for sequence, values in enumerate(reported) for turn in _turns(sequence, values)]
    width = max((turn.block.ids.shape[1] for turn in turns), default=1)
    ids = np.full((*shape, width), EMPTY, dtype=np.int64)
    log_probs = np.full((*shape, width), -np.inf, dtype=np.float32)
    own, least = np.zeros(shape, dtype=np.float32), np.full(shape, -np.inf, dtype=np.float32)
    known = np.zeros(shape, dtype=bool)
    for turn in turns:
        tokens, rows, block = turn.tokens, turn.rows, turn.block
        known[tokens], own[tokens] = True, turn.log_probs
        ids[tokens][:, : block.ids.shape[1]] = block.ids[rows]
        log_probs[tokens][:, : block.ids.shape[1]] = block.log_probs[rows]
        if block.least is not None:
            least[tokens] = block.least[rows]
    mask = mask.cpu()
    _refuse_unrecorded((mask > 0) & ~torch.from_numpy(known))
    has_least = bool(np.isfinite(least[known]).all()) and not truncated
    policy = SampledPolicy.from_report(
        completion_ids.cpu(), torch.from_numpy(ids), torch.from_numpy(log_probs), mask,
        sampled_log_probs=torch.from_numpy(own), truncated=truncated, vocabulary_size=vocabulary_size,
        log_tail_min=torch.from_numpy(np.where(known, least, np.float32(0.0))) if has_least else None,
    )  # fmt: skip
    return policy.to(completion_ids.device)


@dataclass(frozen=True)
class _Turn:
    """Tokens in a row whose records share a block."""

    tokens: tuple[int, slice]
    """Their sequence and their positions."""
    block: ReportBlock
    rows: list[int]
    """Of the block."""
    log_probs: list[float]
    """Of the drawn tokens."""


def _turns(sequence: int, values: list[float]) -> Iterator[_Turn]:
    start = 0
    for block, turn in itertools.groupby(values, _block_of):
        same = list(turn)
        if block is not None:
            rows = [value.row for value in same if isinstance(value, Reported)]
            yield _Turn((sequence, slice(start, start + len(same))), block, rows, same)
        start += len(same)


def _block_of(value: float) -> ReportBlock | None:
    return value.block if isinstance(value, Reported) else None


def _refuse_unrecorded(missing: Tensor) -> None:
    if bool(missing.any()):
        sequence, position = (int(i) for i in missing.nonzero()[0])
        raise InvalidInputError(
            f"sequence {sequence}, position {position}: the sampler left no record of this token "
            f"({int(missing.sum())} in all). A rollout_func must hand on the log-probabilities that "
            'vllm_generation.generate returns; other sources of completions go with anchor="trainer".'
        )


class StepRecorder:
    """The likeliest ids of what is sampled from, noted step by step while responses are written together.

    Args:
        top_k: ids kept of each token.
        truncated: sampling itself keeps a set of ids, of which each is noted, however many they are.
    """

    def __init__(self, top_k: int, *, truncated: bool = False) -> None:
        self._top_k, self._truncated = top_k, truncated
        self._rows: list[Tensor] = []
        self._kept: list[tuple[Tensor, ...]] = []  # ids, log-probabilities, the least, the drawn one's own

    def note(self, rows: Tensor, log_probs: Tensor, drawn: Tensor) -> None:
        """One step: of some responses [n] the log-probabilities [n, V] and what was drawn [n]."""
        possible = int((log_probs > -torch.inf).sum(-1).amax()) if self._truncated else self._top_k
        top_k = min(max(self._top_k, possible), log_probs.shape[-1])
        values, ids = log_probs.topk(top_k)
        own = log_probs.gather(-1, drawn[:, None]).squeeze(-1)
        self._rows.append(rows)
        self._kept.append((ids, values.float(), log_probs.amin(-1).float(), own.float()))

    def records(self, completion_ids: list[list[int]]) -> list[list[Reported]]:
        """A list for each completion, of as many tokens as it has."""
        rows, lengths = torch.cat(self._rows), [len(ids) for ids in completion_ids]
        steps = rows.bincount(minlength=len(lengths))  # a response may be written on after its end
        order = rows.argsort(stable=True)  # the steps of the first response, of the second, ...
        ids, values, least, own = (_joined(kept).cpu()[order] for kept in zip(*self._kept, strict=True))
        block = ReportBlock(ids.numpy(), values.numpy(), least.numpy())
        numbers, starts = own.tolist(), (steps.cumsum(0) - steps).tolist()
        return [
            [Reported(numbers[place], block, place) for place in range(start, start + length)]
            for start, length in zip(starts, lengths, strict=True)
        ]


def _joined(steps: Sequence[Tensor]) -> Tensor:
    """Steps of [n] or [n, K], one after another; narrow ones are filled up with empty slots."""
    widest = max(step.shape[-1] for step in steps)
    if steps[0].dim() == 1:
        return torch.cat(list(steps))
    nothing = -torch.inf if steps[0].is_floating_point() else EMPTY
    return torch.cat([pad(step, (0, widest - step.shape[-1]), value=nothing) for step in steps])


class GenerationRecorder:
    """Watches Transformers' ``generate``: the likeliest ids of what it really samples from, step by step.

    The last of its logits processors, so that temperature, top-k, top-p and whatever else a model asks for
    have acted. Use it as a context, then ask for the records.
    """

    def __init__(self, model: Any, top_k: int, *, truncated: bool = False) -> None:
        self._model, self._steps = model, StepRecorder(top_k, truncated=truncated)
        self._waiting: Tensor | None = None  # the last step's distributions, until its tokens are known

    def __enter__(self) -> GenerationRecorder:
        """Join the processors of every `generate` of this model."""
        make = self._model._get_logits_processor

        def with_recorder(*args: Any, **kwargs: Any) -> Any:
            processors = make(*args, **kwargs)
            processors.append(self)
            return processors

        self._model._get_logits_processor = with_recorder
        return self

    def __exit__(self, *_: Any) -> None:
        """Leave them."""
        del self._model._get_logits_processor

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """One step: tokens so far [B, L] and the logits to sample from [B, V]."""
        self._settle(input_ids[:, -1])
        self._waiting = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)
        return scores

    def _settle(self, drawn: Tensor) -> None:
        if self._waiting is not None:
            self._steps.note(torch.arange(len(drawn)), self._waiting, drawn)
            self._waiting = None

    def records(self, completion_ids: list[list[int]]) -> list[list[Reported]]:
        """A list for each completion, of as many tokens as it has."""
        if self._waiting is not None:
            # What the last step drew is in the longest completions alone.
            longest = max(map(len, completion_ids))
            last = [ids[-1] if len(ids) == longest else 0 for ids in completion_ids]
            self._settle(torch.tensor(last, device=self._waiting.device))
        return self._steps.records(completion_ids)
