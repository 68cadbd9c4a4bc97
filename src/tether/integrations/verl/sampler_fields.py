"""What a sampler reported as fields of verl's batch: ragged, as it came, to be checked where it is used.

| field | each sequence | bytes |
|---|---|---|
| `troll_sampler_count` | ids reported of each response token; 0 without a report, negative if nothing else could be drawn | 2 a token |
| `troll_sampler_ids`, `troll_sampler_log_probs` | ids and log-probabilities, token after token | 8 an id |
| `troll_sampler_calls` | calls of the trainer's update that the sampler's weights had behind them; -1 if unknown | 4 a token |
| `troll_sampler_updates` | optimizer steps of one such call, as configured: for calls that the engine did not see | 8 |

The log-probabilities of the drawn tokens are verl's own `rollout_log_probs`.
"""  # noqa: E501

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tether.errors import InvalidInputError, TetherError
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
    mass: float = 1.0,
) -> dict[str, Tensor]:
    """Make the five fields of one sequence.

    A turn is part of it if its prompt is how the sequence begins, up to the first token that is not there as
    drawn: what follows was drawn after something else. Of two turns that fit, the one that fits longer holds.
    Tokens that do not count have no record.

    Args:
        calls_of: from a version of the weights to the trainer's update calls behind it.
        updates: optimizer steps of one such call, as configured.
        mass: keep the likeliest ids that hold this much probability together, and the drawn one; of a
            truncated turn all.

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
            if mass < 1 and not turn.truncated:
                held &= _needed(reported, held, mass) | (reported_ids == response_ids[position])
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


def _needed(log_probs: Any, held: Any, mass: float) -> Any:
    """The likeliest of a token's ids that hold `mass` together, [K]."""
    probs = np.where(held, np.exp(log_probs), 0.0)
    if not probs.sum() <= 1.01:  # no distribution, or NaN: kept whole, to be refused where it is used
        return held
    order = np.argsort(-probs, kind="stable")
    needed = np.zeros_like(held)
    needed[order] = probs[order].cumsum() - probs[order] < mass
    return needed


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
    at, count = mask.nonzero(), _counts(batch, mask)
    missing = (count == 0).nonzero().flatten()
    if missing.numel():
        row, position = at[missing[0]].tolist()
        raise TetherError(
            f"sequence {row}, position {position}: the sampler left no record of this token "
            f"({missing.numel()} in all). troll_anchor=sampler needs an engine that reports "
            "(vLLM, through verl's own client) and an agent loop that keeps the tokens it was given and "
            "samples at actor_rollout_ref.rollout.temperature; "
            "otherwise set actor_rollout_ref.actor.policy_loss.troll_anchor=trainer and "
            "algorithm.rollout_correction.bypass_mode=False."
        )
    ids, values = _reported(batch, mask, count)
    drawn, own = padded(batch["responses"])[mask], padded(batch["old_log_probs"])[mask].to(values.dtype)
    parts = []
    for truncated in (False, True):
        chosen = ((count < 0) == truncated).nonzero().flatten()
        reported = (drawn[chosen], ids[chosen], values[chosen], own[chosen])
        parts.append((chosen, _checked(reported, at[chosen], vocabulary_size, truncated=truncated)))
    return SampledPolicy(_together(parts), drawn, None if lag is None else lag[mask])


def lags(
    batch: Mapping[str, Any], calls: int, updates: int, made: Mapping[int, int], *, by_sequence: bool
) -> Tensor | None:
    """Optimizer steps between the weights that sampled and those of now, [B, T]; None if one is unknown.

    Args:
        calls, updates: of the trainer's update that are done, and optimizer steps of the present one.
        made: optimizer steps of those calls that this process has seen, by how many came before each; of the
            others, from before a resume, the batch says what their configuration asked for.
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
    first, asked = int(then.min()) if then.numel() else calls, int(padded(batch[UPDATES]).max())
    steps = torch.tensor([made.get(call, asked) for call in range(first, calls)], dtype=torch.long)
    since = pad(steps.flip(0).cumsum(0).flip(0), (0, 1)).to(then.device)
    lag = torch.where(mask, since[then - first] + updates, 0)
    return lag.amax(1, keepdim=True).expand_as(lag) if by_sequence else lag


def padded(field: Tensor) -> Tensor:
    """A jagged field as [B, T], zeros at the end."""
    return field.to_padded_tensor(0) if field.is_nested else field


def _fitting(row: Tensor, counted: Tensor) -> Tensor:
    """[j] to [T]. verl fills batches up with one token that does not count, and a real sequence's fields."""
    width = counted.shape[0]
    return pad(row[:width], (0, max(0, width - len(row))))


def _counts(batch: Mapping[str, Any], mask: Tensor) -> Tensor:
    """How many ids were reported of each token that counts, [N]; negative if nothing else could be drawn."""
    rows = zip(batch[COUNT].unbind(), mask, strict=True)
    return torch.cat([_fitting(row, counted)[counted] for row, counted in rows]).long()


def _reported(batch: Mapping[str, Any], mask: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of each token that counts, [N, K].

    Of no other: one long response beside many short ones would make most of [B, T, K] padding.
    """
    its_ids, its_values = [], []
    rows = zip(mask, *(batch[name].unbind() for name in (COUNT, IDS, LOG_PROBS)), strict=True)
    for counted, counts, ids, values in rows:
        counting = torch.repeat_interleave(_fitting(counted, counts), counts.long().abs())
        its_ids.append(ids[counting])
        its_values.append(values[counting])
    width = max(1, int(count.abs().max()) if count.numel() else 1)
    slots = torch.arange(width, device=count.device) < count.abs()[:, None]
    empty = torch.full(slots.shape, EMPTY, dtype=torch.long, device=count.device)
    nothing = torch.full(slots.shape, -torch.inf, device=count.device)
    return (
        empty.masked_scatter(slots, torch.cat(its_ids).long()),
        nothing.masked_scatter(slots, torch.cat(its_values).float()),
    )


def _checked(
    reported: tuple[Tensor, Tensor, Tensor, Tensor], at: Tensor, vocabulary_size: int, *, truncated: bool
) -> SparseLogProbs:
    """The distributions of some tokens [n, K], refused by the sequence and position they are `at`, [n, 2]."""
    drawn, ids, values, own = (field[None] for field in reported)
    try:
        policy = SampledPolicy.from_report(
            drawn, ids, values, torch.ones_like(drawn), sampled_log_probs=own, truncated=truncated,
            vocabulary_size=vocabulary_size,
        )  # fmt: skip
    except InvalidInputError as error:

        def of_batch(found: re.Match[str]) -> str:
            return "sequence {}, position {}".format(*at[int(found[1])].tolist())

        raise InvalidInputError(re.sub(r"^sequence 0, position (\d+)", of_batch, str(error))) from error
    return policy.support[0]


def _together(parts: list[tuple[Tensor, SparseLogProbs]]) -> SparseLogProbs:
    """One support of all tokens [N, K] from those of some each, and which they are."""
    width = max(of.ids.shape[-1] for _, of in parts)
    order = torch.cat([chosen for chosen, _ in parts]).argsort()

    def widened(name: str, fill: float) -> Tensor:
        sides = [getattr(of, name) for _, of in parts]
        return torch.cat([pad(side, (0, width - side.shape[-1]), value=fill) for side in sides])[order]

    log_tail = torch.cat([of.log_tail for _, of in parts])[order]
    return SparseLogProbs(widened("ids", EMPTY), widened("log_probs", -torch.inf), log_tail)
