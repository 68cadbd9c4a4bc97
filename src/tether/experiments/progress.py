"""What a person sees while runs train: live bars in a terminal, a plain line now and then in a log file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tether.errors import InvalidInputError, MissingDependencyError
from tether.experiments.files import last_measurement

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

Displayed = Mapping[str, tuple[str, str]]
"""Metric -> (its short name, its format): the numbers that are shown, in this order."""

SECONDS_BETWEEN_LINES = 15.0
"""How often a log file gets a line."""

# So many bars fit a terminal; of more runs only those under way are shown.
_FEW_RUNS = 8


class TrainingProgress:
    """Show where a training run stands.

    Shows step and total, elapsed and remaining time and the latest of the chosen numbers, whatever step they
    came with (evaluations are rarer than steps). Without a terminal nothing but whole lines without control
    characters is written, at most one every `SECONDS_BETWEEN_LINES` and one at the end.

    Args:
        total: number of steps.
        label: what is trained, such as ``"troll, seed 0"``.
        done: steps done before a resume; they count as done but not in the time left.
        displayed: which numbers are shown, and how.
        console: a rich console; by default one on standard error.
        clock: seconds from any origin.

    >>> import io
    >>> from rich.console import Console
    >>> out = io.StringIO()
    >>> shown = {"success": ("success", "{:.1%}")}
    >>> with TrainingProgress(2, "troll", displayed=shown, console=Console(file=out)) as progress:
    ...     progress.update(2, success=0.5)
    >>> print(out.getvalue().splitlines()[-1])
    troll  2/2  100%  0:00 elapsed  success 50.0%
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        done: int = 0,
        displayed: Displayed | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total < 1:
            raise InvalidInputError(f"A run has at least one step; got total={total}.")
        self._displayed = displayed or {}
        self._numbers: dict[str, float] = {}
        self._clock = clock
        self._bars = _bars(console, clock)
        self._task = self._bars.add_task(
            label, total=total, completed=done, count=f"{done}/{total}", numbers=""
        )
        self._last_line = -math.inf
        self._printed_step = -1

    def __enter__(self) -> Self:
        self._bars.reset(self._task, completed=self._step)  # the clock starts here
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        if self._bars.disable and self._printed_step != self._step:
            self._write_line()

    def update(self, step: int, **metrics: float) -> None:
        """Note that ``step`` is done, with its numbers; names that are not displayed are ignored."""
        self._numbers |= {name: float(value) for name, value in metrics.items() if name in self._displayed}
        total = self._bars.tasks[0].total
        numbers = format_numbers(self._numbers, self._displayed)
        self._bars.update(self._task, completed=step, count=f"{step}/{total:.0f}", numbers=numbers)
        if self._bars.disable and self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._write_line()  # the last line comes with the end

    def message(self, text: str) -> None:
        """Write a line above the bar (in a log file: just a line)."""
        _write(self._bars, text)

    @property
    def _step(self) -> int:
        return int(self._bars.tasks[0].completed)

    def _write_line(self) -> None:
        self._last_line = self._clock()
        self._printed_step = self._step
        task = self._bars.tasks[0]
        left = task.time_remaining
        parts = [
            task.description,
            task.fields["count"],
            f"{task.percentage:.0f}%",
            f"{format_duration(task.elapsed or 0)} elapsed",
            f"{format_duration(left)} left" if left else "",
            task.fields["numbers"],
        ]
        self.message("  ".join(part for part in parts if part))


class SeveralRuns:
    """Show how far several runs are that other processes train, by looking into their folders.

    In a terminal live bars: one of all runs with the time left, and one a run (of many runs: of those under
    way). In a log file plain lines of the same now and then.

    Args:
        runs: name -> (run folder, steps in all).
        weights: name -> how long a run takes relative to the others; all equal if not given.
        displayed: which numbers are shown, and how.
        console: a rich console; by default one on standard error.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        runs: Mapping[str, tuple[Path, int]],
        *,
        weights: Mapping[str, float] | None = None,
        displayed: Displayed | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs = dict(runs)
        self._weights = dict(weights) if weights is not None else dict.fromkeys(runs, 1.0)
        self._displayed = displayed or {}
        self._clock = clock
        self._last_lines = clock()
        self._steps = {name: self._latest(name)[0] for name in runs}
        self._written = dict.fromkeys(runs, 0)
        self._bars = _bars(console, clock)
        self._all = self._bars.add_task(
            "all", total=sum(self._weights.values()), count="", numbers="", visible=len(runs) > 1
        )
        self._bars.tasks[0].completed = self._done()  # what was done before says nothing of the pace
        self._tasks = {
            name: self._bars.add_task(
                name, total=steps, completed=self._steps[name], count="", numbers="",
                visible=len(runs) <= _FEW_RUNS,
            )
            for name, (_, steps) in runs.items()
        }  # fmt: skip

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def refresh(self, names: Collection[str] | None = None) -> None:
        """Read what the runs have written and show it; with ``names``, of these alone."""
        for name in self._runs if names is None else names:
            step, numbers = self._latest(name)
            self._steps[name] = step
            total = self._runs[name][1]
            visible = len(self._runs) <= _FEW_RUNS or step < total
            self._bars.update(
                self._tasks[name], completed=step, count=f"{step}/{total}", visible=visible,
                numbers=format_numbers(numbers, self._displayed),
            )  # fmt: skip
        count = f"{len(self._finished())}/{len(self._runs)}"
        self._bars.update(self._all, completed=self._done(), count=count)
        if self._bars.disable:
            self._write_lines()

    def time_left(self) -> float | None:
        """Seconds until all are finished, at the pace so far; None before the pace is known."""
        return self._bars.tasks[0].time_remaining

    def _latest(self, name: str) -> tuple[int, dict[str, float]]:
        """The last step of a run and the latest of its numbers; 0 and nothing before it has begun."""
        step = 0
        numbers: dict[str, float] = {}
        for file in ("metrics.jsonl", "eval.jsonl"):
            last = last_measurement(self._runs[name][0] / file)
            if last is not None:
                numbers |= {key: value for key, value in last.items() if key in self._displayed}
                step = max(step, int(last["step"]))
        return step, numbers

    def _done(self) -> float:
        shares = {name: min(step / self._runs[name][1], 1.0) for name, step in self._steps.items()}
        return sum(self._weights[name] * share for name, share in shares.items())

    def _finished(self) -> set[str]:
        return {name for name, step in self._steps.items() if step >= self._runs[name][1]}

    def _write_lines(self) -> None:
        finished = self._finished()
        due = self._clock() - self._last_lines >= SECONDS_BETWEEN_LINES
        news = [
            name
            for name, step in self._steps.items()
            if self._written[name] != step and (due or name in finished)
        ]
        overall, *tasks = self._bars.tasks
        elapsed = format_duration(overall.elapsed or 0)
        for task in (task for task in tasks if task.description in news):
            self._written[task.description] = self._steps[task.description]
            line = f"{task.description}  {task.fields['count']}  {elapsed} elapsed  {task.fields['numbers']}"
            _write(self._bars, line.rstrip())
        left = self.time_left()
        if news and left is not None and len(finished) < len(self._runs) > 1:
            _write(self._bars, f"{overall.fields['count']} runs  {format_duration(left)} left")
        if due:
            self._last_lines = self._clock()


def format_numbers(numbers: Mapping[str, float], displayed: Displayed) -> str:
    """The displayed numbers that are there, in that order.

    >>> displayed = {"success": ("success", "{:.1%}"), "kl_mean": ("KL", "{:.2g}")}
    >>> format_numbers({"kl_mean": 0.0213, "success": 0.4, "other": 1.0}, displayed)
    'success 40.0%  KL 0.021'
    """
    shown = (
        (short, form.format(numbers[name])) for name, (short, form) in displayed.items() if name in numbers
    )
    return "  ".join(f"{short} {value}" for short, value in shown)


def format_duration(seconds: float) -> str:
    """A duration as a clock shows it.

    >>> format_duration(75), format_duration(3725), format_duration(90_000)
    ('1:15', '1:02:05', '25:00:00')
    """
    whole = max(round(seconds), 0)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _bars(console: Console | None, clock: Callable[[], float]) -> Progress:
    """Rich's account of tasks; it draws them where there is a terminal."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError as error:
        raise MissingDependencyError(
            "The progress display needs rich: pip install 'tether-rl[cli]'."
        ) from error
    console = console if console is not None else Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("[dim]left[/dim]"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[numbers]}", style="cyan", markup=False),
        console=console,
        get_time=clock,
        speed_estimate_period=math.inf,  # steps may take minutes
        disable=not console.is_terminal,
    )


def _write(bars: Progress, text: str) -> None:
    bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
