"""How many steps a learner needs: when it first comes to a value, when for good, and what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.robot_sample_efficiency import RESULTS, grouped, rows, steps_to

from benchmarks import robot_progress, robot_sample_efficiency
from tether.episodic.curves import markdown_table
from tether.episodic.run_kind import EPISODIC_RUNS
from tether.experiments.run_config import RunConfig
from tether.experiments.run_data import RunData


def run(*heights: float) -> RunData:
    config = RunConfig("episodic", "tce", 0, {"env_id": "tether/A-v0", "headline": "height"})
    evals = [{"env_steps": 100 * i, "height_greedy": height} for i, height in enumerate(heights)]
    return RunData(Path("run"), config, EPISODIC_RUNS, [], evals, False)


@pytest.mark.parametrize(
    ("heights", "first", "for_good"),
    [
        ((0.0, 2.0, 3.0), (50, True), (50, True)),
        ((0.0, 2.0, 0.0, 4.0), (50, True), (225, True)),
        ((0.0, 2.0, 0.0), (50, True), (200, False)),
        ((0.0, 0.5), (100, False), (100, False)),
        ((1.0, 1.0), (0, True), (0, True)),
    ],
)
def test_a_run_that_falls_back_is_not_there_yet(
    heights: tuple[float, ...], first: tuple[float, bool], for_good: tuple[float, bool]
) -> None:
    assert steps_to(run(*heights), 1.0) == first
    assert steps_to(run(*heights), 1.0, for_good=True) == for_good


def test_the_page_has_the_table() -> None:
    tables = (grouped(RESULTS / f"{name}.csv") for name in ("off-policy", "long", "short"))
    assert markdown_table(rows(*tables)) in robot_progress.PAGE.read_text(encoding="utf-8")
    assert robot_sample_efficiency.SHARE == 0.9
