"""The tables of long robot runs: those of the page are what the command prints of the committed runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import robot_progress
from tether.experiments.run_data import RunData

PAGE = robot_progress.PAGE.read_text(encoding="utf-8")


def test_the_page_shows_what_the_runs_measured() -> None:
    assert robot_progress.written_anew(PAGE) == PAGE
    shown = [found["words"].split("-")[0] for found in robot_progress.ON_PAGE.finditer(PAGE)]
    assert set(shown) == {"metaworld", "box", "table"}
    assert PAGE.count("<!-- robot_progress") == len(shown)


def test_a_table_is_written_anew_and_the_rest_stays() -> None:
    (first, *_) = robot_progress.ON_PAGE.finditer(PAGE)
    older = PAGE.replace(first[0], first[0].replace(" 100 % ", " 99 % "))
    assert older != PAGE
    assert robot_progress.written_anew(older) == PAGE


@pytest.mark.parametrize("words", [[], ["table-tennis-long"], ["--steps", "1"]])
def test_what_is_missing_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        robot_progress.asked(words)
    assert "a grid is needed, and --iterations or --steps" in capsys.readouterr().err


@pytest.fixture
def run() -> RunData:
    one = robot_progress.measured()["hopper-jump-sparse-long-ours", "tce-seed0"]
    evals = [
        {"step": 20, "env_steps": 1_900_000, "success_greedy": 0.0625, "goal_distance_greedy": 0.034},
        {"step": 40, "env_steps": 4_100_000, "success_greedy": 1.0, "goal_distance_greedy": 1.26},
    ]
    metrics = [{"step": 20, "success": 0.0125}, {"step": 40, "success": 0.5}]
    return replace(one, evals=evals, metrics=metrics)


@pytest.mark.parametrize(
    ("successes", "said"),
    [
        ((0.0, 1.0, 1.0), "2M"),
        ((0.0, 1.0, 0.5), "not"),
        ((1.0, 1.0, 1.0), "the start"),
        ((0.0, 0.0, 1.0), "3M"),
    ],
)
def test_a_row_for_a_run_says_since_when_it_always_succeeds(
    run: RunData, successes: tuple[float, ...], said: str
) -> None:
    evals = [
        {
            "step": step, "env_steps": 1e6 * step, "success_greedy": success, "success_any_greedy": 1.0,
            "return_greedy": 10.4 * step, "jerk_greedy": 2.6,
        }
        for step, success in enumerate((*successes, 0.0), 1)
    ]  # fmt: skip
    metrics = [{"step": step, "time_s": 90.0 * step} for step in range(1, 5)]
    settings = {**run.config.settings, "env_id": "tether/MetaWorld-reach-v3", "evaluate_every": 1}
    config = replace(run.config, settings=settings, label="tce, twice the region")
    one = replace(run, config=config, evals=evals, metrics=metrics)
    (row,) = robot_progress.per_run([[one, one]], "steps", [1, 3])
    assert row == {
        "task": "reach, TCE, twice the region",
        "1M": f"{100 * successes[0]:.0f} %",
        "3M": f"{100 * successes[2]:.0f} %",
        "at any step": "100 %",
        "always 100 % from": said,
        "return": "31",
        "jerk": "3",
        "minutes": "4",
    }
    other = replace(one, evals=[{**row, "jerk_greedy": 7.0} for row in evals])
    (row,) = robot_progress.per_run([[one, other]], "steps", [1, 3])
    assert row["jerk"] == "3, 7"


def test_a_pattern_chooses_grids_that_have_all_the_runs() -> None:
    found = robot_progress.chosen("metaworld-long-*-v3", ["tce-seed1", "tce-seed2", "bbrl-seed0"])
    assert len({run.path.parent.name for seeds in found for run in seeds}) == 10
    assert sorted({len(seeds) for seeds in found}) == [1, 2]
    with pytest.raises(SystemExit, match="have no tce-seed9 of metaworld-long-reach-v3"):
        robot_progress.chosen("metaworld-long-reach-v3", ["tce-seed9"])


def test_each_number_is_of_the_nearest_evaluation_and_in_its_unit(run: RunData) -> None:
    names = ("success", "exploring", "distance", "turn")
    assert robot_progress.progress([run], "steps", [2, 4.04], names) == [
        {"steps": "success of the mean motion, of 16 episodes", "2M": "6 %", "4.04M": "100 %"},
        {"steps": "success while exploring", "2M": "1.2 %", "4.04M": "50 %"},
        {"steps": "distance from the target at the end, mean motion", "2M": "3 cm", "4.04M": "1.3 m"},
    ]


@pytest.mark.parametrize(("of", "column"), [("iteration", 1_040), ("steps", 6.5)])
def test_a_run_that_has_not_come_so_far_is_refused(run: RunData, of: str, column: float) -> None:
    with pytest.raises(
        SystemExit, match=r"has no evaluation near .*; its last is of iteration 40 after 4,100,000"
    ):
        robot_progress.progress([run], of, [column], ["success"])


def test_what_exploring_motions_did_is_a_mean_of_a_whole_interval(run: RunData) -> None:
    settings = {**run.config.settings, "evaluate_every": 20}
    evals = [*run.evals, {"step": 43, "env_steps": 4_400_000, "success_greedy": 0.25}]
    metrics = [*run.metrics, {"step": 43, "success": 0.9}]
    ended = replace(run, config=replace(run.config, settings=settings), evals=evals, metrics=metrics)
    last, exploring = robot_progress.progress([ended], "iteration", [43], ["success", "exploring"])
    assert (last["43"], exploring["43"]) == ("25 %", "50 %")


def test_of_several_runs_each_row_says_which(run: RunData) -> None:
    other = replace(run, config=replace(run.config, label="tce, twice the region"))
    published = replace(run, config=replace(run.config, label="tce"))
    rows = robot_progress.progress([published, other], "iteration", [39], ["exploring"])
    assert [row["iteration"] for row in rows] == [
        "success while exploring, as published",
        "success while exploring, twice the region",
    ]
    assert {row["39"] for row in rows} == {"50 %"}
