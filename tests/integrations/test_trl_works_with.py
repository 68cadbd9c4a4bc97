"""Features of TRL that nothing here is written for; with the trust region off, each trains as GRPO does."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from courses import CourseRounding, nudge
from datasets import Dataset
from tiny_language_model import largest_difference
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import GRPOConfig, GRPOTrainer

from tether.integrations.trl import TROLLConfig, TROLLTrainer

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.trl_stand_ins import fill_cache, load_dataset

# A rate at which the updates of the second half still remember the first.
DESCENT = {"optim": "sgd", "learning_rate": 0.005}


def _three(train: Callable[..., Any], **settings: Any) -> tuple[Any, Any, Any]:
    """GRPO without its clip, TROLL without its bound, and TROLL with one that acts."""
    off = {"troll_kl_bound": math.inf, "troll_alpha": 0.0}
    return (
        train(GRPOTrainer, GRPOConfig, epsilon=math.inf, **DESCENT, **settings),
        train(TROLLTrainer, TROLLConfig, **off, **DESCENT, **settings),
        train(TROLLTrainer, TROLLConfig, troll_kl_bound=1e-3, **DESCENT, **settings),
    )


def _projected(trainer: Any) -> float:
    return max(row.get("trust_region/projected", 0.0) for row in trainer.state.log_history)


def test_a_rollout_function(train: Callable[..., Any], course_rounding: Any) -> None:
    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        answers = [[(3 * row + place) % 20 for place in range(2 + row % 5)] for row in range(len(prompts))]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}

    extra = {"trainer_arguments": {"rollout_func": rollouts}}
    plain, free, bound = _three(train, **extra)
    assert largest_difference(plain.model, free.model) <= course_rounding(plain).weights
    assert _projected(bound) > 0.1


@pytest.mark.slow
def test_torch_compile(train: Callable[..., Any], course_rounding: Any) -> None:
    """Traced and run by the eager backend: what a code generator would be given."""
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 4}
    compiled = train(TROLLTrainer, TROLLConfig, troll_kl_bound=1e-3, **DESCENT, **settings)
    plain = train(TROLLTrainer, TROLLConfig, troll_kl_bound=1e-3, **DESCENT, max_steps=4)
    assert largest_difference(compiled.model, plain.model) <= course_rounding(plain).weights
    assert _projected(compiled) > 0.1


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    fill_cache(cache, quick=True, only="tiny-LlavaNextForConditionalGeneration")
    return next(cache.glob("models--*/snapshots/*"))


def test_a_vision_model(vision_model: Path, tmp_path: Path) -> None:
    def longest(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    def run(trainer_class: Any, config_class: Any, *, nudged: bool = False, **settings: Any) -> Any:
        torch.manual_seed(0)
        pictures: Dataset = load_dataset("zen-image", "conversational_prompt_only", split="train")
        trainer = trainer_class(
            model=AutoModelForImageTextToText.from_pretrained(vision_model, dtype=torch.float32),
            processing_class=AutoProcessor.from_pretrained(vision_model),
            reward_funcs=longest,
            args=config_class(
                str(tmp_path), use_cpu=True, bf16=False, report_to="none", logging_steps=1,
                save_strategy="no", max_completion_length=6, num_generations=2,
                per_device_train_batch_size=2, steps_per_generation=2, max_steps=4,
                gradient_checkpointing=False, optim="sgd", learning_rate=1.0, **settings,
            ),
            train_dataset=pictures,
        )  # fmt: skip
        if nudged:
            nudge(trainer.model)
        trainer.train()
        return trainer

    plain = run(GRPOTrainer, GRPOConfig, epsilon=math.inf)
    free = run(TROLLTrainer, TROLLConfig, troll_kl_bound=math.inf, troll_alpha=0.0)
    bound = run(TROLLTrainer, TROLLConfig, troll_kl_bound=1e-9)
    rounding = CourseRounding.between(plain, run(GRPOTrainer, GRPOConfig, epsilon=math.inf, nudged=True))
    assert largest_difference(plain.model, free.model) <= rounding.weights
    start = AutoModelForImageTextToText.from_pretrained(vision_model, dtype=torch.float32)
    assert largest_difference(start, free.model) > 1e-3
    assert _projected(bound) > 0.1
