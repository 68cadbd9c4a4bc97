"""Every recipe loads: its settings go together, its task exists, and the table names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from scripts import REPOSITORY, load_script
from tether.cli import _parse
from tether.llm import precision
from tether.llm.config import TrainConfig
from tether.llm.grid import cells
from tether.llm.tasks import make_task
from tether.llm.trainers import _trl_settings

RECIPES = REPOSITORY / "recipes"
TRAINING = sorted((RECIPES / "llm").glob("*.yaml"))
LAUNCH = sorted((RECIPES / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_a_training_recipe_parses_and_its_task_takes_its_options(path: Path) -> None:
    settings = _parse(TrainConfig, "tether llm train", ["--config", str(path)])
    task = make_task(settings.task, **settings.task_options)
    assert task.chat
    assert settings.output.name == path.stem.replace("_", "-")
    assert settings.steps % settings.updates_per_rollout == 0
    assert (settings.max_response_tokens or task.max_response_tokens) <= 4096


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_trl_takes_the_settings_of_a_recipe(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rollouts by transformers and on the CPU, for this machine has nothing else."""
    from tether.integrations.trl import TROLLConfig

    monkeypatch.setattr(precision, "bfloat16_pays", lambda: True)  # whatever this processor can
    more = ["--rollouts", "transformers", "--device", "cpu"]
    settings = _parse(TrainConfig, "tether llm train", ["--config", str(path), *more])
    task = make_task(settings.task, **settings.task_options)
    trl = TROLLConfig(**_trl_settings(settings, task, tmp_path), troll_kl_bound=settings.method.kl_bound)
    assert trl.generation_batch_size == settings.prompts_per_rollout * settings.responses_per_prompt


def test_the_quickstart_is_a_comparison_that_parses() -> None:
    from tether.llm.compare_config import CompareConfig

    quickstart = _parse(CompareConfig, "tether llm compare", ["--config", str(RECIPES / "quickstart.yaml")])
    assert quickstart.methods == ("troll", "clip")


def test_the_run_of_a_real_model_is_a_comparison_whose_every_cell_goes_together() -> None:
    from tether.llm.compare_config import CompareConfig

    path = RECIPES / "train_real.yaml"
    grid = _parse(CompareConfig, "tether llm compare", ["--config", str(path), "--methods", "troll", "clip"])
    for cell in cells(grid):
        assert (cell.train.rollouts, cell.train.share_prefixes) == ("compact", True)
        assert make_task(cell.train.task, **cell.train.task_options).chat


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.stem)
def test_a_launch_file_is_read_by_accelerate_and_each_key_is_an_option(path: Path) -> None:
    read = load_config_from_file(str(path))
    content = yaml.safe_load(path.read_text())
    options = vars(launch_command_parser().parse_args(["script.py"]))
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert str(read.distributed_type).rpartition(".")[2] == kinds[path.stem]
    assert read.num_processes == 8
    for key in content.get("fsdp_config", {}):
        assert key in options, f"{key} is no option of accelerate launch"
    for key in content.get("deepspeed_config", {}):
        assert key in options, f"{key} is no option of accelerate launch"
    if path.stem == "fsdp2":
        assert read.fsdp_config["fsdp_version"] == 2
    if path.stem.startswith("zero"):
        assert f"zero{read.deepspeed_config['zero_stage']}" == path.stem


def test_the_table_names_every_recipe_and_every_recipe_is_there() -> None:
    text = (RECIPES / "README.md").read_text()
    named = set(re.findall(r"`((?:llm|accelerate)/[\w.]+\.yaml|\w+\.(?:py|yaml))`", text))
    there = {path.relative_to(RECIPES).as_posix() for path in (*TRAINING, *LAUNCH)}
    there |= {path.name for path in (*RECIPES.glob("*.py"), *RECIPES.glob("*.yaml"))}
    assert named == there


def test_dapo_math_is_split_without_overlap_and_trains_as_written(tmp_path: Path) -> None:
    recipe = load_script("recipes/dapo_math.py")
    rows = [{"prompt": f"Compute {n}+1. ", "solution": n + 1} for n in range(1000)]
    parts = recipe.split_rows([*rows, *rows[:50]])
    prompts = [row["prompt"] for part in parts.values() for row in part]
    assert len(prompts) == len(set(prompts)) == 1000
    assert 0 < len(parts["validation"]) < 30
    assert 0 < len(parts["test"]) < 30
    recipe.write(parts, tmp_path / "dapo")
    task = make_task("custom", path=str(tmp_path / "dapo"), verifier="math", bad_rows="skip")
    assert len(task.problems("train")) == len(parts["train"])
    problem = task.problems("validation")[0]
    assert task.verify(rf"so \boxed{{{problem.answer}}}", problem.answer).correct
