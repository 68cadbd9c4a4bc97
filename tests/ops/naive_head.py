"""The LM-head operation as lines of torch with the whole [N, V] in memory, and inputs to compare on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tether.ops import LinearLogProbs

INF = math.inf
N, D, V = 13, 6, 37

# name: keywords of one setting of the head
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale": {"logit_scale": 0.25, "temperature": 1.3},
    "softcap": {"softcap": 2.0, "temperature": 0.6, "logit_scale": 1.5},
    "padding": {"vocabulary_size": 31},
    "everything": {"softcap": 3.0, "temperature": 1.7, "logit_scale": 0.5, "vocabulary_size": 29},
}


def naive(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    top_k: int | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocabulary_size: int | None = None,
) -> LinearLogProbs:
    """The documented lines of torch, with the whole [N, V]."""
    logits = logit_scale * (hidden @ weight.T + (0 if bias is None else bias))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    if vocabulary_size is not None:
        padding = torch.arange(weight.shape[0], device=weight.device) >= vocabulary_size
        logits = logits.masked_fill(padding, -INF)
    log_probs = logits.log_softmax(-1)
    finite = torch.where(torch.isneginf(log_probs), 0.0, log_probs)
    entropy = -(log_probs.exp() * finite).sum(-1)
    gathered = torch.where(ids == -1, -INF, log_probs.gather(-1, ids.clamp_min(0)))
    top_ids = log_probs.detach().sort(descending=True, stable=True).indices[:, : top_k or 0]
    return LinearLogProbs(gathered, logits.logsumexp(-1), entropy, top_ids, log_probs.gather(-1, top_ids))


def make_inputs(
    dtype: torch.dtype = torch.float64, *, largest_id: int = V
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, dtype=torch.float64, generator=generator)
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator)
    bias = torch.randn(V, dtype=torch.float64, generator=generator)
    ids = torch.stack([torch.randperm(largest_id, generator=generator)[:4] for _ in range(N)])
    ids[2, 1] = ids[5, 0] = ids[5, 3] = -1
    ids[7] = -1
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), ids


def _upstreams(result: LinearLogProbs, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = (result.log_probs.shape, result.entropy.shape, result.top_log_probs.shape)  # type: ignore[union-attr]
    draws = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    first, second, third = (draw.to(ids.device) for draw in draws)
    first[3] = second[3] = third[3] = 0  # a row without gradient
    return torch.where(ids == -1, 0.0, first), second, third


def use_everything(result: LinearLogProbs, ids: Tensor) -> Tensor:
    """Uses every differentiable output, so that every path of the backward is in the gradient."""
    first, second, third = _upstreams(result, ids)
    dtype = result.log_probs.dtype
    finite = torch.where(ids == -1, 0.0, result.log_probs)
    assert result.top_log_probs is not None
    return (
        (first.to(dtype) * finite).sum()
        + (second.to(dtype) * result.entropy).sum()
        + (third.to(dtype) * result.top_log_probs).sum()
    )
