"""Methods against a baseline, at each point of a grid: what the seeds say and what they cannot.

Every run counts by its last evaluation; no run, seed or moment is picked. Means and interquartile means
carry bootstrap intervals over seeds; whether two methods differ is decided by a permutation test, which
holds for few seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tether.errors import InvalidInputError
from tether.experiments.cost import Cost, cost_of, cost_table, format_bytes, plain_table, with_factor
from tether.experiments.files import atomic_write_json
from tether.experiments.progress import format_duration
from tether.experiments.run_data import RunData
from tether.experiments.statistics import (
    Curve,
    Interval,
    bootstrap_interval,
    difference_interval,
    improvement_interval,
    interquartile_mean,
    known_mean,
    permutation_p_value,
)
from tether.experiments.summary import (
    format_gain,
    format_interval,
    format_range,
    headline_curves,
    headline_metric,
)

if TYPE_CHECKING:
    from rich.table import Table

SIGNIFICANCE = 0.05
"""Below this p-value two methods count as different."""


@dataclass(frozen=True)
class Entry:
    """A run and its place in the grid."""

    method: str
    point: str
    """In words; empty where nothing but the method varies."""
    run: RunData
    samples: int | None = None
    """Responses the run learned from."""


@dataclass(frozen=True)
class AgainstBaseline:
    """A method less the baseline, at one point of the grid."""

    difference: Interval
    """Of the means of the final scores."""
    better: Interval
    """Probability that a run of the method ends above one of the baseline."""
    p_value: float
    """Of the difference, by permutation; small where it cannot be chance."""
    decidable: bool
    """Whether so many seeds could have shown a difference at all."""

    @property
    def verdict(self) -> str:
        """``wins``, ``loses``, ``ties`` or ``too few seeds``; a tie is no proof of equality."""
        if not self.decidable:
            return "too few seeds"
        if self.p_value >= SIGNIFICANCE:
            return "ties"
        return "wins" if self.difference.value > 0 else "loses"


@dataclass(frozen=True)
class Row:
    """One method at one point: all its seeds."""

    point: str
    method: str
    seeds: tuple[int, ...]
    unfinished: int
    """Seeds of which the run has not come to its end; they count with their last evaluation."""
    start: float
    """Mean over seeds of the first evaluation."""
    final: Interval
    """Mean over seeds of the last evaluation."""
    middle: Interval
    """The same as interquartile mean."""
    over_training: Interval
    """Mean over seeds of the mean over a run's evaluations after the first: who learns sooner is higher."""
    against: AgainstBaseline | None
    """None for the baseline itself, and where it has no runs at this point."""
    samples: float | None
    """Responses a run learned from."""
    tokens: float | None
    """Tokens a run read and wrote while training, prompts included."""
    seconds: float
    """Training time of a run, evaluations included."""
    cost: Cost
    """Time and memory of a step, and as multiples of the baseline's."""


def compare_methods(entries: Sequence[Entry], baseline: str | None) -> tuple[str, list[Row]]:
    """The metric compared by, and a row for each method at each point, in the order of the entries.

    Args:
        entries: all runs; at least one.
        baseline: the method others are tested against; None for no tests.

    Raises:
        InvalidInputError: no runs, runs without a common evaluation, one whose last evaluation is not
            finite, or a seed twice.
    """
    runs = [entry.run for entry in entries]
    metric = headline_metric(runs)
    if metric is None:
        raise InvalidInputError("The runs share no evaluation to compare them by.")
    found = headline_curves(runs, metric)
    curves = {run.path: _evaluations(run, metric, found[run.path]) for run in runs}
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.point, entry.method), []).append(entry)
    rows = []
    for (point, method), group in groups.items():
        others = groups.get((point, baseline)) if baseline not in (None, method) else None
        rows.append(_row(point, method, group, others, curves))
    return metric, rows


def _row(
    point: str, method: str, group: list[Entry], others: list[Entry] | None, every: Mapping[Path, list[float]]
) -> Row:
    seeds = tuple(entry.run.config.seed for entry in group)
    if len(set(seeds)) < len(seeds):
        raise InvalidInputError(f"{method} at {point or 'the only point'} has a seed twice: {seeds}.")
    curves = [every[entry.run.path] for entry in group]
    scores = [curve[-1] for curve in curves]
    return Row(
        point=point,
        method=method,
        seeds=seeds,
        unfinished=sum(not entry.run.finished for entry in group),
        start=float(np.mean([curve[0] for curve in curves])),
        final=_interval(scores, np.mean),
        middle=_interval(scores, interquartile_mean),
        over_training=_interval([float(np.mean(curve[1:] or curve)) for curve in curves], np.mean),
        against=None if others is None else _against(scores, [every[entry.run.path][-1] for entry in others]),
        samples=known_mean(entry.samples for entry in group),
        tokens=known_mean(_last(entry.run, "tokens") for entry in group),
        seconds=float(np.mean([entry.run.seconds for entry in group])),
        cost=cost_of([entry.run for entry in group], None if others is None else [e.run for e in others]),
    )


def _against(scores: list[float], others: list[float]) -> AgainstBaseline:
    return AgainstBaseline(
        difference_interval(scores, others),
        improvement_interval(scores, others),
        permutation_p_value(scores, others),
        decidable=can_decide(len(scores), len(others)),
    )


def can_decide(runs: int, others: int) -> bool:
    """Whether so many runs of one method and of another could be shown to differ, however far apart they are.

    >>> can_decide(3, 3), can_decide(4, 4)
    (False, True)
    """
    # The least p there is: that of all of one method's runs above all of the other's. Where there are as many
    # of both, all of them below is as far apart.
    ways = math.comb(runs + others, runs)
    return (2 if runs == others else 1) / ways < SIGNIFICANCE


def _evaluations(run: RunData, metric: str, curve: Curve | None) -> list[float]:
    assert curve is not None  # a headline metric is one that every run has
    if not np.isfinite(curve.y[-1]):
        raise InvalidInputError(
            f"{run.path} ends with a {metric} of {curve.y[-1]:g}, and a run counts by its last evaluation. "
            "Find out why it diverged, or leave out its method or its seed."
        )
    return [float(value) for value in curve.y if np.isfinite(value)]


def _interval(values: Sequence[float], statistic: Any) -> Interval:
    if len(values) > 1:
        return bootstrap_interval(values, statistic)
    return Interval(values[0], values[0], values[0], 0.95)


def _last(run: RunData, name: str) -> float | None:
    values = run.values(name)
    return float(values[-1]) if values.size else None


# ---------------------------------------------------------------------- for people and programs


def comparison_data(metric: str, rows: Sequence[Row], baseline: str | None) -> dict[str, Any]:
    """Everything in the table, and more digits, as plain dicts and lists."""
    return {
        "metric": metric,
        "baseline": baseline,
        "significance": SIGNIFICANCE,
        "rows": [
            asdict(row) | {"verdict": None if row.against is None else row.against.verdict} for row in rows
        ],
    }


def write_comparison(path: Path, metric: str, rows: Sequence[Row], baseline: str | None) -> Path:
    """Write `comparison_data` as JSON."""
    return atomic_write_json(path, comparison_data(metric, rows, baseline))


def cells_of(row: Row, metric: str) -> dict[str, str]:
    """A row in words, by column.

    The columns of budgets come last: responses and tokens learned from, and the time and memory that took, of
    steps also as multiples of the baseline's.
    """
    step = row.cost.step_seconds
    fraction = metric.startswith("success")
    against = row.against
    return {
        "method": row.method + (f" ({row.unfinished} unfinished)" if row.unfinished else ""),
        "seeds": str(len(row.seeds)),
        "final": format_interval(row.final, fraction),
        "middle half": format_interval(row.middle, fraction),
        "over training": format_interval(row.over_training, fraction),
        "difference": "" if against is None else format_gain(against.difference, fraction),
        "P(better)": "" if against is None else f"{against.better.value:.2f}",
        "p": "" if against is None else f"{against.p_value:.3f}",
        "verdict": "" if against is None else against.verdict,
        "responses": _thousands(row.samples),
        "tokens": _thousands(row.tokens),
        "time": format_duration(row.seconds),
        "step": "-" if step is None else with_factor(f"{step:.3g} s", row.cost.step_ratio),
        "memory": with_factor(format_bytes(row.cost.memory_bytes), row.cost.memory_ratio),
    }


def comparison_tables(metric: str, rows: Sequence[Row], baseline: str | None) -> list[Table]:
    """The rows as tables for a terminal of 80 columns: one for each point of the grid, one of the cost."""
    from rich.text import Text

    columns = ["method", "seeds", "final", "over training", *(("difference", "verdict") if baseline else ())]
    tables = []
    for point, group in by_point(rows).items():
        title = ", ".join(filter(None, (metric.replace("_", " ").capitalize(), point)))
        table = plain_table(title, _caption(group, baseline))
        for name in columns:
            text = name in ("method", "verdict")
            table.add_column(
                name.replace(" ", "\n"), justify="left" if text else "right", no_wrap=not text,
                overflow="fold", min_width=12 if name == "method" else None,
            )  # fmt: skip
        for row in group:
            table.add_row(*(Text(part) for part in _terminal_cells(row, metric, columns)))
        tables.append(table)
    if baseline is None:
        return tables
    methods = dict.fromkeys(row.method for row in rows)
    costs = cost_table({name: [row.cost for row in rows if row.method == name] for name in methods}, baseline)
    return tables if costs is None else [*tables, costs]


def _terminal_cells(row: Row, metric: str, columns: Sequence[str]) -> Iterator[str]:
    """A row's words, each interval on a line of its own, the p-value under the verdict."""
    words = cells_of(row, metric)
    for name in columns:
        text = words[name]
        if name in ("final", "over training", "difference"):
            text = text.replace(" points", "").replace(" (", "\n(")
        elif name == "verdict" and text:
            text = f"{text}\np {words['p']}"
        yield text


def _caption(rows: Sequence[Row], baseline: str | None) -> str:
    """What the columns mean, and the budget each run had."""
    tests = f" Difference to {baseline}; p by permutation of the seeds." if baseline else ""
    budget = ", ".join(
        f"{format_range(values, form)}{unit}"
        for values, form, unit in (
            ([row.samples for row in rows], _thousands, " responses"),
            ([row.tokens for row in rows], _thousands, " tokens"),
            ([row.seconds for row in rows], format_duration, " of training"),
            ([row.cost.memory_bytes for row in rows], format_bytes, " at the peak of memory"),
        )
        if any(value is not None for value in values)
    )
    return f"In parentheses: 95 % bootstrap over seeds.{tests} A run: {budget}."


def by_point(rows: Iterable[Row]) -> Mapping[str, list[Row]]:
    """Rows of each point of the grid, in order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.point, []).append(row)
    return groups


def _thousands(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
