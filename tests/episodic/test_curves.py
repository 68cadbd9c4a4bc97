"""Runs of several tasks on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tether.episodic.curves import (
    by_study,
    by_suite,
    markdown_table,
    suite_panels,
    suite_rows,
    task_panels,
    task_rows,
    write_overview,
)
from tether.episodic.run_kind import EPISODIC_RUNS
from tether.experiments.run_config import RunConfig
from tether.experiments.run_data import RunData


def run(
    env_id: str, label: str, seed: int, scores: list[float], headline: str = "success", **options: Any
) -> RunData:
    settings: dict[str, Any] = {"env_id": env_id, "headline": headline, "env_options": options}
    config = RunConfig(kind="episodic", label=label, seed=seed, settings=settings)
    evals = [
        {
            "step": 10 * i,
            "env_steps": 100 * i,
            "time_s": 2.0 * i,
            f"{headline}_greedy": score,
            "success_any_greedy": 1.0,
            "jerk_greedy": 3.0,
        }
        for i, score in enumerate(scores)
    ]
    return RunData(Path(f"{label}-{seed}"), config, EPISODIC_RUNS, [], evals, False)


RUNS = [
    run("tether/B-v0", "tce", 1, [0.0, 0.5, 0.5, 1.0, 0.75]),
    run("tether/B-v0", "tce", 0, [0.0, 0.0, 0.25, 0.5, 0.5, 1.0]),
    run("tether/A-v0", "bbrl", 0, [1.5, 1.6, 1.7], "max_height"),
]


def test_studies_are_tasks_and_methods_with_their_seeds_in_order() -> None:
    assert {key: [run.config.seed for run in seeds] for key, seeds in by_study(RUNS).items()} == {
        ("A-v0", "bbrl"): [0],
        ("B-v0", "tce"): [0, 1],
    }


def test_a_seed_that_has_just_begun_does_not_hide_the_others_and_a_row_stands_once() -> None:
    begun = [run("tether/B-v0", "tce", 2, [0.0, 0.0]), run("tether/C-v0", "tce", 0, [0.0])]
    rows = task_rows([*RUNS, *begun])
    assert [row["seeds"] for row in rows if row["task"] == "B-v0"] == [
        "0.00, 0.50",
        "0.25, 0.50",
        "0.50, 0.75",
    ]
    assert [row["environment steps"] for row in rows if row["task"] == "C-v0"] == ["0"]


def test_environments_with_other_options_are_other_tasks() -> None:
    runs = [run("tether/A-v0", "tce", 0, [1.0, 2.0], reward=reward) for reward in ("dense", "final")]
    runs.append(run("tether/A-v0", "tce", 0, [1.0, 2.0], memory=True))
    assert [task for task, _ in by_study(runs)] == [
        "A-v0 (memory)", "A-v0 (reward='dense')", "A-v0 (reward='final')",
    ]  # fmt: skip


def test_rows_are_at_shares_of_the_steps_that_every_seed_took() -> None:
    """The shorter run took 400 steps, so 100, 200 and 400 are compared."""
    rows = [row for row in task_rows(RUNS) if row["task"] == "B-v0"]
    assert [row["environment steps"] for row in rows] == ["100", "200", "400"]
    assert [row["mean"] for row in rows] == ["0.250", "0.375", "0.625"]
    assert rows[-1]["seeds"] == "0.50, 0.75"
    assert [row["at any step"] for row in rows] == ["1.000"] * 3
    assert [row["at any step"] for row in task_rows(RUNS) if row["task"] == "A-v0"] == [""] * 3


def test_a_task_has_one_panel_judged_by_its_own_number(tmp_path: Path) -> None:
    first, second = task_panels(RUNS)
    assert (first.title, first.y_label, first.percent) == ("A-v0", "max height (m)", False)
    assert (second.title, second.percent) == ("B-v0", True)
    assert second.curves["tce"][1].y.tolist() == [0.0, 0.5, 0.5, 1.0, 0.75]
    assert second.curves["tce"][1].x.tolist() == pytest.approx([0, 1e-4, 2e-4, 3e-4, 4e-4])
    page = write_overview(RUNS, tmp_path / "index.html", "Robots & co").read_text()
    assert "Robots &amp; co" in page
    assert "3 of 3 runs" in page
    assert "<td>0.50, 0.75</td>" in page


SUITE = [
    run("tether/Reach-near-v3", "tce", 0, [0.0, 0.5, 1.0]),
    run("tether/Reach-near-v3", "tce", 1, [0.0, 0.0, 0.5]),
    run("tether/Reach-far-v3", "tce", 0, [0.0, 0.25, 0.25]),
    run("tether/Reach-wide-v3", "tce", 0, [0.0, 1.0]),
    run("tether/Reach-near-v3", "bbrl", 0, [0.0, 0.0, 0.5]),
]


def test_a_suite_is_several_tasks_of_one_name_that_are_judged_by_success() -> None:
    alone = [run("tether/Lift-up-v3", "tce", 0, [0.0]), run("tether/Lift-v3", "tce", 0, [0.0])]
    heights = [run(f"tether/Jump-{where}-v1", "tce", 0, [1.0], "max_height") for where in ("up", "far")]
    suites = by_suite([*RUNS, *SUITE, *alone, *heights])
    assert {
        suite: {label: len(tasks) for label, tasks in found.items()} for suite, found in suites.items()
    } == {"Reach": {"tce": 3, "bbrl": 1}}


def test_each_task_of_a_suite_counts_once_and_only_as_far_as_it_has_come() -> None:
    """At 100 steps three tasks of TCE: .25 (two seeds), .25 and 1; at 200 steps two: .75 and .25."""
    rows = [row for row in suite_rows(SUITE) if row["environment steps"] != "50"]
    assert [(row["method"], row["tasks"], row["environment steps"], row["mean success"]) for row in rows] == [
        ("bbrl", "1", "100", "0.000"),
        ("tce", "3", "100", "0.500"),
        ("tce", "1 shared", "100", "0.250"),
        ("bbrl", "1", "200", "0.500"),
        ("tce", "2", "200", "0.500"),
        ("tce", "1 shared", "200", "0.750"),
    ]
    assert {row["at any step, mean"] for row in rows} == {"1.000"}


def test_the_interquartile_mean_of_a_suite_leaves_its_hardest_and_easiest_quarter_out() -> None:
    scores = {"a": 0.0, "b": 0.5, "c": 0.75, "d": 1.0}
    (*_, last) = suite_rows(
        run(f"tether/Reach-{task}-v3", "tce", 0, [0.0, end]) for task, end in scores.items()
    )
    assert (last["mean success"], last["interquartile mean"]) == ("0.562", "0.625")


def test_a_suite_is_drawn_first_with_the_methods_that_have_come_far_in_every_task(tmp_path: Path) -> None:
    (panel,) = suite_panels([*RUNS, *SUITE])
    assert {label: [curve.y.tolist() for curve in curves] for label, curves in panel.curves.items()} == {
        "tce": [[0.0, 0.25, 0.25], [0.0, 0.25, 0.75], [0.0, 1.0]]
    }
    assert panel.title == "Reach: 3 tasks and their mean"
    assert panel.whole
    assert panel.percent
    assert suite_panels([*SUITE, run("tether/Reach-high-v3", "tce", 0, [0.0])]) == []
    page = write_overview(SUITE, tmp_path / "index.html", "Robots").read_text()
    assert page.index("1 shared") < page.index("Reach-far-v3")


def test_a_table_of_markdown_has_one_line_a_row() -> None:
    assert markdown_table([{"a": "1", "b": "2"}]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
