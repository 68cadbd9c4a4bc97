"""Attention on a processor by matrix products, where PyTorch's fused kernel is slow.

The fused kernel for CPUs is made for long sequences in float32. For one query against a cache of keys, and
for masked squares in bfloat16, plain products of matrices take a fraction of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_NAME = "tether_grouped"
_HALF = (torch.bfloat16, torch.float16)
# Products form the square of queries and keys for each head. Longer ones are left to the kernel.
_LARGEST_SQUARE = 1024 * 1024


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Let a Transformers model on a CPU attend by products of matrices, where that is faster.

    Heads that share keys are rows of one matrix, so that keys are not copied for each. Probabilities are
    those of Transformers' "eager" attention. What is faster in PyTorch's own kernel stays there, and so does
    all of a model on another device or with another attention than PyTorch's ("sdpa").

    Gradients flow; a backward pass that computes parts of the forward pass again (gradient checkpointing)
    has to stand inside too.

    Args:
        model: a model of Transformers or its backbone.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
        >>> model = LlamaModel(LlamaConfig(num_attention_heads=2, **sizes))
        >>> with grouped_attention(model):
        ...     hidden = model(torch.tensor([[3, 4, 5]])).last_hidden_state
        >>> torch.allclose(hidden, model(torch.tensor([[3, 4, 5]])).last_hidden_state)
        True
    """
    own = model.config._attn_implementation
    if own != "sdpa" or model.device.type != "cpu":
        yield
        return
    _register()
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As Transformers calls it: query [B, heads, L, D], key and value [B, groups, S, D]."""
    # Rotated queries and keys are float32 under autocast, which rounds them for the products.
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else query.dtype
    square = dtype in _HALF and attention_mask is not None
    small = square and query.shape[2] * key.shape[2] <= _LARGEST_SQUARE
    if dropout or not (query.shape[2] == 1 or small):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return attended
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    query, key, value = (part.to(dtype) for part in (query, key, value))
    stacked = query.reshape(batch, groups, heads // groups * length, width)
    scores = torch.matmul(stacked, key.transpose(-1, -2)).view(batch, groups, -1, length, key.shape[2])
    scores = scores.mul_(width**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        mask = attention_mask[:, :, None, :, : key.shape[2]]  # [B, 1, 1, L, S]: the same for all heads
        if mask.dtype == torch.bool:
            scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores.add_(mask)
    weights = scores.softmax(-1).view(batch, groups, -1, key.shape[2])
    attended_to = torch.matmul(weights, value).view(batch, heads, length, value.shape[3])
    return attended_to.transpose(1, 2).contiguous(), None
