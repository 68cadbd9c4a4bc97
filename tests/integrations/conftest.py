"""A language model small enough to train in a second, with a tokenizer of single characters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+-*=abcdefghijkl "


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate(CHARACTERS)}
    for special in ("<pad>", "<eos>"):
        vocabulary[special] = len(vocabulary)
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


@pytest.fixture
def make_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Qwen3ForCausalLM]:
    """The same model on every call; its head is sharpened, since random heads are nearly uniform."""

    def make(**overrides: Any) -> Qwen3ForCausalLM:
        torch.manual_seed(0)
        settings: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        model = Qwen3ForCausalLM(Qwen3Config(**{**settings, **overrides}))
        with torch.no_grad():
            model.lm_head.weight.mul_(15)
        return model

    return make


@pytest.fixture
def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(8) for b in range(8)]})


def reward_digits(completions: list[str], **_: Any) -> list[float]:
    """How much of a completion is digits: something a policy gradient can climb."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """What both trainers share in these tests."""
    return {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_completion_length": 8,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 4,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "seed": 3,
    }
