"""What a sampler reported as fields of verl's batch: ragged, as it came, to be checked where it is used.

| field | each sequence | bytes |
|---|---|---|
| `troll_sampler_count` | ids reported of each response token; 0 without a report, negative if nothing else could be drawn | 2 a token |
| `troll_sampler_ids`, `troll_sampler_log_probs` | ids and log-probabilities, token after token | 8 an id |
| `troll_sampler_calls` | calls of the trainer's update that the sampler's weights had behind them; -1 if unknown | 4 a token |
| `troll_sampler_updates` | optimizer steps that one such call makes | 8 |

The log-probabilities of the drawn tokens are verl's own `rollout_log_probs`.
"""  # noqa: E501

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tether.errors import TetherError
from tether.integrations.sampler_reports import Reported
from tether.projection import SampledPolicy
from tether.projection.sparse import EMPTY, SparseLogProbs

COUNT, IDS, LOG_PROBS = "troll_sampler_count", "troll_sampler_ids", "troll_sampler_log_probs"
CALLS, UPDATES = "troll_sampler_calls", "troll_sampler_updates"
FIELDS = (COUNT, IDS, LOG_PROBS, CALLS, UPDATES)


@dataclass(frozen=True)
class Turn:
    """One answer of the engine: what it was asked to continue, and what it said of each token it drew."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    """`Reported`, or plain numbers of an engine that reports nothing else."""
    truncated: bool
    """Whether sampling kept a set of ids."""


def pack(
    turns: list[Turn],
    prompt_ids: list[int],
    response_ids: list[int],
    response_mask: list[int],
    *,
    calls_of: Callable[[int], int],
    updates: int,
) -> dict[str, Tensor]:
    """Make the five fields of one sequence.

    A turn is part of it if its prompt is how the sequence begins, up to the first token that is not there as
    drawn: what follows was drawn after something else. Of two turns that fit, the one that fits longer holds.
    Tokens that do not count have no record.

    Args:
        calls_of: from a version of the weights to the trainer's update calls behind it.
        updates: optimizer steps of one such call.

    Example:
        >>> from tether.integrations.sampler_reports import report_sequence
        >>> said = report_sequence([5, 6], [[5, 7], [6]], [[-0.1, -2.5], [0.0]], 0, version=3)
        >>> turn = Turn([1], [5, 6], list(said), truncated=False)
        >>> fields = pack([turn], [1], [5, 6, 8], [1, 1, 0], calls_of=lambda version: version, updates=4)
        >>> fields["troll_sampler_count"].tolist(), fields["troll_sampler_calls"].tolist()
        ([2, 1, 0], [3, 3, -1])
    """
    length = len(response_ids)
    count, calls = np.zeros(length, dtype=np.int16), np.full(length, -1, dtype=np.int32)
    ids: list[Any] = [np.zeros(0, dtype=np.int32)] * length
    values: list[Any] = [np.zeros(0, dtype=np.float32)] * length
    sequence = prompt_ids + response_ids
    # The longest match last, so that it is the one that stays.
    for turn, fits in sorted(((turn, _fits(turn, sequence)) for turn in turns), key=operator.itemgetter(1)):
        start = len(turn.prompt_ids) - len(prompt_ids)
        if start < 0:
            continue
        for said, position in zip(turn.log_probs, range(start, fits - len(prompt_ids)), strict=False):
            if not response_mask[position] or not isinstance(said, Reported):
                continue
            reported_ids, reported = said.block.ids[said.row], said.block.log_probs[said.row]
            held = (reported_ids != EMPTY) & (reported != -np.inf)
            ids[position], values[position] = reported_ids[held].astype(np.int32), reported[held]
            count[position] = -held.sum() if turn.truncated else held.sum()
            if said.block.version is not None:
                calls[position] = calls_of(said.block.version)
    return {
        COUNT: torch.from_numpy(count),
        IDS: torch.from_numpy(np.concatenate(ids or [np.zeros(0, dtype=np.int32)])),
        LOG_PROBS: torch.from_numpy(np.concatenate(values or [np.zeros(0, dtype=np.float32)])),
        CALLS: torch.from_numpy(calls),
        UPDATES: torch.tensor([updates]),
    }


def _fits(turn: Turn, sequence: list[int]) -> int:
    """Up to where a sequence is what the turn was asked to continue and what it drew; 0 if not so far."""
    start = len(turn.prompt_ids)
    if sequence[:start] != turn.prompt_ids:
        return 0
    drawn = zip(turn.token_ids, sequence[start:], strict=False)
    return start + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], drawn))


def unpack(batch: Mapping[str, Any], vocabulary_size: int, lag: Tensor | None) -> SampledPolicy:
    """The policy that sampled the tokens that count, [N, K] in the order of the batch.

    Args:
        batch: verl's micro-batch with these fields, `old_log_probs` those of the engine.
        lag: from `lags`, [B, T].

    Raises:
        TetherError: a token that counts without a record.
        InvalidInputError: what `SampledPolicy.from_report` refuses, by sequence and position.
    """
    mask = padded(batch["response_mask"]) > 0
    count = _count(batch, mask)
    if bool((mask & (count == 0)).any()):
        row, position = (int(i) for i in (mask & (count == 0)).nonzero()[0])
        raise TetherError(
            f"sequence {row}, position {position}: the sampler left no record of this token "
            f"({int((mask & (count == 0)).sum())} in all). troll_anchor=sampler needs an engine that reports "
            "(vLLM, through verl's own client) and an agent loop that keeps the tokens it was given; "
            "otherwise set actor_rollout_ref.actor.policy_loss.troll_anchor=trainer and "
            "algorithm.rollout_correction.bypass_mode=False."
        )
    drawn, own = padded(batch["responses"]), padded(batch["old_log_probs"])
    ids, values = _spread(batch, count)
    few = count < 0
    parts = []
    for truncated, chosen in ((False, mask & ~few), (True, mask & few)):
        if bool(chosen.any()):
            policy = SampledPolicy.from_report(
                drawn, ids, values, chosen, sampled_log_probs=own.to(values.dtype), truncated=truncated,
                vocabulary_size=vocabulary_size,
            )  # fmt: skip
            parts.append((chosen, policy.support))
    support = _together(parts, mask) if parts else SparseLogProbs(ids, values, values.new_zeros(mask.shape))
    return SampledPolicy(support, drawn, lag)[mask]


def lags(batch: Mapping[str, Any], calls: int, updates: int, *, by_sequence: bool) -> Tensor | None:
    """Optimizer steps between the weights that sampled and those of now, [B, T]; None if one is unknown.

    Args:
        calls, updates: of the trainer's update that are done, and optimizer steps of the present one.
        by_sequence: all tokens of a sequence have its oldest one's.

    Raises:
        TetherError: weights from later than now.
    """
    mask = padded(batch["response_mask"]) > 0
    rows = [_fitting(row, counted) for row, counted in zip(batch[CALLS].unbind(), mask, strict=True)]
    then = torch.where(mask, torch.stack(rows), calls).long()
    if bool((then < 0).any()):
        return None
    if bool((then > calls).any()):
        raise TetherError(
            f"The sampler's weights had {int(then.max())} calls of the update behind them and the trainer "
            f"counts {calls}. A run that resumes needs its learning-rate schedule, which counts them: leave "
            "actor_rollout_ref.actor.checkpoint.load_contents=['model', 'optimizer', 'extra']."
        )
    a_call = batch[UPDATES].values() if batch[UPDATES].is_nested else batch[UPDATES]
    lag = torch.where(mask, (calls - then) * a_call.view(-1, 1).to(then.device) + updates, 0)
    return lag.amax(1, keepdim=True).expand_as(lag) if by_sequence else lag


def padded(field: Tensor) -> Tensor:
    """A jagged field as [B, T], zeros at the end."""
    return field.to_padded_tensor(0) if field.is_nested else field


def _fitting(row: Tensor, counted: Tensor) -> Tensor:
    """[j] to [T]. verl fills batches up with one token that does not count, and a real sequence's fields."""
    width = counted.shape[0]
    return torch.nn.functional.pad(row[:width], (0, max(0, width - len(row))))


def _count(batch: Mapping[str, Any], mask: Tensor) -> Tensor:
    return torch.stack([_fitting(row, m) for row, m in zip(batch[COUNT].unbind(), mask, strict=True)]).long()


def _spread(batch: Mapping[str, Any], count: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of each token, [B, T, K]."""
    width = max(1, int(count.abs().max()) if count.numel() else 1)
    ids = torch.full((*count.shape, width), EMPTY, dtype=torch.long, device=count.device)
    values = torch.full((*count.shape, width), -torch.inf, device=count.device)
    reported = zip(batch[COUNT].unbind(), batch[IDS].unbind(), batch[LOG_PROBS].unbind(), strict=True)
    for row, (counts, its_ids, its_values) in enumerate(reported):
        held = counts.long().abs()
        position = torch.repeat_interleave(torch.arange(len(held), device=held.device), held)
        slot = torch.arange(len(position), device=held.device) - (held.cumsum(0) - held)[position]
        here = (position < count.shape[1]) & (slot < width)
        ids[row, position[here], slot[here]] = its_ids[here].long()
        values[row, position[here], slot[here]] = its_values[here].float()
    return ids, values


def _together(parts: list[tuple[Tensor, SparseLogProbs]], mask: Tensor) -> SparseLogProbs:
    """One support of the tokens of each part, [B, T, K]."""
    if len(parts) == 1:
        return parts[0][1]
    width = max(of.ids.shape[-1] for _, of in parts)
    first = parts[0][1]
    ids = first.ids.new_full((*mask.shape, width), EMPTY)
    log_probs = first.log_probs.new_full((*mask.shape, width), -torch.inf)
    log_tail = torch.zeros_like(first.log_tail)
    for chosen, of in parts:
        held = of.ids.shape[-1]
        ids[..., :held] = torch.where(chosen[..., None], of.ids, ids[..., :held])
        log_probs[..., :held] = torch.where(chosen[..., None], of.log_probs, log_probs[..., :held])
        log_tail = torch.where(chosen, of.log_tail, log_tail)
    return SparseLogProbs(ids, log_probs, log_tail)
