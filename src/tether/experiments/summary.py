"""What several runs come to: one line a method, with how certain it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tether.errors import MissingDependencyError
from tether.experiments.progress import format_duration
from tether.experiments.run_data import RunData, by_label, is_number, shared_ending
from tether.experiments.run_kind import Kinds
from tether.experiments.statistics import Curve, Interval, bootstrap_interval, proportion_interval
from tether.experiments.study_table import load_runs

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class MethodSummary:
    """All runs of one label in one line."""

    label: str
    seeds: tuple[int, ...]
    metric: str
    """What is compared."""
    metric_text: str
    """The same in words."""
    start: Interval | None
    """At the first evaluation. Over seeds; of a single run over its problems; without width where neither
    is known."""
    final: Interval | None
    """At the last evaluation; None where a run's is not finite, for the others' mean would hide that."""
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
    diverged: int = 0
    """Runs whose last evaluation is not finite."""

    @property
    def remarks(self) -> str:
        """What has to be known of the runs beside their numbers; empty if there is nothing."""
        diverged = f"{self.diverged} of {len(self.seeds)} ended not finite" if self.diverged else ""
        return ", ".join(filter(None, ("" if self.finished else "unfinished", diverged)))

    @property
    def is_fraction(self) -> bool:
        """Whether the metric reads as per cent."""
        return self.metric.startswith("success")


def own_headlines(runs: Sequence[RunData]) -> tuple[str, ...]:
    """The metric the runs' settings name as their headline, under all names it is evaluated as."""
    wanted = {run.config.settings.get("headline") for run in runs}
    name = wanted.pop() if len(wanted) == 1 else None
    return tuple(name + suffix for suffix in runs[0].kind.headline_suffixes) if isinstance(name, str) else ()


def headline_metric(runs: Sequence[RunData]) -> str | None:
    """What the runs are compared by; None where they share none of their kind's headlines.

    Runs whose settings name another metric as their ``headline`` are compared by that.
    """
    names = (*own_headlines(runs), *runs[0].kind.headlines)
    evaluated = (name for name in names if all(run.eval_curve(name) is not None for run in runs))
    trained = (name for name in names if all(run.curve(name) is not None for run in runs))
    return next(evaluated, None) or next(trained, None)


def headline_curves(runs: Sequence[RunData], metric: str) -> dict[Path, Curve | None]:
    """A headline metric over each run, by its path: evaluated, or as training measured it, of all alike.

    What training measures is of other problems and another policy than what an evaluation does, so one run is
    not compared by the former with others by the latter.
    """
    evaluated = {run.path: run.eval_curve(metric) for run in runs}
    if None not in evaluated.values():
        return evaluated
    trained = {run.path: run.curve(metric) for run in runs}
    return evaluated if None in trained.values() else trained


def summarise(runs: Sequence[RunData]) -> list[MethodSummary]:
    """One line a label, the best first: the headline metric at start and end, the KL, the time."""
    metric = headline_metric(runs) or runs[0].kind.headlines[0]
    curves = headline_curves(runs, metric)
    lines = [_summary(label, group, metric, curves) for label, group in by_label(runs).items()]
    return sorted(lines, key=lambda line: -math.inf if line.final is None else line.final.value, reverse=True)


def results_table(summaries: Sequence[MethodSummary]) -> Table:
    """The table shown at the end of a comparison."""
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise MissingDependencyError("The results table needs rich: pip install 'tether-rl[cli]'.") from error
    name = summaries[0].metric_text if summaries else "success"
    over = " and ".join(sorted({summary.over for summary in summaries} - {"nothing"}))
    caption = f"intervals: 95 % over {over}" if over else "no intervals: one run a method"
    point = shared_ending([summary.label for summary in summaries])
    title = name[:1].upper() + name[1:] + point
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("method", style="bold", min_width=10, overflow="fold")
    for heading in ("seeds", "start", "final", "gain", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            Text(summary.label.removesuffix(point) + (f" ({summary.remarks})" if summary.remarks else "")),
            str(len(summary.seeds)),
            # The interval below its value: the table then fits a terminal of 80 columns.
            format_interval(summary.start, summary.is_fraction).replace(" (", "\n("),
            format_interval(summary.final, summary.is_fraction).replace(" (", "\n("),
            format_gain(summary.gain, summary.is_fraction).replace(" (", "\n("),
            format_duration(summary.run_seconds),
        )
    return table


def print_results(
    runs: Iterable[str | Path | RunData], console: Console | None = None, *, kinds: Kinds | None = None
) -> None:
    """Show `results_table` of runs (`load_runs`) on ``console``, by default on standard output."""
    table = results_table(summarise(load_runs(runs, kinds)))
    from rich.console import Console

    (console or Console()).print(table)


def format_interval(interval: Interval | None, fraction: bool) -> str:
    """A value with its interval, in per cent for fractions.

    >>> format_interval(Interval(0.5, 0.4, 0.625, 0.95), fraction=True)
    '50.0 % (40.0-62.5)'
    >>> format_interval(Interval(1.784, 1.784, 1.784, 0.95), fraction=False)
    '1.784'
    """
    return _formatted(interval, *((100.0, ".1f", " %") if fraction else (1.0, ".4g", "")))


def _formatted(interval: Interval | None, scale: float, form: str, unit: str) -> str:
    if interval is None:
        return "-"
    value, low, high = (
        f"{number * scale:{form}}" for number in (interval.value, interval.low, interval.high)
    )
    if interval.low == interval.high:
        return f"{value}{unit}"
    separator = "-" if interval.low >= 0 and not form.startswith("+") else " to "
    return f"{value}{unit} ({low}{separator}{high})"


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
    return _formatted(interval, *((100.0, "+.1f", " points") if fraction else (1.0, "+.4g", "")))


def _summary(
    label: str, runs: Sequence[RunData], metric: str, curves: Mapping[Path, Curve | None]
) -> MethodSummary:
    found = (curves[run.path] for run in runs)
    ends = [curve.y for curve in found if curve is not None]
    problems = _problems(runs[0], metric) if len(runs) == 1 and metric.startswith("success") else None
    gains = [float(values[-1]) - float(values[0]) for values in ends if values.size > 1]
    over = "seeds" if len(ends) > 1 else "problems" if problems else "nothing"
    return MethodSummary(
        label=label,
        seeds=tuple(run.config.seed for run in runs),
        metric=metric,
        metric_text=runs[0].kind.metric_text(metric),
        start=_estimate([values[0] for values in ends], problems),
        final=_estimate([values[-1] for values in ends], problems),
        gain=_estimate(gains, None),
        over=over,
        kl_mean=_mean_of_runs(runs, "kl_mean", np.mean),
        kl_max=_largest(runs, "kl_max"),
        projected=_mean_of_runs(runs, "projected", np.mean),
        step_seconds=_step_seconds(runs),
        run_seconds=float(np.mean([run.seconds for run in runs])),
        finished=all(run.finished for run in runs),
        diverged=sum(not math.isfinite(values[-1]) for values in ends),
    )


def _estimate(values: Sequence[float], problems: int | None) -> Interval | None:
    if not values or not np.isfinite(values).all():
        return None
    if len(values) > 1:
        return bootstrap_interval(values)
    if problems and 0.0 <= values[0] <= 1.0:
        return proportion_interval(float(values[0]), problems)
    return Interval(float(values[0]), float(values[0]), float(values[0]), 0.95)


def _problems(run: RunData, metric: str) -> int | None:
    counts = [record["problems"] for record in run.evals if is_number(record.get("problems"))]
    if not counts and run.eval_curve(metric) is not None:
        counts = [run.config.settings.get(run.kind.problems_setting, 0)]
    return int(counts[-1]) if counts and counts[-1] >= 1 else None


def _mean_of_runs(runs: Sequence[RunData], name: str, function: Any) -> float | None:
    values = [function(found) for found in (run.values(name) for run in runs) if found.size]
    return float(np.mean(values)) if values else None


def _largest(runs: Sequence[RunData], name: str) -> float | None:
    values = [record[name] for run in runs for record in run.metrics if is_number(record.get(name))]
    known = [value for value in values if value == value]  # infinity is a largest KL; NaN is none
    return float(max(known)) if known else None


def _step_seconds(runs: Sequence[RunData]) -> float | None:
    measured = [run.values("step_seconds") for run in runs]
    if not any(found.size for found in measured):  # else the time between lines, evaluations included
        measured = [np.diff(run.values("time_s")) for run in runs]
    medians = [np.median(found) for found in measured if found.size]
    return float(np.mean(medians)) if medians else None
