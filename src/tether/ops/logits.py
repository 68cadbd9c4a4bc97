"""From logits somebody else computed to log-probabilities at a few ids.

For trainers that hand over logits. They stay as they are: no float32 copy of them is made or kept, and a
vocabulary split over processes (Megatron's tensor parallelism) is read where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tether.errors import InvalidInputError
from tether.ops.checks import signed
from tether.ops.shards import VocabularyShard, merge_top_k
from tether.ops.top_k import top_k_by_groups
from tether.projection.first_derivative import first_derivative
from tether.projection.solve import may_ask
from tether.projection.sparse import EMPTY
from tether.projection.support import check_ids
from tether.settings import check_support_size

# Logits widened to float32 at a time, in elements: 64 MiB.
_BLOCK_ELEMENTS = 1 << 24


def logits_log_probs(
    logits: Tensor, ids: Tensor, *, rows: Tensor | None = None, shard: VocabularyShard | None = None
) -> Tensor:
    """Log-probabilities at a few ids, from logits of any floating dtype, in float32 at least.

    Equals ``logits[rows].float().log_softmax(-1).gather(-1, ids)``. What autograd keeps is the logits
    as they were given, so nothing may overwrite them before the backward pass.

    Args:
        logits: [M, V]; with `shard`, this process's columns [M, V / p].
        ids: vocabulary ids of the whole vocabulary, [N, K] integer; -1 marks an empty slot.
        rows: which rows of the logits, [N], one perhaps several times; all of them if not given.
        shard: where the columns belong if the vocabulary is split. Every process of the group must
            call this with the same rows and ids, and use the result in the same way.

    Returns:
        [N, K], -inf at empty slots. Differentiable.

    Raises:
        InvalidInputError: shapes that do not fit, an id outside the vocabulary, or NaN among the logits.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.bfloat16)
        >>> few = logits_log_probs(logits, torch.tensor([[0, 2], [1, -1]]))
        >>> [[round(x, 3) for x in row] for row in few.tolist()]
        [[-0.408, -2.408], [-1.099, -inf]]
    """
    _check(logits, ids, rows, shard)
    ids = signed(ids)
    with torch.autocast(logits.device.type, enabled=False):
        return _LogitsLogProbs.apply(logits, ids, rows, shard)


def logits_top_ids(
    logits: Tensor, top_k: int, *, rows: Tensor | None = None, shard: VocabularyShard | None = None
) -> Tensor:
    """The `top_k` most likely ids of each row, most likely first, ties by lowest id, without gradient.

    Equals ``logits[rows].sort(dim=-1, descending=True, stable=True).indices[:, :top_k]`` over the whole
    vocabulary.

    Args:
        logits, rows, shard: as in `logits_log_probs`.
        top_k: at most the vocabulary's size are returned.

    Raises:
        InvalidInputError: top_k < 1.

    Example:
        >>> import torch
        >>> logits_top_ids(torch.tensor([[0.0, 3.0, 1.0, 3.0]]), 3).tolist()
        [[1, 3, 2]]
    """
    check_support_size(top_k, 1.0)
    logits = logits.detach()
    local = min(top_k, logits.shape[-1])
    count = logits.shape[0] if rows is None else rows.shape[0]
    ids = torch.empty((count, local), dtype=torch.long, device=logits.device)
    values = logits.new_empty((count, local))
    for at in _blocks(count, logits.shape[-1]):
        block = _select(logits, rows, at)
        ids[at] = top_k_by_groups(block, local)
        values[at] = block.gather(-1, ids[at])
    if shard is None:
        return ids
    return merge_top_k(ids + shard.start, values, min(top_k, shard.vocabulary_size), shard)[0]


def logits_least_id(
    logits: Tensor, *, rows: Tensor | None = None, shard: VocabularyShard | None = None
) -> Tensor:
    """The least likely id of each row, [N, 1]; ties go to the lowest. Without gradient.

    Equals ``logits[rows].argmin(-1, keepdim=True)`` over the whole vocabulary. Its log-probability bounds
    those of all ids from below, which is what a certificate asks of an old policy.

    Args:
        logits, rows, shard: as in `logits_log_probs`.

    Example:
        >>> import torch
        >>> logits_least_id(torch.tensor([[0.0, -3.0, 1.0, -3.0]])).tolist()
        [[1]]
    """
    logits = logits.detach()
    count = logits.shape[0] if rows is None else rows.shape[0]
    ids = torch.empty((count, 1), dtype=torch.long, device=logits.device)
    values = logits.new_empty((count, 1))
    for at in _blocks(count, logits.shape[-1]):
        least = _select(logits, rows, at).min(-1, keepdim=True)
        ids[at], values[at] = least.indices, -least.values
    return ids if shard is None else merge_top_k(ids + shard.start, values, 1, shard)[0]


class _LogitsLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, rows: Tensor | None, shard: VocabularyShard | None
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        gathered = logits.new_empty(ids.shape, dtype=dtype)
        log_sum = logits.new_empty(ids.shape[0], dtype=dtype)
        slots, owned = _slots(ids, logits.shape[-1], shard)
        for at in _blocks(ids.shape[0], logits.shape[-1]):
            block = _select(logits, rows, at).to(dtype)
            log_sum[at] = block.logsumexp(-1)
            gathered[at] = block.gather(-1, slots[at])
        gathered = torch.where(owned, gathered, 0.0)
        if shard is not None:
            dist.all_reduce(gathered, group=shard.group)
            log_sum = _log_sum_over(log_sum, shard.group)
        _refuse_nan(log_sum)
        ctx.save_for_backward(logits, ids, rows, log_sum)
        ctx.shard = shard
        return torch.where(ids == EMPTY, -torch.inf, gathered - log_sum[:, None])

    @staticmethod
    @first_derivative
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, rows, log_sum = ctx.saved_tensors
        upstream = torch.where(ids == EMPTY, 0.0, upstream)
        total = upstream.sum(-1, keepdim=True)
        slots, owned = _slots(ids, logits.shape[-1], ctx.shard)
        upstream = torch.where(owned, upstream, 0.0)
        grad = torch.zeros_like(logits) if rows is not None else torch.empty_like(logits)
        for at in _blocks(ids.shape[0], logits.shape[-1]):
            block = _select(logits, rows, at).to(log_sum.dtype) - log_sum[at, None]
            block.exp_().mul_(-total[at]).scatter_add_(-1, slots[at], upstream[at])
            if rows is None:
                grad[at] = block.to(grad.dtype)
            else:
                grad.index_add_(0, rows[at], block.to(grad.dtype))  # one row may predict several tokens
        return grad, None, None, None


def _log_sum_over(log_sum: Tensor, group: Any) -> Tensor:
    """log-sum-exp of the processes' own."""
    largest = log_sum.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = (log_sum - largest).exp()
    dist.all_reduce(total, group=group)
    return largest + total.log()


def _slots(ids: Tensor, columns: int, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Columns of this process for the ids, 0 for those it does not hold, and which it holds."""
    local = ids.long() - (0 if shard is None else shard.start)
    owned = (ids != EMPTY) & (local >= 0) & (local < columns)
    return torch.where(owned, local, 0), owned


def _select(logits: Tensor, rows: Tensor | None, at: slice) -> Tensor:
    return logits[at] if rows is None else logits[rows[at]]


def _blocks(count: int, columns: int) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // max(1, columns))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _refuse_nan(log_sum: Tensor) -> None:
    invalid = ~log_sum.isfinite()
    if not may_ask(log_sum):
        torch._assert_async(~invalid.any(), "logits_log_probs: logits hold NaN or +inf, or a row of -inf")
    elif bool(invalid.any()):
        raise InvalidInputError(
            f"{int(invalid.sum())} of {log_sum.numel()} rows of logits hold NaN, +inf or nothing but -inf. "
            "Look for overflow in the model (float16?) or a learning rate that destroyed it."
        )


def _check(logits: Tensor, ids: Tensor, rows: Tensor | None, shard: VocabularyShard | None) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InvalidInputError(
            f"logits must be floating point [M, V], got {logits.dtype} {tuple(logits.shape)}."
        )
    count = logits.shape[0] if rows is None else rows.shape[0]
    if ids.dim() != 2 or ids.shape[0] != count or (rows is not None and rows.dim() != 1):
        raise InvalidInputError(
            f"ids must be [N, K] for {count} rows, got ids {tuple(ids.shape)}"
            f"{'' if rows is None else f' and rows {tuple(rows.shape)}'}."
        )
    check_ids(ids, logits.shape[-1] if shard is None else shard.vocabulary_size)
