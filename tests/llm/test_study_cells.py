"""Every method of every study, at every estimator and staleness, trains for a batch (make test-slow)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tether.cli import read_grid
from tether.experiments import RunFolder
from tether.llm.config import TrainConfig
from tether.llm.grid import cells
from tether.llm.models import EMBEDDED
from tether.llm.tasks import make_task
from tether.llm.train import train

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


def small_runs() -> dict[str, TrainConfig]:
    """One run for each way of training that any study has, cut down to a batch of sixteen responses."""
    found: dict[str, TrainConfig] = {}
    for study in sorted(STUDIES.rglob("*.yaml")):
        config = read_grid(study)
        for cell in cells(config):
            updates = min(cell.train.updates_per_rollout, 8)
            run = replace(
                cell.train,
                model=cell.train.model if cell.train.model in EMBEDDED else "embedded",
                task="arithmetic",
                task_options={},
                prompts_per_rollout=4,
                responses_per_prompt=4,
                updates_per_rollout=updates,
                steps=updates,
                eval_every=0,
                save_every=updates,
                eval_problems=4,
                learning_rate=3e-4,
                name=None,
                seed=0,
                threads=1,
                device="cpu",
                resume=False,
            )
            found.setdefault(f"{cell.method}-{run.estimator.name}-{run.optimizer}-{updates}", run)
    return found


RUNS = small_runs()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore:Every batch of rollouts serves a single update")
def test_every_way_of_training_that_a_study_has_works(name: str, tmp_path: Path) -> None:
    run = RunFolder.open(train(replace(RUNS[name], output=tmp_path / "run")).path)
    assert run.finished
    lines = run.metrics()
    assert all(line["loss"] == line["loss"] for line in lines)
    assert RUNS[name].updates_per_rollout == 1 or max(line["kl_max"] for line in lines) > 0


def test_the_studies_cover_every_trust_region_and_most_estimators() -> None:
    assert {run.method.name for run in RUNS.values()} >= {
        "troll",
        "clip",
        "none",
        "dppo",
        "trm",
        "cispo",
        "vespo",
    }
    assert {run.estimator.name for run in RUNS.values()} >= {
        "grpo",
        "gspo",
        "rloo",
        "ppo",
        "reinforce_plus_plus",
    }


def test_the_study_of_cost_pays_by_the_alphabet_so_that_every_update_has_a_gradient() -> None:
    """Rewards that are all alike give no gradient, and rows without gradient cost next to nothing."""
    config = read_grid(STUDIES / "i-cost.yaml")
    options = config.train.task_options
    task = make_task(config.train.task, **options | {"path": str(STUDIES / Path(str(options["path"])).name)})
    [problem] = task.problems("train", limit=1)
    texts = ("First, Tom gives away four.", "Let me see.", "Maria has", "Tom has", "what?")
    assert [task.verify(text, problem.answer).reward for text in texts] == [1, 1, 0, 0, 0]
