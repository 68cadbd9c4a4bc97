from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from rich.console import Console

from tether.errors import CheckpointError
from tether.experiments import RunData, RunFolder, print_results, results_table, study_table, summarise
from tether.experiments.comparison import Entry, compare_methods
from tether.experiments.statistics import bootstrap_interval
from tether.kinds import KINDS

MakeRun = Callable[..., Path]

STARTS, FINALS = (0.30, 0.32, 0.28), (0.60, 0.70, 0.65)


def load_runs(paths: Iterable[str | Path]) -> list[RunData]:
    return study_table.load_runs(paths, KINDS)


def three_seeds(make_run: MakeRun) -> list[Path]:
    return [
        make_run(
            f"troll-{seed}",
            [
                {"kl_mean": 0.01, "kl_max": 0.2, "projected": 0.1, "step_seconds": 1.0},
                {"kl_mean": 0.03, "kl_max": 0.5 + seed, "projected": 0.3, "step_seconds": 9.0},
                {"kl_mean": 0.02, "kl_max": math.nan, "projected": 0.2, "step_seconds": 2.0},
            ],
            [{"step": 0, "success": start, "problems": 50}, {"step": 3, "success": final, "problems": 50}],
            seed=seed,
        )
        for seed, (start, final) in enumerate(zip(STARTS, FINALS, strict=True))
    ]


def test_a_summary_is_the_hand_computed_line(make_run: MakeRun) -> None:
    (line,) = summarise(load_runs(three_seeds(make_run)))
    assert (line.label, line.seeds, line.metric, line.over) == ("TROLL", (0, 1, 2), "success", "seeds")
    assert line.start is not None
    assert line.final is not None
    assert line.gain is not None
    assert line.start.value == pytest.approx(0.30)
    assert line.final.value == pytest.approx(0.65)
    assert line.gain.value == pytest.approx(0.35)
    expected = bootstrap_interval(np.subtract(FINALS, STARTS))  # of each run's own gain: seeds are paired
    assert (line.gain.low, line.gain.high) == pytest.approx((expected.low, expected.high))
    assert line.kl_mean == pytest.approx(0.02)
    assert line.kl_max == 2.5
    assert line.projected == pytest.approx(0.2)
    assert line.step_seconds == 2.0
    assert line.run_seconds == 6.0
    assert line.finished


def test_a_single_seed_has_the_interval_of_its_problems(make_run: MakeRun) -> None:
    (line,) = summarise(load_runs(three_seeds(make_run)[:1]))
    assert line.over == "problems"
    assert line.final is not None
    wilson = scipy.stats.binomtest(30, 50).proportion_ci(0.95, method="wilson")
    assert (line.final.low, line.final.high) == pytest.approx((wilson.low, wilson.high))
    assert line.gain is not None
    assert line.gain.low == line.gain.high  # nothing is known of it


def test_a_single_robot_has_the_interval_of_its_episodes(make_run: MakeRun) -> None:
    """Of the mean motion's; what training measures is over others."""
    evals = [{"step": 0, "success_greedy": 0.25, "env_steps": 0.0}]
    settings = {"evaluation_episodes": 16}
    (line,) = summarise(load_runs([make_run("robot", [], evals, kind="episodic", settings=settings)]))
    assert line.final is not None
    assert line.over == "problems"
    expected = scipy.stats.binomtest(4, 16).proportion_ci(method="wilson")
    assert (line.final.low, line.final.high) == pytest.approx((expected.low, expected.high))
    (line,) = summarise(
        load_runs([make_run("trained", [{"success": 0.25}] * 2, [], kind="episodic", settings=settings)])
    )
    assert line.over == "nothing"


def test_an_infinite_kl_is_the_largest(make_run: MakeRun) -> None:
    path = make_run("a", [{"kl_max": math.inf}, {"kl_max": math.nan}, {"kl_max": 1.0}])
    (line,) = summarise(load_runs([path]))
    assert line.kl_max == math.inf
    assert line.final is None


def test_methods_are_compared_by_what_all_of_them_measured(make_run: MakeRun) -> None:
    both = make_run("a", [{"reward": 0.5}], [{"step": 1, "success": 0.5, "success_greedy": 0.7}])
    greedy = make_run("b", [{"reward": 0.5}], [{"step": 1, "success_greedy": 0.6}], label="clip")
    lines = summarise(load_runs([both, greedy]))
    assert [(line.metric, line.final.value) for line in lines if line.final] == [
        ("success_greedy", 0.7),
        ("success_greedy", 0.6),
    ]


def test_evaluations_come_before_what_training_measures(make_run: MakeRun) -> None:
    path = make_run("a", [{"success": 0.1}], [{"step": 1, "success_greedy": 0.6, "height": 1.7}])
    assert [line.metric for line in summarise(load_runs([path]))] == ["success_greedy"]
    training = make_run("b", [{"success": 0.1}], label="clip")
    assert [line.metric for line in summarise(load_runs([path, training]))] == ["success", "success"]


def test_no_run_is_compared_by_its_training_with_others_by_their_evaluations(make_run: MakeRun) -> None:
    evaluated = make_run("a", [{"reward": 0.2}], [{"step": 1, "reward": 0.9}])
    training = make_run("b", [{"reward": 0.5}], label="clip")
    runs = load_runs([evaluated, training])
    assert [(line.label, line.final.value) for line in summarise(runs) if line.final] == [
        ("clip", 0.5),
        ("TROLL", 0.2),
    ]
    metric, rows = compare_methods([Entry(run.config.label, "", run) for run in runs], None)
    assert (metric, [row.final.value for row in rows]) == ("reward", [0.2, 0.5])


def test_runs_may_name_what_they_are_compared_by(make_run: MakeRun) -> None:
    evals = [{"step": 0, "success": 0.0, "height": 1.5}, {"step": 1, "success": 0.0, "height": 1.75}]
    path = make_run("a", [{"reward": 0.1}], evals, settings={"headline": "height"})
    (line,) = summarise(load_runs([path]))
    assert line.metric == "height"
    assert line.gain is not None
    assert line.gain.value == pytest.approx(0.25)
    assert not line.is_fraction
    other = make_run("b", [{"reward": 0.1}], evals, label="b")
    assert {line.metric for line in summarise(load_runs([path, other]))} == {"success"}


def test_methods_stand_best_first_and_those_without_a_result_last(make_run: MakeRun) -> None:
    finals = {"low": 0.2, "high": 0.9, "unknown": math.nan, "middle": 0.5}
    paths = [make_run(name, [], [{"step": 0, "success": y}], label=name) for name, y in finals.items()]
    assert [line.label for line in summarise(load_runs(paths))] == ["high", "middle", "low", "unknown"]


def test_a_seed_that_diverged_is_counted_and_the_others_are_not_its_methods_result(make_run: MakeRun) -> None:
    for seed, final in enumerate((0.9, math.nan, 0.8)):
        evals = [{"step": step, "success": y} for step, y in enumerate((0.4, 0.9, final))]
        make_run(f"troll-{seed}", [], evals, seed=seed)
    steady = [{"step": step, "success": 0.5} for step in (0, 1)]
    clip = make_run("clip", [], steady, label="clip", finished=False)
    best, diverged = summarise(load_runs([clip.parent]))
    assert (best.label, best.remarks) == ("clip", "unfinished")
    assert (diverged.final, diverged.gain, diverged.remarks) == (None, None, "1 of 3 ended not finite")
    assert diverged.start is not None
    assert diverged.start.value == pytest.approx(0.4)
    out = io.StringIO()
    print_results(load_runs([clip.parent]), Console(file=out, width=100))
    assert "TROLL (1 of 3 ended not finite)" in out.getvalue()


def test_a_headline_is_found_in_evaluations_of_the_mean_policy(make_run: MakeRun) -> None:
    """Training measures the height of samples, an evaluation that of the mean motion; success stays at 0."""
    evals = [{"step": step, "success_greedy": 0.0, "height_greedy": 1.5 + step / 4} for step in (0, 1)]
    path = make_run("a", [{"success": 0.0, "height": 1.6}], evals, settings={"headline": "height"})
    (line,) = summarise(load_runs([path]))
    assert (line.metric, line.final.value if line.final else None) == ("height_greedy", 1.75)


def test_episodic_runs_stand_at_their_environment_steps(make_run: MakeRun) -> None:
    path = make_run(
        "a",
        [{"env_steps": 100.0, "entropy": 3.0}, {"env_steps": 250.0, "entropy": 2.0}],
        [{"step": 0, "success": 0.0}, {"step": 2, "success": 1.0}],
        kind="episodic",
    )
    (run,) = load_runs([path])
    entropy, success = run.curve("entropy"), run.eval_curve("success")
    assert entropy is not None
    assert success is not None
    assert entropy.x.tolist() == [100.0, 250.0]
    assert success.x.tolist() == [0.0, 250.0]
    assert run.curve("reward") is None


def test_a_missing_run_an_empty_run_and_mixed_kinds_are_errors(make_run: MakeRun, tmp_path: Path) -> None:
    llm = make_run("a", [{"reward": 0.5}])
    episodic = make_run("b", [{"reward": 0.5}], kind="episodic", label="tce")
    with pytest.raises(CheckpointError, match="no such folder"):
        load_runs([llm, tmp_path / "nowhere"])
    with pytest.raises(CheckpointError, match=r"different kinds.*a is llm.*b is episodic"):
        load_runs([llm, episodic])
    with pytest.raises(CheckpointError, match="No runs"):
        load_runs([])
    RunFolder.create(tmp_path / "new", kind="llm", label="a", seed=0, settings={}).close()
    with pytest.raises(CheckpointError, match="new is empty"):
        load_runs([llm, tmp_path / "new"])


def test_the_results_table_shows_each_method_with_its_interval(make_run: MakeRun) -> None:
    paths = three_seeds(make_run)
    clip = make_run(
        "clip", [{"reward": 0.1}], [{"step": 0, "success": 0.3}, {"step": 1, "success": 0.25}],
        label="clip [low]", finished=False,
    )  # fmt: skip
    out = io.StringIO()
    print_results([*paths, clip], Console(file=out, width=80))
    text = out.getvalue()
    interval = bootstrap_interval(FINALS)
    assert "65.0 %" in text
    assert f"({100 * interval.low:.1f}-{100 * interval.high:.1f})" in text
    assert "+35.0 points" in text
    assert "TROLL" in text
    assert "clip [low]" in text
    assert "(unfinished)" in text
    assert "25.0 %" in text
    assert "-5.0 points" in text
    assert "0:06" in text
    assert results_table(summarise(load_runs(paths))).row_count == 1


def test_the_table_says_once_what_all_labels_end_in_and_cuts_no_setting_off(make_run: MakeRun) -> None:
    evaluations = [{"step": 0, "success": 0.3, "problems": 50}, {"step": 3, "success": 0.4, "problems": 50}]
    paths = [
        make_run(name, [{"step_seconds": 1.0}], evaluations, label=f"{method}, 64 updates, lr 0.0003")
        for name, method in (("a", "dppo divergence_low=0.05, divergence_high=0.05"), ("b", "clip"))
    ]
    out = io.StringIO()
    print_results(paths, Console(file=out, width=80))
    title, rows = out.getvalue().split("\n", 1)
    assert title.strip() == "Success, 64 updates, lr 0.0003"
    assert "64 updates" not in rows
    named = "".join(line.split("│")[1].strip() for line in rows.split("\n") if line.startswith("│"))
    assert "divergence_high=0.05" in named
    assert max(map(len, out.getvalue().split("\n"))) <= 80
