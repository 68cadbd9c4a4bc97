"""A language model small enough to train in a second, with a tokenizer of single characters.

A module of its own, because the tests on two processes build the same things in subprocesses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+-*=abcdefghijkl "


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate(CHARACTERS)}
    for special in ("<pad>", "<eos>"):
        vocabulary[special] = len(vocabulary)
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_tiny_model(**overrides: Any) -> Qwen3ForCausalLM:
    """The same model on every call; its head is sharpened, since random heads are nearly uniform."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
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


def make_prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(8) for b in range(8)]})


def reward_digits(completions: list[str], **_: Any) -> list[float]:
    """How much of a completion is digits: something a policy gradient can climb."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def make_settings(output_dir: str | Path) -> dict[str, Any]:
    """What all trainers share in these tests: four updates on each batch of rollouts."""
    return {
        "output_dir": str(output_dir),
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


def largest_difference(first: torch.nn.Module, second: torch.nn.Module) -> float:
    """Over all parameters, by position."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
