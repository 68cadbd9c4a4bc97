"""What a person sees while a run trains, and the table at the end of a comparison."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tether.errors import InvalidInputError, MissingDependencyError
from tether.experiments.files import read_json_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

SHOWN: dict[str, tuple[str, str]] = {
    "success": ("success", "{:.1%}"),
    "success_greedy": ("greedy", "{:.1%}"),
    "reward": ("reward", "{:.3f}"),
    "return_mean": ("return", "{:.3g}"),
    "max_height_greedy": ("greedy height", "{:.2f} m"),
    "kl_mean": ("KL", "{:.2g}"),
    "kl_mean_part": ("KL mean", "{:.2g}"),
    "kl_cov_part": ("KL cov", "{:.2g}"),
    "projected": ("projected", "{:.1%}"),
    "entropy": ("entropy", "{:.3g}"),
}
"""Metric -> (its short name, its format): the numbers a training display shows, in this order."""

# So many bars fit a terminal; of more runs only those under way are shown.
_FEW_RUNS = 8


class TrainingProgress:
    """Show where a training run stands: a live bar in a terminal, a plain line now and then in a log file.

    Shows step and total, elapsed and remaining time and the latest of the numbers in `SHOWN`, whatever step
    they came with (evaluations are rarer than steps). Without a terminal nothing but whole lines without
    control characters is written, at most one every ``seconds_between_lines`` and one at the end.

    Args:
        total: number of steps.
        label: what is trained, such as ``"troll, seed 0"``.
        done: steps done before a resume; they count as done but not in the time left.
        console: a rich console; by default one on standard error.
        clock: seconds from any origin.

    Raises:
        InvalidInputError: a total below 1.
        MissingDependencyError: rich is not installed.

    >>> import io
    >>> from rich.console import Console
    >>> out = io.StringIO()
    >>> with TrainingProgress(2, "troll", console=Console(file=out), clock=lambda: 0.0) as progress:
    ...     progress.update(1, kl_mean=0.02)
    ...     progress.update(2, success=0.5)
    >>> print(out.getvalue().splitlines()[-1])
    troll  2/2  100%  0:00 elapsed  success 50.0%  KL 0.02
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        done: int = 0,
        console: Console | None = None,
        seconds_between_lines: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total < 1:
            raise InvalidInputError(f"A run has at least one step; got total={total}.")
        self._console = console if console is not None else _console()
        self._total = total
        self._label = label
        self._done_before = done
        self._step = done
        self._numbers: dict[str, float] = {}
        self._between = seconds_between_lines
        self._clock = clock
        self._start = clock()
        self._last_line = -math.inf
        self._printed_step = -1
        self._live: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._start = self._clock()
        if self._console.is_terminal:
            self._live = _live_display(self._console)
            self._task = self._live.add_task(
                self._label, total=self._total, completed=self._step, step=self._step, left="", numbers=""
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._printed_step != self._step:
            self._write_line()

    def update(self, step: int, **metrics: float) -> None:
        """Note that ``step`` is done, with its numbers; names not in `SHOWN` are ignored."""
        self._step = step
        self._numbers |= {name: float(value) for name, value in metrics.items() if name in SHOWN}
        if self._live is not None and self._task is not None:
            self._live.update(
                self._task,
                completed=step,
                step=step,
                left=self._time_left(),
                numbers=format_numbers(self._numbers),
            )
        elif self._clock() - self._last_line >= self._between:
            self._write_line()  # the last line comes with the end

    def message(self, text: str) -> None:
        """Write a line above the bar (in a log file: just a line)."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _write_line(self) -> None:
        self._last_line = self._clock()
        self._printed_step = self._step
        left = self._time_left()
        parts = [
            self._label,
            f"{self._step}/{self._total}",
            f"{self._step / self._total:.0%}",
            f"{format_duration(self._clock() - self._start)} elapsed",
            f"{left} left" if left and self._step < self._total else "",
            format_numbers(self._numbers),
        ]
        self.message("  ".join(part for part in parts if part))

    def _time_left(self) -> str:
        steps = self._step - self._done_before
        if steps <= 0:
            return ""
        return format_duration((self._clock() - self._start) / steps * max(self._total - self._step, 0))


class SeveralRuns:
    """Show how far several runs are that other processes train, by looking into their folders.

    In a terminal live bars: one of all runs with the time left, and one a run (of many runs: of those under
    way). In a log file plain lines of the same now and then.

    Args:
        runs: name -> (run folder, steps in all).
        weights: name -> how long a run takes relative to the others; all equal if not given.
        console: a rich console; by default one on standard error.
        seconds_between_lines: without a terminal, how often a line is written.
        clock: seconds from any origin.

    Raises:
        MissingDependencyError: rich is not installed.
    """

    def __init__(
        self,
        runs: Mapping[str, tuple[Path, int]],
        *,
        weights: Mapping[str, float] | None = None,
        console: Console | None = None,
        seconds_between_lines: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs = dict(runs)
        self._weights = dict(weights) if weights is not None else dict.fromkeys(runs, 1.0)
        self._console = console if console is not None else _console()
        self._between = seconds_between_lines
        self._clock = clock
        self._start = self._last_lines = clock()
        self._state = {name: _latest(folder) for name, (folder, _) in self._runs.items()}
        self._done_before = self._done()
        self._shown: dict[str, int] = {}
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._all: TaskID | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = _live_display(self._console)
            if len(self._runs) > 1:
                self._all = self._live.add_task("all", total=len(self._runs), step=0, left="", numbers="")
            for name, (_, steps) in self._runs.items():
                self._tasks[name] = self._live.add_task(
                    name, total=steps, step=0, left="", numbers="", visible=len(self._runs) <= _FEW_RUNS
                )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def look(self, names: Collection[str] | None = None) -> None:
        """Read what the runs have written and show it; with ``names``, of these alone."""
        looked_at = self._runs if names is None else names
        self._state |= {name: _latest(self._runs[name][0]) for name in looked_at}
        if self._live is not None:
            self._show_bars(looked_at)
        else:
            self._write_lines()

    def time_left(self) -> float | None:
        """Seconds until all are finished, at the pace so far; None before anything was done."""
        done = self._done()
        if done <= self._done_before:
            return None
        pace = (self._clock() - self._start) / (done - self._done_before)
        return pace * (sum(self._weights.values()) - done)

    def _done(self) -> float:
        return sum(
            self._weights[name] * min(step / self._runs[name][1], 1.0)
            for name, (step, _) in self._state.items()
        )

    def _finished(self) -> set[str]:
        return {name for name, (step, _) in self._state.items() if step >= self._runs[name][1]}

    def _show_bars(self, looked_at: Collection[str]) -> None:
        assert self._live is not None
        finished = self._finished()
        for name, (step, numbers) in self._state.items():
            visible = len(self._runs) <= _FEW_RUNS or (name in looked_at and name not in finished)
            self._live.update(
                self._tasks[name],
                completed=step,
                step=step,
                numbers=format_numbers(numbers),
                visible=visible,
            )
        if self._all is not None:
            left = self.time_left()
            self._live.update(
                self._all,
                completed=len(finished),
                step=len(finished),
                left="" if left is None else format_duration(left),
            )

    def _write_lines(self) -> None:
        finished = self._finished()
        due = self._clock() - self._last_lines >= self._between
        written = False
        for name, (step, numbers) in self._state.items():
            if self._shown.get(name, 0) != step and (due or name in finished):
                self._shown[name] = step
                elapsed = format_duration(self._clock() - self._start)
                self._print(
                    f"{name}  {step}/{self._runs[name][1]}  {elapsed} elapsed  {format_numbers(numbers)}"
                )
                written = True
        left = self.time_left()
        if written and left is not None and len(finished) < len(self._runs) > 1:
            self._print(f"{len(finished)}/{len(self._runs)} runs  {format_duration(left)} left")
        if due:
            self._last_lines = self._clock()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _latest(folder: Path) -> tuple[int, dict[str, float]]:
    """The last step of a run and the latest of its numbers; 0 and nothing before it has begun."""
    step = 0
    numbers: dict[str, float] = {}
    for name in ("metrics.jsonl", "eval.jsonl"):
        lines = read_json_lines(folder / name)
        if lines:
            numbers |= {key: value for key, value in lines[-1].items() if key in SHOWN}
            step = max(step, int(lines[-1]["step"]))
    return step, numbers


def format_numbers(numbers: Mapping[str, float]) -> str:
    """The numbers of `SHOWN` that are there, in its order.

    >>> format_numbers({"kl_mean": 0.0213, "success": 0.4, "other": 1.0})
    'success 40.0%  KL 0.021'
    """
    shown = ((short, form.format(numbers[name])) for name, (short, form) in SHOWN.items() if name in numbers)
    return "  ".join(f"{short} {value}" for short, value in shown)


def format_duration(seconds: float) -> str:
    """A duration as a clock shows it.

    >>> format_duration(75), format_duration(3725), format_duration(90_000)
    ('1:15', '1:02:05', '25:00:00')
    """
    whole = max(round(seconds), 0)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _console() -> Console:
    try:
        from rich.console import Console
    except ImportError as error:
        raise MissingDependencyError(
            "The progress display needs rich: pip install 'tether-rl[cli]'."
        ) from error
    return Console(stderr=True)


def _live_display(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[step]}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("[dim]left[/dim] {task.fields[left]}"),
        TextColumn("{task.fields[numbers]}", style="cyan", markup=False),
        console=console,
        expand=False,
    )
