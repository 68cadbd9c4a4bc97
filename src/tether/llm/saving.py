"""The trained model as a folder anybody can load: whole weights, tokenizer and card; and its upload."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.errors import ConfigError, TetherError
from tether.experiments import RunFolder, atomic_write_text
from tether.experiments.run_config import flatten_settings
from tether.experiments.statistics import proportion_interval
from tether.llm.config import TrainConfig

if TYPE_CHECKING:
    from tether.integrations.trl import OldPolicyTrainer

UNFINISHED = ".unfinished-checkpoint"
"""Where in a run folder a checkpoint is written before it counts."""


def save_trained_model(
    config: TrainConfig, run: RunFolder | None, trainer: OldPolicyTrainer, tokenizer: Any
) -> None:
    """Write ``<run>/model``: the trained weights with adapters merged, the tokenizer and a card.

    A model that was there stays until the new one is complete. Every process of a distributed run calls
    this; ``run`` is None in those that do not write.
    """
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if sharded or config.quantization != "none":
        # Adapters go onto the base model's own weights, not onto their 4-bit or sharded copy.
        gathered = config.output / ".gathered-model"
        trainer.save_model(str(gathered))
        if run is not None:
            finish_from_checkpoint(config, run, gathered, tokenizer)
            shutil.rmtree(gathered)
        return
    if run is None:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    _write(config, run, model.save_pretrained, tokenizer)


def finish_from_checkpoint(config: TrainConfig, run: RunFolder, checkpoint: Path, tokenizer: Any) -> None:
    """Write ``<run>/model`` from a checkpoint: its weights, or its adapters merged into the base model."""
    from tether.llm.models import ADAPTER, load_model_and_tokenizer

    if not (checkpoint / ADAPTER).is_file():
        model, _ = load_model_and_tokenizer(checkpoint, dtype="auto")
    else:
        from peft import PeftModel

        dtype = "bfloat16" if config.quantization != "none" and config.dtype == "auto" else config.dtype
        base, _ = load_model_and_tokenizer(config.model, dtype=dtype)
        model = PeftModel.from_pretrained(base, str(checkpoint)).merge_and_unload()
    _write(config, run, model.save_pretrained, tokenizer)


def _write(config: TrainConfig, run: RunFolder, save: Callable[[Path], Any], tokenizer: Any) -> None:
    """Beside the final name first, then in its place."""
    folder = run.path / "model"
    unfinished, replaced = folder.with_name(".model.tmp"), folder.with_name(".model.old")
    for left_over in (unfinished, replaced):
        if left_over.exists():
            shutil.rmtree(left_over)
    save(unfinished)
    tokenizer.save_pretrained(unfinished)
    atomic_write_text(unfinished / "README.md", model_card(config, run))
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(unfinished, folder)
    if replaced.exists():
        shutil.rmtree(replaced)


def check_hub_access(repository: str) -> None:
    """Refuse before training what would fail after it: no token, no connection."""
    from httpx import HTTPError
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except (HTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"push_to_hub={repository!r}: the hub cannot be reached or knows no token ({error}). Run "
            "`hf auth login`, or leave push_to_hub out and upload the model folder later."
        ) from error


def upload(folder: Path, repository: str, say: Callable[[str], None]) -> None:
    """Upload a model folder to a repository of the hub, which is made, private, if it is not there."""
    from httpx import HTTPError
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        created = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id, folder_path=str(folder), commit_message="Trained with Tether"
        )
    except (HTTPError, OSError, ValueError) as error:
        raise TetherError(
            f"The run is finished and its model is in {folder}, but uploading it to {repository} failed "
            f"({error}). Upload it with: hf upload {repository} {folder}"
        ) from error
    say(f"Uploaded to {created.url} (private, unless it was public before).")


_PAPERS = {
    "troll": "TROLL: Trust Region Optimization for Large Language Models ([arXiv 2510.03817]"
    "(https://arxiv.org/abs/2510.03817))",
    "clip": "the clip of PPO ([arXiv 1707.06347](https://arxiv.org/abs/1707.06347))",
    "none": "no trust region",
}


def model_card(config: TrainConfig, run: RunFolder) -> str:
    """The text of ``README.md`` in the model's folder: method, data, results, settings, seed, licence.

    Absolute paths of the machine are cut to their last part, so that the card can be passed on.
    """
    base = _shown(config.model)
    of_the_hub = config.model.count("/") == 1 and not Path(config.model).exists()
    origin = f"base_model: {config.model}\n" if of_the_hub else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
{origin}tags:
- tether
- reinforcement-learning
- {config.estimator.name}
- {config.method.name}
---

# {base}, trained on {config.task}

`{base}` after {config.steps} steps of reinforcement learning with verifiable rewards, by
[Tether](https://pypi.org/project/tether-rl/) {run.config.versions.get("tether-rl", "")}.

## Method

- Trust region: {config.label}; see {_PAPERS.get(config.method.name, config.method.name)}.
- Advantages and aggregation: {config.estimator.name}.
- {config.prompts_per_rollout} problems x {config.responses_per_prompt} responses a batch, \
{config.updates_per_rollout} updates on each.
- {_weights(config)}

## Data

Task `{config.task}`{_options(config)}. Rewards come from a program that checks the answer. \
Evaluation uses problems of the {config.eval_split} split, which are not trained on.

## Results

{_results(run)}
One run, seed {config.seed}; intervals (95 %, Wilson) are over problems and say nothing about other seeds.

## Settings

| setting | value |
|---|---|
{_settings(config)}
Versions: {", ".join(f"{name} {version}" for name, version in run.config.versions.items())}.

## Licence

The weights derive from `{base}`: its licence and terms of use apply, and those of the training data may.

## Limits

Trained on one task with a program as judge. Nothing was done about safety or about other skills, \
which may have suffered.
"""


def _weights(config: TrainConfig) -> str:
    if config.lora_rank is None:
        return f"All weights, {config.dtype}."
    under = "" if config.quantization == "none" else f" over {config.quantization} weights"
    return f"Low-rank adapters of rank {config.lora_rank}{under}, merged."


def _options(config: TrainConfig) -> str:
    if not config.task_options:
        return ""
    listed = ", ".join(f"{name} = {_shown(value)}" for name, value in config.task_options.items())
    return f" ({listed})"


def _results(run: RunFolder) -> str:
    evaluations = [line for line in run.evals() if "success" in line]
    if not evaluations:
        return "Not evaluated.\n"
    rows = ["| | step | sampled success | greedy success | problems |", "|---|---|---|---|---|"]
    for name, line in (("before", evaluations[0]), ("after", evaluations[-1])):
        shares = " | ".join(
            _share(line.get(key), line.get("problems")) for key in ("success", "success_greedy")
        )
        problems = f"{line['problems']:.0f}" if "problems" in line else "-"
        rows.append(f"| {name} | {line['step']} | {shares} | {problems} |")
    return "\n".join(rows) + "\n"


def _share(value: float | None, problems: float | None) -> str:
    if value is None:
        return "-"
    if not problems:
        return f"{value:.1%}"
    interval = proportion_interval(value, int(problems))
    return f"{value:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def _settings(config: TrainConfig) -> str:
    settings = flatten_settings({**config.settings(), "seed": config.seed})
    rows = (f"| `{name}` | {_shown(value)} |" for name, value in settings.items())
    return "\n".join(rows) + "\n"


def _shown(value: Any) -> str:
    """A setting as text that does not break the table or tell where on a disk things are."""
    text = str(value)
    return (Path(text).name if text.startswith(("/", "~")) else text).replace("|", "\\|").replace("\n", " ")
