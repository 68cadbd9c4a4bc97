"""What methods cost beside a baseline: time and memory of a training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tether.experiments.peak_memory import MEMORY_METRICS
from tether.experiments.run_data import RunData
from tether.experiments.statistics import known_mean
from tether.experiments.summary import format_range

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Cost:
    """What one method's steps take at one point of a grid, and beside the baseline's with the same seeds.

    Runs with the same seed are compared because they were trained one after the other: a machine that is
    slower in the evening slows both.
    """

    step_seconds: float | None
    """Mean over seeds of the mean duration of a step, writing responses included."""
    step_ratio: float | None
    """That as a multiple of the baseline's with the same seed, median over seeds; None for the baseline."""
    processor_seconds: float | None
    """The same in processor time of all threads, which other processes disturb less; measured on a CPU."""
    processor_ratio: float | None
    """That as a multiple of the baseline's with the same seed, median over seeds; None for the baseline."""
    memory_bytes: float | None
    """Mean over seeds of the most any step took beyond the start of training."""
    memory_of: str | None
    """What was counted: ``device_bytes_max`` or ``resident_bytes_max``; None where runs differ in that."""
    memory_ratio: float | None
    """That as a multiple of the baseline's with the same seed, median over seeds; None for the baseline."""


@dataclass(frozen=True)
class _Column:
    """One kind of cost in the table."""

    heading: str
    value: Callable[[Cost], float | None]
    ratio: Callable[[Cost], float | None]
    form: Callable[[float], str]


def cost_of(runs: Sequence[RunData], baseline: Sequence[RunData] | None) -> Cost:
    """The cost of a method's runs, beside the baseline's where they are given."""
    kinds = {memory[0] for memory in (run.peak_memory for run in runs) if memory is not None}
    # Memory of a device and that of a process do not compare.
    compared = {run.peak_memory[0] for run in (*runs, *(baseline or ())) if run.peak_memory}
    return Cost(
        step_seconds=known_mean(map(_of_a_step("step_seconds"), runs)),
        step_ratio=_ratio(runs, baseline, _of_a_step("step_seconds")),
        processor_seconds=known_mean(map(_of_a_step("processor_seconds"), runs)),
        processor_ratio=_ratio(runs, baseline, _of_a_step("processor_seconds")),
        memory_bytes=known_mean(map(_bytes, runs)) if len(kinds) == 1 else None,
        memory_of=kinds.pop() if len(kinds) == 1 else None,
        memory_ratio=_ratio(runs, baseline, _bytes) if len(compared) == 1 else None,
    )


def cost_table(costs: Mapping[str, Sequence[Cost]], baseline: str) -> Table | None:
    """One line a method: time, processor time and memory of a step, and as multiples of the baseline's."""
    from rich.text import Text

    every = [cost for group in costs.values() for cost in group]
    columns = [column for column in _COLUMNS if any(column.ratio(cost) is not None for cost in every)]
    if not columns:
        return None
    table = plain_table("Cost of a step", _caption(every, baseline, points=max(map(len, costs.values()))))
    table.add_column("method", overflow="fold", min_width=12)
    for column in columns:
        table.add_column(column.heading, justify="right")
        table.add_column("ratio", justify="right")
    for method, group in costs.items():
        cells = []
        for column in columns:
            ratios = [column.ratio(cost) for cost in group]
            cells.append(format_range([column.value(cost) for cost in group], column.form))
            cells.append("1" if method == baseline else _factor(ratios))
        table.add_row(Text(method), *cells)
    return table


def plain_table(title: str, caption: str) -> Table:
    """A table without columns yet, of few lines, for a terminal."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title, caption=caption, title_justify="left", caption_justify="left",
        box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip


def with_factor(text: str, ratio: float | None) -> str:
    """A cost in words with its multiple of the baseline's.

    >>> with_factor("0.5 s", 1.0312), with_factor("0.5 s", None)
    ('0.5 s (x 1.03)', '0.5 s')
    """
    return text if ratio is None else f"{text} (x {ratio:.2f})"


def format_bytes(value: float | None) -> str:
    """Bytes in thousands, millions or billions.

    >>> format_bytes(1_234_000_000), format_bytes(56_700_000), format_bytes(None)
    ('1.23 GB', '56.7 MB', '-')
    """
    if value is None:
        return "-"
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


_COLUMNS = (
    _Column("seconds", lambda cost: cost.step_seconds, lambda cost: cost.step_ratio, _three_digits),
    _Column(
        "processor", lambda cost: cost.processor_seconds, lambda cost: cost.processor_ratio, _three_digits
    ),
    _Column("memory", lambda cost: cost.memory_bytes, lambda cost: cost.memory_ratio, format_bytes),
)


def _caption(costs: Sequence[Cost], baseline: str, points: int) -> str:
    """How the columns were formed, and of what the memory is."""
    kinds = sorted({MEMORY_METRICS[cost.memory_of] for cost in costs if cost.memory_of is not None})
    over = "" if points < 2 else f" and geometric mean of up to {points} points of the grid"
    memory = f" Memory: {' or '.join(kinds)}, the most of any step beyond the start." if kinds else ""
    return f"Ratio: to {baseline}, median over seeds{over}, each seed with its own.{memory}"


def _of_a_step(metric: str) -> Callable[[RunData], float | None]:
    """The mean of a metric over a run's steps, as a function of the run."""
    return lambda run: known_mean(run.values(metric))


def _bytes(run: RunData) -> float | None:
    return None if run.peak_memory is None else float(run.peak_memory[1])


def _ratio(
    runs: Sequence[RunData], baseline: Sequence[RunData] | None, of: Callable[[RunData], float | None]
) -> float | None:
    theirs = {run.config.seed: of(run) for run in baseline or ()}
    pairs = [(of(run), theirs.get(run.config.seed)) for run in runs]
    ratios = [ours / base for ours, base in pairs if ours is not None and base]
    return float(np.median(ratios)) if ratios else None


def _factor(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio]
    return f"{math.exp(float(np.mean(np.log(known)))):.3g}" if known else "-"
