"""Tiny random models of the families people train, which can run on packed sequences, and rows to pack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from trl.trainer.utils import maybe_gather_lm_head_ctx
from trl_head import fuse_head

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.integrations.packing import add_packing
from tether.integrations.sparse_head import add_sparse_head

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = 3  # shorter than most sequences
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

FAMILIES: dict[str, Callable[..., Any]] = {
    "Qwen3": lambda **s: Qwen3ForCausalLM(Qwen3Config(**SIZES, **s)),
    "Qwen2.5": lambda **s: Qwen2ForCausalLM(Qwen2Config(**SIZES, **s)),
    "Qwen2 with windows": lambda **s: Qwen2ForCausalLM(Qwen2Config(**SIZES, **WINDOWS, **s)),
    "Llama-3": lambda **s: LlamaForCausalLM(LlamaConfig(**SIZES, **s)),
    "SmolLM3": lambda **s: SmolLM3ForCausalLM(SmolLM3Config(**SIZES, no_rope_layers=[1, 0], **s)),
    "Gemma-3": lambda **s: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, query_pre_attn_scalar=16, sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"], **s,
        )
    ),
    "Qwen3 with experts": lambda **s: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, **s)
    ),
}  # fmt: skip

SMALL_VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
                "image_size": 16, "patch_size": 8}  # fmt: skip
#: What cannot run on packed sequences, and why.
UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "images": (
        lambda: Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=SIZES, vision_config=SMALL_VISION, mm_tokens_per_image=4)
        ),
        "more than text",
    ),
    "states": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1)),
        "carries a state",
    ),
    "convolutions": (
        lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
        "layers of type conv",
    ),
    "no positions": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=8, n_layer=1, n_head=2)),
        "takes no position_ids",
    ),
}

#: Tokens and left padding of each row; most are alike in neither, one holds a token and one none.
ROWS = [(7, 2), (1, 4), (11, 0), (5, 6), (0, 0), (2, 5), (11, 1)]
WIDTH, RESPONSE = 13, 6


#: Gemma adds up its norms' gradients in float32; experts multiply in float32 at most.
PRECISION = {
    "Gemma-3": (torch.float64, SUMMED_ANOTHER_WAY * unit_of(1.0)),
    "Qwen3 with experts": (torch.float32, 1e-4),
}


def make(family: str, dtype: torch.dtype | None = None, **settings: Any) -> Any:
    """A random model whose forward packs and scores; large weights, so that attention matters."""
    torch.manual_seed(0)
    model = FAMILIES[family](**settings).to(dtype or PRECISION.get(family, (torch.float64, None))[0])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    fuse_head(model)
    add_sparse_head(model, 1.0, maybe_gather_lm_head_ctx)
    add_packing(model)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Token ids and attention mask; padding holds a real token's id, so that seeing it would show."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (len(ROWS), WIDTH), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (length, left) in enumerate(ROWS):
        mask[row, left : left + length] = 1
    return ids, mask


def inputs(ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-RESPONSE] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
