"""Examples of an algorithm, an environment and a preset from outside: they learn, and resume exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import REPOSITORY
from tether.cli import main
from tether.episodic.algorithms import build_learner, find_algorithm
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.train import load_config, train
from tether.experiments import RunFolder

EXAMPLES = REPOSITORY / "examples"
TIMES = {"time_s", "sampling_seconds"}
SMALL = ("--episodes", "4", "--batch", "8", "--steps", "3", "--evaluation-episodes", "2", "--no-film")


@pytest.fixture(autouse=True)
def examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def small(**changes: Any) -> Any:
    from own_algorithm import via_point

    config = replace(via_point(), iterations=6, episodes=4, batch=8, steps=3, capacity=10, checkpoint_every=2)
    return replace(config, evaluate_every=2, **changes)


def numbers(run: Path) -> list[dict[str, float]]:
    folder = RunFolder.open(run)
    rows = folder.metrics() + folder.evals()
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def crash_and_resume(config: Any, out: Path, after: int) -> None:
    def crash(step: int, _: dict[str, float]) -> None:
        if step == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, out, report=crash)
    train(config, out, resume=True)


def test_the_script_runs_and_learns() -> None:
    """From standing still (a return of -1.5, the two distances) to motions that miss by centimetres."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "own_algorithm.py")]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=500)
    returns = [float(line.split()[-1]) for line in shown.stdout.splitlines()]
    assert returns[0] < -1.0
    assert returns[-1] > -0.3


@pytest.mark.parametrize("after", [3, 5])
def test_a_run_with_a_replay_buffer_and_targets_resumes_to_the_same_end(tmp_path: Path, after: int) -> None:
    """The buffer is full by then, so that its oldest episodes have been dropped as well."""
    train(small(), tmp_path / "uninterrupted")
    crash_and_resume(small(), tmp_path / "resumed", after)
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "uninterrupted")
    assert RunFolder.open(tmp_path / "resumed").metrics()[-1]["replay"] == 10


@pytest.mark.parametrize("forgotten", ["replay", "critic_targets", "policy_target"])
def test_a_part_that_is_not_saved_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """The test above compares what depends on every part."""
    import own_algorithm

    complete = own_algorithm.OffPolicy.parts

    def parts(self: Any) -> dict[str, Any]:
        return {name: part for name, part in complete(self).items() if name != forgotten}

    train(small(), tmp_path / "uninterrupted")
    monkeypatch.setattr(own_algorithm.OffPolicy, "parts", parts)
    crash_and_resume(small(), tmp_path / "resumed", after=3)
    assert numbers(tmp_path / "resumed") != numbers(tmp_path / "uninterrupted")


def test_the_command_line_takes_its_names_and_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed, and in a settings file; the run's folder remembers them."""
    file = tmp_path / "settings.yaml"
    file.write_text("preset: own_algorithm:via_point\niterations: 2\n")
    words = ("episodic", "train", "--config", str(file), *SMALL, "--critics", "3")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--output", str(tmp_path / "run")])
    assert ended.value.code == 0
    config = load_config(tmp_path / "run")
    assert (config.algo, config.env_id) == ("own_algorithm:OffPolicy", "own_environment:ViaPoint-v0")
    with EpisodeSampler(config.env_id) as sampler:
        learner: Any = build_learner(config, sampler.spec)
    assert len(learner.critics) == 3
    with pytest.raises(SystemExit):
        main(["episodic", "train", "--algo", "own_algorithm:OffPolicy", "--help"])
    shown = capsys.readouterr().out
    assert "Episodes the replay buffer holds" in shown
    assert "--update.gae-lambda" not in shown  # a setting of TCE alone


def test_its_environment_serves_the_built_in_algorithms_too(tmp_path: Path) -> None:
    words = ("--env", "own_environment:ViaPoint-v0", "--iterations", "1", "--episodes", "2", "--workers", "1")
    words += ("--evaluation-episodes", "2", "--no-film", "--output", str(tmp_path / "run"))
    with pytest.raises(SystemExit) as ended:
        main(["episodic", "train", *words])
    assert ended.value.code == 0
    assert RunFolder.open(tmp_path / "run").config.settings["headline"] == "miss"


def test_a_comparison_sets_it_beside_a_built_in_one(tmp_path: Path) -> None:
    """It has no variant of the preset: it takes the preset's environment, motion and budget."""
    from tether.episodic.options import CompareConfig, comparison_runs

    runs = comparison_runs(
        CompareConfig(
            tmp_path, preset="hopper-jump-quick", algos=("tce", "own_algorithm:OffPolicy"), seeds=(0, 1)
        )
    )
    own, tce = runs[2].settings, runs[0].settings
    assert (own.env_id, own.motion, own.episodes) == (tce.env_id, tce.motion, tce.episodes)
    assert isinstance(own, find_algorithm("own_algorithm:OffPolicy").config_type)
    assert len({run.folder() for run in runs}) == 4


def test_evaluating_draws_nothing_from_the_learner(tmp_path: Path) -> None:
    config = small()
    with EpisodeSampler(config.env_id) as sampler:
        learner = build_learner(config, sampler.spec)
        before = learner.generator.get_state()
        learner.act(sampler.reset(3), explore=False)
    assert torch.equal(before, learner.generator.get_state())


def test_the_smallest_algorithm_of_the_page_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/own_algorithm.md shows: the point ends twice as near to its goals, or nearer."""
    page = (REPOSITORY / "docs" / "own_algorithm.md").read_text(encoding="utf-8")
    (tmp_path / "elites.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    from elites import ElitesConfig

    motion = small().motion
    config = ElitesConfig(
        "own_environment:ViaPoint-v0", iterations=12, episodes=30, num_workers=0, motion=motion
    )
    train(config, tmp_path / "run")
    returns = [row["return_greedy"] for row in RunFolder.open(tmp_path / "run").evals()]
    assert returns[0] < -1.0
    assert returns[-1] > 0.5 * returns[0]
