"""What TRL's asynchronous trainer lacks on a machine without CUDA: its attention, in plain torch.

It folds samples that share a beginning into one row (its `packing.TreeRow`) and attends
with a flash-attention kernel, which is for CUDA alone. This is the same attention, quadratic in the row.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: The name under which Transformers finds it.
TREE_ATTENTION_ON_CPU = "tether_tree"


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Each segment of a row attends to the path from the root to its own end, causally.

    Args:
        module: the attention layer; not looked at.
        query: [1, H, N, D].
        key, value: [1, H / groups, N, D].
        attention_mask: not looked at: the paths say who sees whom.
        tree_kv_index: rows of all segments' paths, end to end.
        tree_cu_seqlens_q, tree_cu_seqlens_k: where segments and their paths begin and end.
        scaling, sliding_window, softcap: as the model's.

    Returns:
        [1, N, H, D], and no weights.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (side.repeat_interleave(groups, 1) for side in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = who_sees_whom(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, sliding_window)
    weights = torch.where(seen, scores, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


def who_sees_whom(kv_index: Tensor, starts_q: Tensor, starts_k: Tensor, window: int | None) -> Tensor:
    """Which tokens of a row [N] attend to which, [N, N] bool."""
    tokens = int(starts_q[-1])
    seen = torch.zeros(tokens, tokens, dtype=torch.bool, device=kv_index.device)
    bounds_q, bounds_k = starts_q.tolist(), starts_k.tolist()
    for (first, last), (begin, end) in zip(_pairs(bounds_q), _pairs(bounds_k), strict=True):
        path, own = kv_index[begin:end], last - first
        # A segment is the end of its own path, so its tokens have the last depths.
        depth = torch.arange(end - begin - own, end - begin, device=path.device)[:, None]
        others = torch.arange(end - begin, device=path.device)[None]
        reached = others <= depth if not window else (others <= depth) & (others > depth - window)
        seen[first:last, path] = reached
    return seen


def _pairs(bounds: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(bounds))


@contextlib.contextmanager
def without_peak_flops(*, active: bool) -> Iterator[None]:
    """Where TRL's trainer may be made without a CUDA device, whose name it asks for and stops without.

    Its utilisation metrics are then off, as for any device it does not know.
    """
    from trl.experimental.async_grpo import async_grpo_trainer

    asks = async_grpo_trainer.get_peak_flops_per_device
    if active:
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    try:
        yield
    finally:
        async_grpo_trainer.get_peak_flops_per_device = asks


def attend_on_cpu(model: Any) -> None:
    """Have a model that TRL built for its kernel attend with `tree_attention` instead."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(TREE_ATTENTION_ON_CPU, tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION_ON_CPU, lambda **_: None)
    model.set_attn_implementation(TREE_ATTENTION_ON_CPU)
