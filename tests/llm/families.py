"""Tiny random models of the families people train, each with a tokenizer and chat template of its kind.

Nothing is downloaded. The tokenizers are byte-level with the families' real special tokens; the
templates restate how each family writes a conversation (roles, turns, ends, thinking), without tools.
What the published files differ in (vocabularies, system prompts) does not decide where a turn ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_GEMMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """How a family writes conversations, and what its published configuration calls an end."""

    architecture: type[PreTrainedModel]
    config: type[Any]
    template: str
    special: tuple[str, ...]
    eos: str
    pad: str | None
    generation_ends: tuple[str, ...]
    """What its generation_config names."""
    turn_ends: tuple[str, ...]
    """At which tokens a response must end."""
    bos: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    "<|eot_id|>", "<|finetune_right_pad_id|>",
)  # fmt: skip

FAMILIES = {
    "Qwen3": Family(
        Qwen3ForCausalLM, Qwen3Config, _CHATML_THINKING, _QWEN, "<|im_end|>", "<|endoftext|>",
        ("<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"),
    ),
    "Qwen2.5-Instruct": Family(
        Qwen2ForCausalLM, Qwen2Config, _CHATML, _QWEN, "<|im_end|>", "<|endoftext|>",
        ("<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"),
    ),
    # A base model's tokenizer with the instruct template: only the template knows where a turn ends.
    "Qwen2.5 base": Family(
        Qwen2ForCausalLM, Qwen2Config, _CHATML, _QWEN, "<|endoftext|>", "<|endoftext|>",
        ("<|endoftext|>",), ("<|im_end|>", "<|endoftext|>"),
    ),
    "Llama-3": Family(
        LlamaForCausalLM, LlamaConfig, _LLAMA3, _LLAMA, "<|eot_id|>", None,
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
    ),
    "SmolLM2": Family(
        LlamaForCausalLM, LlamaConfig, _CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>",
        "<|im_end|>", ("<|im_end|>",), ("<|im_end|>",), bos="<|im_start|>",
    ),
    "SmolLM3": Family(
        SmolLM3ForCausalLM, SmolLM3Config, _CHATML_THINKING, ("<|end_of_text|>", *_QWEN[1:]), "<|im_end|>",
        "<|im_end|>", ("<|im_end|>",), ("<|im_end|>",),
    ),
    "Gemma-3": Family(
        Gemma3ForCausalLM, Gemma3TextConfig, _GEMMA3,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<pad>",
        ("<eos>",), ("<end_of_turn>", "<eos>"), bos="<bos>",
        settings={"query_pre_attn_scalar": 16, "sliding_window": 64},
    ),
}  # fmt: skip


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Bytes, then the family's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *family.special])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(family.special))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=family.eos, pad_token=family.pad, bos_token=family.bos,
        chat_template=family.template, clean_up_tokenization_spaces=False, model_max_length=512,
    )  # fmt: skip


def save_tiny(name: str, folder: Path) -> Path:
    """Write a model of the family with a few thousand weights, as `save_pretrained` does."""
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    torch.manual_seed(0)
    model = family.architecture(
        family.config(
            vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=512, tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, **family.settings,
        )
    )  # fmt: skip
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(family.generation_ends))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Script(torch.nn.Module):
    """A head that says given tokens, a row each, whatever it is shown."""

    def __init__(self, rows: list[list[int]], vocabulary: int) -> None:
        super().__init__()
        self.rows, self.vocabulary, self.step = rows, vocabulary, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*hidden.shape[:2], self.vocabulary), -30.0)
        for row, tokens in enumerate(self.rows):
            logits[row, -1, tokens[min(self.step, len(tokens) - 1)]] = 30.0
        self.step += 1
        return logits


def follow(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    """Make the model say these texts, special tokens included, then a letter without end."""
    rows = [[*tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
    model.lm_head = Script(rows, model.config.vocab_size)
