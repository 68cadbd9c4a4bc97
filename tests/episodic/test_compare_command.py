"""`tether episodic compare`: what is trained, what is taken as it is, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from point_runs import POINT, content, tether

from tether.episodic import commands
from tether.episodic.options import CompareConfig, TrainConfig, comparison_runs
from tether.episodic.train import train
from tether.errors import CheckpointError, ConfigError
from tether.experiments import RunFolder


def test_a_comparisons_settings_survive_the_file_each_run_is_started_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where there are keywords for the environment, whose text may look like something else."""
    config = CompareConfig(tmp_path, preset="metaworld-quick:reach-v3", seeds=(0, 4), iterations=9)
    runs = comparison_runs(config)
    assert [(run.settings.algo, run.settings.seed) for run in runs] == [
        ("tce", 0),
        ("tce", 4),
        ("bbrl", 0),
        ("bbrl", 4),
    ]
    seen: list[TrainConfig] = []

    def note(config: TrainConfig) -> RunFolder:
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(commands, "train_command", note)
    with_keywords = CompareConfig(tmp_path, preset="hopper-jump-sparse-long", seeds=(1,))
    runs += comparison_runs(with_keywords)
    words = {"level": "1", "hard": "True", "mode": "dense", "sizes": (1, 2), "gain": -1.5, "flag": "--fast"}
    runs.append(replace(runs[-1], settings=replace(runs[-1].settings, env_options=words)))
    for one in runs:
        assert tether("episodic", "train", *commands._job(one).command[5:]) == 1
    assert seen == runs
    assert seen[-2].settings.env_options == {"show_memory": True}


@pytest.mark.parametrize("config", [{"algos": ()}, {"seeds": (1, 1)}, {"jobs": 0}])
def test_a_comparison_of_nothing_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CompareConfig(**config)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"preset": "hopper-jump-quick", "seeds": (7,)}, "preset, seeds would be ignored"),
        ({"env": POINT, "algos": ("tce",)}, "env, algos would be ignored"),
        ({"iterations": 3, "episodes": 4, "evaluate_every": 1}, "iterations, episodes, evaluate_every would"),
        ({"film": True}, "film would be ignored"),
    ],
)
def test_options_that_a_queue_leaves_no_room_for_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"queue=q\.yaml says what is trained; {named}"):
        CompareConfig(queue=Path("q.yaml"), **options)
    beside = CompareConfig(queue=Path("q.yaml"), output=Path("o"), results=Path("r.csv"), minutes=30, jobs=1)
    assert beside.minutes == 30


def test_a_comparison_trains_every_algorithm_once_and_reports(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    config = CompareConfig(
        tmp_path, env=POINT, seeds=(3,), iterations=2, episodes=4, report_to=("tensorboard",)
    )
    runs = commands.compare_command(config)
    assert all(list((run / "tensorboard").iterdir()) for run in runs)
    assert runs == [tmp_path / "tce-seed3", tmp_path / "bbrl-seed3"]
    tce, bbrl = (content(run) for run in runs)
    assert [len(tce[0]), len(bbrl[0])] == [2, 2]
    assert tce != bbrl
    logs = [path.read_bytes() for path in sorted(tmp_path.glob("*.log"))]
    words = (
        "--env",
        POINT,
        "--seeds",
        "3",
        "--iterations",
        "2",
        "--episodes",
        "4",
        "--output",
        str(tmp_path),
    )
    assert tether("episodic", "compare", *words) == 0  # nothing is left to do but the report
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.log"))] == logs
    assert "Report: file:" in capfd.readouterr().out
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> CompareConfig:
    """A comparison whose only run is finished."""
    folder = tmp_path_factory.mktemp("compare")
    config = CompareConfig(folder, env=POINT, algos=("tce",), seeds=(0,), iterations=1, episodes=4)
    (run,) = comparison_runs(config)
    train(run.settings, run.folder())
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iterations": 6, "episodes": 8}, "episodes: 4 there, 8 here; iterations: 1 there, 6 here"),
        ({"env": "tether/HopperJump-v0"}, "env_id: 'tether/PointReach-v0' there, 'tether/Hop"),
        ({"seeds": (1, 0), "evaluate_every": 1}, "evaluate_every: 10 there, 1 here"),
    ],
)
def test_a_finished_run_of_other_settings_is_not_taken_for_the_one_asked(
    changes: dict[str, Any], message: str, one_run: CompareConfig
) -> None:
    before = sorted(one_run.output.iterdir())
    with pytest.raises(ConfigError, match=rf"tce-seed0 was run with other.*{message}.*output folder"):
        commands.compare_command(replace(one_run, **changes))
    assert sorted(one_run.output.iterdir()) == before  # no settings of the new run, no other run


def test_a_finished_run_counts_whatever_changes_no_number_of_it(
    one_run: CompareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TrainConfig] = []
    monkeypatch.setattr(commands, "train_all", lambda runs, config: asked.extend(runs))
    commands.compare_command(one_run)
    (run,) = asked
    for name in ("num_workers", "checkpoint_every", "keep_checkpoints"):
        other = replace(run.settings, **{name: 7})
        commands.check_folders([replace(run, settings=other)])
    with pytest.raises(ConfigError, match="label: 'tce' there, 'ours' here"):
        commands.check_folders([replace(run, label="ours")])


def test_a_run_from_before_a_setting_had_its_default(one_run: CompareConfig) -> None:
    (run,) = comparison_runs(one_run)
    kept = RunFolder.open(run.folder()).config
    older = {name: value for name, value in kept.settings.items() if name != "precision"}
    commands.check_same_run(replace(kept, settings=older), run.folder(), run, "another folder")
    retired = kept.settings | {"flavour": 3}
    with pytest.raises(ConfigError, match=r"tce-seed0: Unknown setting flavour.*Give the comparison another"):
        commands.check_same_run(replace(kept, settings=retired), run.folder(), run, "another folder")


def test_a_branch_is_not_taken_for_a_run_with_its_settings(one_run: CompareConfig) -> None:
    (run,) = comparison_runs(one_run)
    kept = RunFolder.open(run.folder()).config
    branch = kept.settings | {"branch_from": "runs/other/checkpoints/step-000050"}
    with pytest.raises(ConfigError, match="begins with runs/other/checkpoints/step-000050, not with a new"):
        commands.check_same_run(replace(kept, settings=branch), run.folder(), run, "another folder")


def test_a_language_models_run_is_not_taken_for_a_robots(tmp_path: Path) -> None:
    config = CompareConfig(tmp_path, env=POINT, algos=("tce",), seeds=(0,))
    RunFolder.create(tmp_path / "tce-seed0", kind="llm", label="tce", seed=0, settings={}).close()
    with pytest.raises(CheckpointError, match="'llm'"):
        commands.compare_command(config)
