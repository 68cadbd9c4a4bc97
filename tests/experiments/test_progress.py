from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tether.errors import InvalidInputError
from tether.experiments import TrainingProgress
from tether.experiments.progress import SeveralRuns

DISPLAYED = {
    "success": ("success", "{:.1%}"),
    "reward": ("reward", "{:.3f}"),
    "kl_mean": ("KL", "{:.2g}"),
    "projected": ("projected", "{:.1%}"),
    "entropy": ("entropy", "{:.3g}"),
}


class FakeClock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def plain(clock: FakeClock, **options: int) -> tuple[io.StringIO, TrainingProgress]:
    out = io.StringIO()
    return out, TrainingProgress(
        100,
        "troll, seed 0",
        displayed=DISPLAYED,
        console=Console(file=out, width=60),
        clock=clock,
        **options,
    )


def test_a_log_file_gets_a_line_now_and_then_and_one_at_the_end() -> None:
    clock = FakeClock()
    out, progress = plain(clock)
    with progress:
        for step in range(1, 101):
            clock.now += 1.0
            progress.update(step, kl_mean=step / 1000, reward=0.5)
    lines = out.getvalue().splitlines()
    # One second a step, fifteen between lines: steps 1, 16, 31, 46, 61, 76, 91 and the last.
    assert [re.search(r"(\d+)/100", line).group(1) for line in lines] == [  # type: ignore[union-attr]
        "1", "16", "31", "46", "61", "76", "91", "100",
    ]  # fmt: skip
    assert lines[1] == "troll, seed 0  16/100  16%  0:16 elapsed  1:24 left  reward 0.500  KL 0.016"


def test_a_log_file_gets_no_control_characters_and_no_broken_lines() -> None:
    clock = FakeClock()
    out, progress = plain(clock)
    with progress:
        progress.update(1, success=0.25, reward=0.5, kl_mean=0.1, kl_max=3.0, projected=0.2, entropy=1.25)
        progress.message("[bold]saved[/bold] to a path " + "x" * 200)
    text = out.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert text.count("\n") == 2
    assert "[bold]saved[/bold]" in text
    assert "success 25.0%  reward 0.500  KL 0.1  projected 20.0%  entropy 1.25" in text


def test_steps_done_before_a_resume_do_not_speed_up_the_estimate() -> None:
    clock = FakeClock()
    out, progress = plain(clock, done=80)
    with progress:
        for step in (81, 82, 83):  # the first step may hold what only a start costs
            clock.now += 10.0
            progress.update(step)
    assert "83/100  83%  0:30 elapsed  2:50 left" in out.getvalue()


def test_an_interrupted_run_leaves_its_last_step_in_the_log() -> None:
    clock = FakeClock()
    out, progress = plain(clock)

    def interrupted() -> None:
        with progress:
            progress.update(1)
            progress.update(2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "2/100" in out.getvalue().splitlines()[-1]


def test_a_terminal_gets_a_bar_with_the_latest_of_each_number() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, color_system=None)
    with TrainingProgress(4, "troll [seed 0]", displayed=DISPLAYED, console=console) as progress:
        progress.update(1, success=0.5, kl_mean=0.02)
        progress.update(2, kl_mean=0.04)
    last = [line for line in out.getvalue().splitlines() if "troll [seed 0]" in line][-1]
    assert "2/4" in last
    assert "success 50.0%  KL 0.04" in last


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="total=0"):
        TrainingProgress(0, "troll")


def test_several_runs_are_followed_by_their_folders(make_run: Callable[..., Path], tmp_path: Path) -> None:
    clock = FakeClock()
    out = io.StringIO()
    first = make_run("a", [{"kl_mean": 0.5}, {"kl_mean": 0.25}], [{"step": 1, "success": 0.75}])
    runs = {"TROLL, seed 0": (first, 2), "clip, seed 0": (tmp_path / "later", 4)}
    console = Console(file=out, width=60)
    with SeveralRuns(runs, displayed=DISPLAYED, console=console, clock=clock) as display:
        clock.now += 3.0
        display.refresh()
        display.refresh()
    assert out.getvalue() == "TROLL, seed 0  2/2  0:03 elapsed  success 75.0%  KL 0.25\n"


def test_of_a_long_run_only_the_end_is_read(make_run: Callable[..., Path]) -> None:
    """Several runs are looked at twice a second, for hours."""
    run = make_run("a", [{"kl_mean": 0.5}, {"kl_mean": 0.25}])
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(b"read in vain\n" * 2**16 + metrics.read_bytes())
    out = io.StringIO()
    with SeveralRuns({"a": (run, 2)}, displayed=DISPLAYED, console=Console(file=out)) as display:
        display.refresh()
    assert "2/2" in out.getvalue()
    assert "KL 0.25" in out.getvalue()
