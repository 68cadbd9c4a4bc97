"""What several runs come to: one line a method, with how certain it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tether.errors import CheckpointError, MissingDependencyError
from tether.experiments.peak_memory import largest
from tether.experiments.progress import format_duration
from tether.experiments.run_config import RunConfig
from tether.experiments.run_start import find_runs
from tether.experiments.runs import RunFolder
from tether.experiments.statistics import Curve, Interval, bootstrap_interval, proportion_interval

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HEADLINES = ("success", "success_greedy", "return_mean", "return_greedy", "reward")
"""What methods are compared by: the first of these that every run has evaluated, else measured in training.

Runs whose settings name another metric as their ``headline`` are compared by that, or by its evaluations of
the mean policy (``_greedy``).
"""

_UNITS = {"max_height": "m"}


@dataclass(frozen=True)
class RunData:
    """A run as it was read: its folder and all its numbers."""

    folder: RunFolder
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.folder.config

    @cached_property
    def names(self) -> set[str]:
        """The names in ``metrics.jsonl``."""
        return {name for record in self.metrics for name in record}

    @cached_property
    def eval_names(self) -> set[str]:
        """The names in ``eval.jsonl``."""
        return {name for record in self.evals for name in record}

    def curve(self, name: str) -> Curve | None:
        """A training metric over the run; None where it was not measured."""
        return self._curve(self.metrics, name)

    def eval_curve(self, name: str) -> Curve | None:
        """An evaluated number over the run; None where it was not measured."""
        return self._curve(self.evals, name)

    def values(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The finite values of a training metric, in order."""
        found = np.array(
            [record[name] for record in self.metrics if _is_number(record.get(name))], dtype=float
        )
        return found[np.isfinite(found)]

    @property
    def seconds(self) -> float:
        """Training time."""
        return max((float(record.get("time_s", 0.0)) for record in (*self.metrics, *self.evals)), default=0.0)

    @cached_property
    def peak_memory(self) -> tuple[str, int] | None:
        """The most a step took beyond the start of training: one of `MEMORY_METRICS`, and bytes."""
        return largest(self.metrics)

    @property
    def steps(self) -> int:
        """The last step with a number."""
        return max((int(record["step"]) for record in (*self.metrics, *self.evals)), default=0)

    def _curve(self, records: Sequence[Mapping[str, Any]], name: str) -> Curve | None:
        points = {self._x(record): float(record[name]) for record in records if _is_number(record.get(name))}
        if not points:
            return None
        x = sorted(points)
        return Curve(np.array(x), np.array([points[place] for place in x]))

    def _x(self, record: Mapping[str, Any]) -> float:
        """Where a record stands: at its step, or at its environment steps in episodic runs."""
        step = int(record["step"])
        if self.config.kind != "episodic":
            return step
        if _is_number(record.get("env_steps")):
            return float(record["env_steps"])
        return self._env_steps.get(
            step, max((n for at, n in self._env_steps.items() if at <= step), default=0.0)
        )

    @cached_property
    def _env_steps(self) -> dict[int, float]:
        return {
            int(record["step"]): float(record["env_steps"])
            for record in self.metrics
            if _is_number(record.get("env_steps"))
        }


@dataclass(frozen=True)
class MethodSummary:
    """All runs of one label in one line."""

    label: str
    seeds: tuple[int, ...]
    metric: str
    """What is compared: one of `HEADLINES`."""
    start: Interval | None
    """At the first evaluation. Over seeds; of a single run over its problems; without width where neither
    is known."""
    final: Interval | None
    """At the last evaluation."""
    gain: Interval | None
    """Final less start of each run."""
    over: str
    """What the intervals are over: ``"seeds"``, ``"problems"`` or ``"nothing"``."""
    kl_mean: float | None
    """Mean over steps of the mean KL before projection, in nats."""
    kl_max: float | None
    """The largest KL of any token and step, in nats."""
    projected: float | None
    """Mean over steps of the projected fraction."""
    step_seconds: float | None
    """Median seconds a step."""
    run_seconds: float
    """Mean training time of a run."""
    finished: bool
    """Whether every run came to its end."""

    @property
    def is_fraction(self) -> bool:
        """Whether the metric reads as per cent."""
        return self.metric.startswith("success")


def load_runs(paths: Iterable[str | Path]) -> list[RunData]:
    """Read runs, or the runs in folders of runs.

    Raises:
        CheckpointError: no such run, a run without a number yet, or runs of several kinds.
    """
    runs = []
    for path in find_runs(paths):
        folder = RunFolder.open(path)
        run = RunData(folder, folder.metrics(), folder.evals())
        if not run.metrics and not run.evals:
            raise CheckpointError(
                f"The run {path} is empty: it has measured nothing yet. "
                "Wait for its first step, or leave it out."
            )
        runs.append(run)
    if not runs:
        raise CheckpointError("No runs given. Name the folders that training commands wrote.")
    kinds: dict[str, Path] = {}
    for run in runs:
        kinds.setdefault(run.config.kind, run.folder.path)
    if len(kinds) > 1:
        named = ", ".join(f"{path} is {kind}" for kind, path in kinds.items())
        raise CheckpointError(
            f"Runs of different kinds cannot be compared ({named}). Give one kind at a time."
        )
    return runs


def by_label(runs: Iterable[RunData]) -> dict[str, list[RunData]]:
    """Runs of each label, in the order of first appearance."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(run.config.label, []).append(run)
    return groups


def own_headlines(runs: Sequence[RunData]) -> tuple[str, ...]:
    """The metric the runs' settings name as their headline, and its evaluations of the mean policy."""
    wanted = {run.config.settings.get("headline") for run in runs}
    name = wanted.pop() if len(wanted) == 1 else None
    return (name, f"{name}_greedy") if isinstance(name, str) else ()


def headline_metric(runs: Sequence[RunData]) -> str | None:
    """What the runs are compared by; None where they share none of `HEADLINES`."""
    own = own_headlines(runs)
    for name in (*own, *HEADLINES):
        if all(run.eval_curve(name) is not None for run in runs):
            return name
    for name in (*own, *HEADLINES):
        if all(run.curve(name) is not None for run in runs):
            return name
    return None


def summarise(runs: Sequence[RunData]) -> list[MethodSummary]:
    """One line a label, the best first: the headline metric at start and end, the KL, the time."""
    metric = headline_metric(runs) or HEADLINES[0]
    lines = [_summary(label, group, metric) for label, group in by_label(runs).items()]
    return sorted(lines, key=lambda line: -math.inf if line.final is None else line.final.value, reverse=True)


def metric_text(name: str) -> str:
    """A metric in words, with its unit where it has one.

    >>> metric_text("success_greedy"), metric_text("max_height_greedy")
    ('greedy success', 'max height of the mean motion (m)')
    """
    if name == "success_greedy":
        return "greedy success"
    measure = name.removesuffix("_greedy")
    words = measure.replace("_", " ") + (" of the mean motion" if measure != name else "")
    return f"{words} ({_UNITS[measure]})" if measure in _UNITS else words


def results_table(summaries: Sequence[MethodSummary]) -> Table:
    """The table shown at the end of a comparison.

    Raises:
        MissingDependencyError: rich is not installed.
    """
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise MissingDependencyError("The results table needs rich: pip install 'tether-rl[cli]'.") from error
    name = metric_text(summaries[0].metric) if summaries else "success"
    over = " and ".join(sorted({summary.over for summary in summaries} - {"nothing"}))
    caption = f"intervals: 95 % over {over}" if over else "no intervals: one run, unknown number of problems"
    table = Table(
        title=name[:1].upper() + name[1:], caption=caption, title_justify="left", caption_justify="left"
    )
    table.add_column("method", style="bold", min_width=10)
    for heading in ("seeds", "start", "final", "gain", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            Text(summary.label + ("" if summary.finished else " (unfinished)")),
            str(len(summary.seeds)),
            # The interval below its value: the table then fits a terminal of 80 columns.
            format_interval(summary.start, summary.is_fraction).replace(" (", "\n("),
            format_interval(summary.final, summary.is_fraction).replace(" (", "\n("),
            format_gain(summary.gain, summary.is_fraction).replace(" (", "\n("),
            format_duration(summary.run_seconds),
        )
    return table


def print_results(paths: Iterable[str | Path], console: Console | None = None) -> None:
    """Show `results_table` of the runs at ``paths`` on ``console``, by default on standard output."""
    table = results_table(summarise(load_runs(paths)))
    from rich.console import Console

    (console or Console()).print(table)


def format_interval(interval: Interval | None, fraction: bool) -> str:
    """A value with its interval, in per cent for fractions.

    >>> format_interval(Interval(0.5, 0.4, 0.625, 0.95), fraction=True)
    '50.0 % (40.0-62.5)'
    >>> format_interval(Interval(1.784, 1.784, 1.784, 0.95), fraction=False)
    '1.784'
    """
    if interval is None:
        return "-"
    scale, form, unit = (100.0, ".1f", " %") if fraction else (1.0, ".4g", "")
    value = f"{interval.value * scale:{form}}{unit}"
    if interval.low == interval.high:
        return value
    separator = "-" if interval.low >= 0 else " to "
    return f"{value} ({interval.low * scale:{form}}{separator}{interval.high * scale:{form}})"


def format_range(values: Iterable[float | None], form: Callable[[float], str]) -> str:
    """From the least to the most of those that are known.

    >>> format_range([3, None, 1], str), format_range([2.04, 2.0], "{:.1f}".format), format_range([None], str)
    ('1 to 3', '2.0', '-')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = form(min(known)), form(max(known))
    return low if low == high else f"{low} to {high}"


def format_gain(interval: Interval | None, fraction: bool) -> str:
    """A difference with its sign, in points (hundredths) for fractions.

    >>> format_gain(Interval(0.215, 0.2, 0.231, 0.95), fraction=True)
    '+21.5 points (+20.0 to +23.1)'
    """
    if interval is None:
        return "-"
    scale, form, unit = (100.0, "+.1f", " points") if fraction else (1.0, "+.4g", "")
    value = f"{interval.value * scale:{form}}{unit}"
    if interval.low == interval.high:
        return value
    return f"{value} ({interval.low * scale:{form}} to {interval.high * scale:{form}})"


def _summary(label: str, runs: Sequence[RunData], metric: str) -> MethodSummary:
    curves = [curve for curve in (_headline_curve(run, metric) for run in runs) if curve is not None]
    ends = [(curve.y[np.isfinite(curve.y)]) for curve in curves]
    ends = [values for values in ends if values.size]
    problems = _problems(runs[0]) if len(runs) == 1 and metric.startswith("success") else None
    gains = [values[-1] - values[0] for values in ends if values.size > 1]
    over = "seeds" if len(ends) > 1 else "problems" if problems else "nothing"
    return MethodSummary(
        label=label,
        seeds=tuple(run.config.seed for run in runs),
        metric=metric,
        start=_estimate([values[0] for values in ends], problems),
        final=_estimate([values[-1] for values in ends], problems),
        gain=_estimate(gains, None),
        over=over,
        kl_mean=_mean_of_runs(runs, "kl_mean", np.mean),
        kl_max=_largest(runs, "kl_max"),
        projected=_mean_of_runs(runs, "projected", np.mean),
        step_seconds=_step_seconds(runs),
        run_seconds=float(np.mean([run.seconds for run in runs])),
        finished=all(run.folder.finished for run in runs),
    )


def _headline_curve(run: RunData, metric: str) -> Curve | None:
    """Evaluations come first; runs that only train are judged by what training measures."""
    return run.eval_curve(metric) or run.curve(metric)


def _estimate(values: Sequence[float], problems: int | None) -> Interval | None:
    if not values:
        return None
    if len(values) > 1:
        return bootstrap_interval(values)
    if problems and 0.0 <= values[0] <= 1.0:
        return proportion_interval(float(values[0]), problems)
    return Interval(float(values[0]), float(values[0]), float(values[0]), 0.95)


def _problems(run: RunData) -> int | None:
    counts = [record["problems"] for record in run.evals if _is_number(record.get("problems"))]
    return int(counts[-1]) if counts and counts[-1] >= 1 else None


def _mean_of_runs(runs: Sequence[RunData], name: str, function: Any) -> float | None:
    values = [function(found) for found in (run.values(name) for run in runs) if found.size]
    return float(np.mean(values)) if values else None


def _largest(runs: Sequence[RunData], name: str) -> float | None:
    values = [record[name] for run in runs for record in run.metrics if _is_number(record.get(name))]
    known = [value for value in values if value == value]  # infinity is a largest KL; NaN is none
    return float(max(known)) if known else None


def _step_seconds(runs: Sequence[RunData]) -> float | None:
    measured = [run.values("step_seconds") for run in runs]
    if not any(found.size for found in measured):  # else the time between lines, evaluations included
        measured = [np.diff(run.values("time_s")) for run in runs]
    medians = [np.median(found) for found in measured if found.size]
    return float(np.mean(medians)) if medians else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
