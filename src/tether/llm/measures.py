"""What many verdicts come to: avg@n, pass@k, greedy success, and differences between two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.errors import InvalidInputError
from tether.experiments.statistics import Interval, bootstrap_interval, proportion_interval

Row = Mapping[str, Any]
"""A problem as `tether.llm.answers` stores it: its samples, and its greedy response or None."""


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """The chance that at least one of k responses is right, without bias, from n >= k of which c are right.

    1 - C(n - c, k) / C(n, k), as a product that does not overflow: the mean over all ways to draw k of the n
    responses. (1 - (1 - c/n)^k would be too low.)

    Args:
        correct: right responses c.
        samples: responses n.
        k: how many are drawn.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.

    >>> pass_at_k(1, 4, 2), pass_at_k(4, 4, 1), pass_at_k(0, 4, 4)
    (0.5, 1.0, 0.0)
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise InvalidInputError(
            f"pass@{k} from {correct} right of {samples} responses: k lies in [1, {samples}], right in [0, "
            f"{samples}]."
        )
    if samples - correct < k:
        return 1.0
    all_wrong = 1.0
    for drawn in range(k):
        all_wrong *= (samples - correct - drawn) / (samples - drawn)
    return 1.0 - all_wrong


@dataclass(frozen=True)
class Summary:
    """One model on one task; intervals (95 %) are Wilson's over problems, as in a run's report.

    A bootstrap would have no width over a single problem or equal ones, and look like certainty. Shares of a
    problem's responses vary no more than yes or no would, so Wilson's is rather too wide than too narrow.
    """

    problems: int
    samples: int
    success: Interval | None
    """avg@n: share of sampled responses that are right. None without samples."""
    pass_at: dict[int, Interval]
    """pass@k by k."""
    greedy: Interval | None
    """Share of problems whose most likely response is right."""
    reward: float
    """Mean reward of the sampled responses; of the greedy ones without samples."""
    truncated: float
    """Share of responses cut off at the longest length."""
    length: float
    """Mean length in tokens."""
    parts: dict[str, float]
    """Means of the verdicts' parts."""


def summarise_problems(rows: Sequence[Row], ks: Sequence[int] = ()) -> Summary:
    """Bring the verdicts of one model on one task together."""
    if not rows:
        raise InvalidInputError("No problem was answered, so there is nothing to summarise.")
    samples = len(rows[0]["samples"])
    greedy = [row["greedy"] for row in rows if row["greedy"] is not None]
    responses = [response for row in rows for response in row["samples"]] or greedy
    return Summary(
        problems=len(rows),
        samples=samples,
        success=_share(successes(rows)) if samples else None,
        pass_at={k: _share(_passes(rows, k)) for k in ks if samples},
        greedy=_share([response["correct"] for response in greedy]) if greedy else None,
        reward=_mean([response["reward"] for response in responses]),
        truncated=_mean([response["truncated"] for response in responses]),
        length=_mean([response["length"] for response in responses]),
        parts=_part_means(responses),
    )


@dataclass(frozen=True)
class Difference:
    """Model less baseline on the same problems; intervals (95 %) over problems, resampled in pairs."""

    success: Interval | None
    pass_at: dict[int, Interval]
    greedy: Interval | None


def difference(model: Sequence[Row], baseline: Sequence[Row], ks: Sequence[int] = ()) -> Difference:
    """How much better the model is than the baseline, problem by problem.

    Pairing takes out how hard the problems are, so the interval is narrower than those of the two alone
    suggest.
    """
    if [row["prompt"] for row in model] != [row["prompt"] for row in baseline]:
        raise InvalidInputError("The two models answered different problems; measure them together.")
    samples = bool(model and model[0]["samples"])
    greedy = bool(model and model[0]["greedy"] is not None)
    return Difference(
        success=_paired(successes(model), successes(baseline)) if samples else None,
        pass_at={k: _paired(_passes(model, k), _passes(baseline, k)) for k in ks if samples},
        greedy=_paired(_greedy(model), _greedy(baseline)) if greedy else None,
    )


@dataclass(frozen=True)
class TaskResult:
    """One task, answered by one model or two."""

    task: str
    rows: Mapping[str, Sequence[Row]]
    """One a problem, in the same order for both."""
    summaries: dict[str, Summary]
    difference: Difference | None
    """Model less baseline, where there is one."""


def successes(rows: Sequence[Row]) -> list[float]:
    """Sampled success of each problem."""
    return [_mean([response["correct"] for response in row["samples"]]) for row in rows]


def _passes(rows: Sequence[Row], k: int) -> list[float]:
    return [
        pass_at_k(sum(response["correct"] for response in row["samples"]), len(row["samples"]), k)
        for row in rows
    ]


def _greedy(rows: Sequence[Row]) -> list[float]:
    return [float(row["greedy"]["correct"]) for row in rows]


def _share(values: Sequence[float]) -> Interval:
    return proportion_interval(_mean(values), len(values))


def _paired(model: Sequence[float], baseline: Sequence[float]) -> Interval:
    return bootstrap_interval([ours - theirs for ours, theirs in zip(model, baseline, strict=True)])


def _part_means(responses: Sequence[Row]) -> dict[str, float]:
    names = sorted({name for response in responses for name in response["parts"]})
    return {
        name: _mean([response["parts"][name] for response in responses if name in response["parts"]])
        for name in names
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
