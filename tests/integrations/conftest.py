"""What every test of the TRL integration builds on: a tiny model, its data and a way to train it."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from courses import CourseRounding, nudge
from datasets import Dataset
from tiny_language_model import make_prompts, make_settings, make_tiny_model, make_tokenizer, reward_digits
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

# accelerate asks several times a step whether PEFT is there and parses its metadata: a tenth of these tests.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)

# TRL's asynchronous trainer as ours stands on it came with 1.16; test_trl_seam.py has the refusal elsewhere.
_FOLDED_ROWS = Path(trl.__file__).parent / "experimental" / "async_grpo" / "packing.py"
collect_ignore_glob = [] if _FOLDED_ROWS.is_file() else ["*async*"]

THREADS = torch.get_num_threads()  # as the tests began


@pytest.fixture(autouse=True)
def _threads_as_they_were() -> None:
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def make_model() -> Callable[..., Qwen3ForCausalLM]:
    return make_tiny_model


@pytest.fixture
def prompts() -> Dataset:
    return make_prompts()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return make_settings(tmp_path)


@pytest.fixture
def make_trainer(
    tokenizer: PreTrainedTokenizerFast, prompts: Dataset, settings: dict[str, Any]
) -> Callable[..., Any]:
    """make_trainer(TrainerClass, ConfigClass, setting=..., ...) -> trainer on a fresh tiny model."""

    def make(
        trainer_class: Any,
        config_class: Any,
        *,
        model: Any = None,
        train_dataset: Any = None,
        trainer_arguments: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> Any:
        return trainer_class(
            model=make_tiny_model() if model is None else model,
            reward_funcs=reward_digits,
            args=config_class(**{**settings, **overrides}),
            train_dataset=prompts if train_dataset is None else train_dataset,
            processing_class=tokenizer,
            **(trainer_arguments or {}),
        )

    return make


@pytest.fixture
def train(make_trainer: Callable[..., Any], made: dict[int, Any]) -> Callable[..., Any]:
    """As `make_trainer`, and train; returns the trainer."""

    def run(*args: Any, **kwargs: Any) -> Any:
        weights = copy.deepcopy(kwargs.get("model"))  # training changes them
        trainer = make_trainer(*args, **kwargs)
        trainer.train()
        made[id(trainer)] = (args, kwargs | {"model": weights})
        return trainer

    return run


@pytest.fixture
def made() -> dict[int, Any]:
    """What each trainer of `train` was made from, by its id."""
    return {}


@pytest.fixture
def course_rounding(make_trainer: Callable[..., Any], made: dict[int, Any]) -> Callable[..., CourseRounding]:
    """course_rounding(trainer) -> how far another training may end from this one and have done the same."""

    def measure(reference: Any) -> CourseRounding:
        args, kwargs = made[id(reference)]
        nudged = make_trainer(*args, **kwargs)
        nudge(nudged.model)
        nudged.train()
        return CourseRounding.between(reference, nudged)

    return measure
