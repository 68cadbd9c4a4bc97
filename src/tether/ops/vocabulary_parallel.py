"""The LM-head operation where every process of a group holds some rows of the head.

Each process reduces the logits of its own rows as `linear.py` does; what is merged are a few numbers a
token. Neither the head nor the logits are ever gathered.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tether.errors import InvalidInputError
from tether.ops.checks import check_gather, check_vocabulary_size
from tether.ops.head import Head
from tether.ops.linear import LinearLogProbs, evaluate, wide_enough
from tether.ops.rows import Reduced
from tether.ops.shards import VocabularyShard, merge_top_k
from tether.projection.backend import Backend
from tether.projection.first_derivative import first_derivative
from tether.projection.sparse import EMPTY
from tether.projection.support import check_ids


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    shard: VocabularyShard,
    bias: Tensor | None = None,
    top_k: int | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocabulary_size: int | None = None,
    backend: Backend = "auto",
    with_min: bool = False,
) -> LinearLogProbs:
    """`tether.ops.linear_log_probs` for a head whose rows are split over the processes of a group.

    Equals, on every process of the group, what `tether.ops.linear_log_probs` returns for the whole head:
    ties among the top-K go to the lowest id of the whole vocabulary. Four exchanges of a few numbers a
    token (largest logit; mass and entropy; gathered logits; the shards' own top-K) in the forward pass,
    one of the gradient of `hidden` in the backward pass.

    Every process calls this with the same `hidden` and `ids`, and makes the same loss of the result, as
    in tensor parallelism everywhere: the gradient of `hidden` is then complete on each, and those of
    `weight` and `bias` are of its own rows. Shards may differ in size; one may be nothing but padding.

    Args:
        hidden: last hidden states, [N, D], the same on every process.
        weight: this process's rows of the LM head, [V_p, D].
        ids: ids of the whole vocabulary, [N, K] integer, the same on every process; -1 marks an empty slot.
        shard: the group, the vocabulary id of this process's first row, and the rows of all processes
            together. The processes hold their rows in the order of their ranks.
        bias: this process's part, [V_p].
        vocabulary_size: rows of the whole head from here on are padding.
        top_k, temperature, logit_scale, softcap, backend, with_min: as in
            `tether.ops.linear_log_probs`.

    Raises:
        InvalidInputError: as in `tether.ops.linear_log_probs`, or rows that lie outside the vocabulary.

    Source: tensor-parallel cross-entropy (Megatron-LM, arXiv 1909.08053, section 3), with entropy and an
    exact top-K.

    Example:
        >>> import tempfile, torch
        >>> store = torch.distributed.FileStore(tempfile.mktemp(), 1)
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> hidden, weight = torch.eye(2, 8), torch.arange(80.0).view(10, 8) / 80
        >>> shard = VocabularyShard(torch.distributed.group.WORLD, start=0, vocabulary_size=10)
        >>> few = linear_log_probs(hidden, weight, torch.tensor([[9], [0]]), shard=shard, top_k=2)
        >>> few.top_ids.tolist()
        [[9, 8], [9, 8]]
        >>> torch.distributed.destroy_process_group()
    """
    columns, end = weight.shape[0], shard.vocabulary_size if vocabulary_size is None else vocabulary_size
    real = min(max(end - shard.start, 0), columns)
    check_gather(hidden, weight, bias, ids, top_k)
    _check_shard(columns, shard, end)
    check_ids(ids, shard.vocabulary_size)
    # A narrow type cannot be compared with the ids of a vocabulary that it does not hold.
    given, ids = ids.dtype, ids.long()
    held = (ids >= shard.start) & (ids < shard.start + columns)
    own_ids = torch.where(held, ids - shard.start, EMPTY)
    # A shard of padding alone counts its first row, and its numbers are thrown away.
    head = Head(temperature, logit_scale, softcap, max(real, 1), nullcontext)
    add_up = functools.partial(dist.all_reduce, group=shard.group)
    own = evaluate(hidden, weight, bias, own_ids, top_k, head, backend, with_min, sum_hidden_gradient=add_up)
    # Where a shard has nothing but padding or -inf, its other numbers mean nothing.
    alive = (own.largest > -torch.inf) & (real > 0)
    with torch.autocast(hidden.device.type, enabled=False):
        largest, log_mass, log_total, entropy = _merge_rows(own, alive, shard.group)
        possible = (ids != EMPTY) & (ids < end)
        gathered = torch.where(alive[:, None], own.log_probs + log_mass[:, None], -torch.inf)
        gathered = _Sum.apply(torch.where(held & possible, gathered, 0.0), shard.group) - log_total[:, None]
        top_ids, top = None, None
        if top_k:
            top_ids, top = _merge_top_k(own, log_mass, alive, real, min(top_k, end), shard)
            top_ids, top = top_ids.to(wide_enough(given, shard.vocabulary_size)), top - log_total[:, None]
    return LinearLogProbs(
        log_probs=torch.where(possible, gathered, -torch.inf),
        log_sum_exp=largest + log_total,
        entropy=entropy,
        top_ids=top_ids,
        top_log_probs=top,
        log_prob_min=_least(own, real, shard.group) - (largest + log_total).detach() if with_min else None,
    )


def _merge_rows(own: Reduced, alive: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest logit of all shards; relative to it the log of this shard's sum, and of all; the entropy."""
    largest = torch.where(alive, own.largest, -torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    # Masked before any product, so that no gradient meets what means nothing.
    log_mass = torch.where(alive, own.log_total + (own.largest - largest), 0.0)
    mass = torch.where(alive, log_mass.exp(), 0.0)
    own_entropy = torch.where(alive, own.entropy, 0.0)
    sums = _Sum.apply(torch.stack((mass, mass * (own_entropy - log_mass))), group)
    log_total = sums[0].log()
    return largest, log_mass, log_total, log_total + sums[1] / sums[0]


def _merge_top_k(
    own: Reduced, log_mass: Tensor, alive: Tensor, real: int, top_k: int, shard: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """The best of every shard's best by their exact logits, [N, K], and what their shards say of them."""
    beyond = shard.vocabulary_size
    ids = own.top_ids.long() + shard.start if real else torch.full_like(own.top_ids, beyond).long()
    logits = torch.where(alive[:, None], own.top_logits, -torch.inf)
    values = torch.where(alive[:, None], own.top_log_probs + log_mass[:, None], -torch.inf)
    merged, column = merge_top_k(ids, logits, top_k, shard)
    chosen = torch.where(column >= 0, values.gather(-1, column.clamp_min(0)), 0.0)
    return merged, _Sum.apply(chosen, shard.group)


def _least(own: Reduced, real: int, group: Any) -> Tensor:
    """Smallest logit of all shards, [N]."""
    smallest = own.smallest.squeeze(-1)
    smallest = smallest.clone() if real else torch.full_like(smallest, torch.inf)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    return smallest


class _Sum(torch.autograd.Function):
    """Sum over the shards. Each makes the same loss of it, so each has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _check_shard(columns: int, shard: VocabularyShard, end: int) -> None:
    whole = shard.vocabulary_size
    if columns < 1 or shard.start < 0 or shard.start + columns > whole:
        raise InvalidInputError(
            f"A shard of {columns} rows from {shard.start} does not fit a head of {whole} rows. `start` is "
            "the vocabulary id of this process's first row, `vocabulary_size` the rows of all processes."
        )
    check_vocabulary_size(end, whole, whose="all shards")
