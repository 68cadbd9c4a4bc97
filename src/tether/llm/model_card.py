"""The card of a trained model: what it is made from, how, with which result, and whose licence it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tether.experiments import RunFolder
from tether.experiments.run_config import flatten_settings
from tether.experiments.statistics import proportion_interval
from tether.llm.config import TrainConfig

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
    return f"""---
library_name: transformers
pipeline_tag: text-generation
{_base_model(config.model)}tags:
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


def _base_model(model: str) -> str:
    """The hub's own field, where the start was a model of the hub."""
    is_hub_name = model.count("/") == 1 and not Path(model).exists()
    return f"base_model: {model}\n" if is_hub_name else ""


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
        rows.append(f"| {name} | {line['step']} | {shares} | {_whole(line.get('problems'))} |")
    return "\n".join(rows) + "\n"


def _share(value: float | None, problems: float | None) -> str:
    if value is None:
        return "-"
    if not problems:
        return f"{value:.1%}"
    interval = proportion_interval(value, int(problems))
    return f"{value:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _settings(config: TrainConfig) -> str:
    settings = flatten_settings({**config.settings(), "seed": config.seed})
    rows = (f"| `{name}` | {_shown(value)} |" for name, value in settings.items())
    return "\n".join(rows) + "\n"


def _shown(value: Any) -> str:
    """A setting as text that does not break the table or tell where on a disk things are."""
    text = str(value)
    return (Path(text).name if text.startswith(("/", "~")) else text).replace("|", "\\|").replace("\n", " ")
