"""What each deviation from the published settings buys, as a table."""

from __future__ import annotations

from pathlib import Path

from benchmarks.robot_ablation import by_task, rows

from tether.episodic.run_kind import EPISODIC_RUNS
from tether.experiments.run_config import RunConfig
from tether.experiments.run_data import RunData


def run(label: str, seed: int, returns: list[float]) -> RunData:
    config = RunConfig(kind="episodic", label=label, seed=seed, settings={"env_id": "tether/A-v0"})
    evals = [
        {"env_steps": 100 * i, "time_s": 2.0 * i, "return_greedy": value, "success_greedy": value / 10}
        | {"success_any_greedy": 1.0, "jerk_greedy": 3.0}
        for i, value in enumerate(returns, 1)
    ]
    return RunData(Path(f"{label}-{seed}"), config, EPISODIC_RUNS, [], evals, False)


def test_a_deviation_is_measured_against_the_published_settings() -> None:
    runs = [
        run("tce, float32", 0, [9.0, 9.0, 9.0, 6.0]),
        run("tce, float32", 1, [9.0, 9.0, 9.0, 8.0]),
        run("tce, published", 1, [0.0, 0.0, 0.0, 4.0]),
        run("tce, published", 0, [0.0, 0.0, 0.0, 2.0]),
        run("tce, float32", 2, [9.0, 9.0]),  # not there yet
    ]
    ((task, variants),) = by_task(runs).items()
    published, other = rows(variants)
    assert task == "A-v0"
    assert published["settings"] == "published"
    assert published["to published"] == published["p"] == ""
    assert published["success"] == "0.30 (0.20, 0.40)"
    assert [other[name] for name in ("settings", "seeds", "steps", "return")] == ["float32", "2", "400", "7"]
    assert other["to published"] == "+4 (+2 to +6)"
    assert other["p"] == "0.33"  # 2 of 6 ways to deal out two and two
    assert other["seconds for 1000 steps"] == "20.00"


def test_a_task_waits_for_its_published_settings() -> None:
    assert by_task([run("tce, float32", 0, [1.0])]) == {}
