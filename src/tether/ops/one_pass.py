"""Gradients of a loss whose slopes are known while the logits of a block of tokens are at hand.

Three products with the head instead of four: the logits of a block are formed once, and turned into their
gradient before the next block takes their place. What the loss is, its caller knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.ops.backlog import Backlog
from tether.ops.head import HeadGradients, gradient_dtype
from tether.ops.hidden_states import HiddenStates
from tether.ops.linear import empty_results, kernels_for, workspace
from tether.ops.memory import tokens_at_a_time
from tether.ops.policy_pair import PolicyPair
from tether.ops.rows import gather_upstream, keep_rows
from tether.ops.token_state import TokenState
from tether.ops.trust_region import Arrived, check_values, evaluate_block, gradient_of_block
from tether.projection.backend import Backend, use_triton
from tether.projection.first_derivative import first_derivative
from tether.projection.solve import may_ask

# Of the workspace: more rows at a time gain little, for none is formed again; with fewer, the head's gradient
# is added to more often.
_PART = 3 / 8

#: Given rows and their values, the gradient of the loss with respect to those, None where there is none.
Slopes = Callable[[slice, tuple[Tensor, ...]], Sequence[Tensor | None]]


def keeps_all(hidden: Tensor, vocabulary: int) -> bool:
    """Whether the ordinary path keeps the logits of all rows for the backward pass, and forms none again."""
    return may_ask(hidden) and len(hidden) <= tokens_at_a_time(hidden, vocabulary, 1 << 30)


def blocks_of(sizes: Sequence[int], hidden: Tensor, vocabulary: int) -> list[slice] | None:
    """Rows whose logits are held at a time, groups of these sizes kept together; None if one does not fit."""
    if all(size == 1 for size in sizes):
        rows = tokens_at_a_time(hidden, vocabulary, len(sizes), part=_PART)
        return [slice(start, min(start + rows, len(sizes))) for start in range(0, len(sizes), max(1, rows))]
    most = tokens_at_a_time(hidden, vocabulary, 1 << 30)
    if max(sizes) > most:
        return None
    blocks, start, end = [], 0, 0
    for size in sizes:
        if end + size - start > most:
            blocks.append(slice(start, end))
            start = end
        end += size
    return [*blocks, slice(start, end)] if end > start else blocks


def log_probs_in_one_pass(
    new: HiddenStates, ids: Tensor, slopes: Slopes, blocks: Iterable[slice], backend: Backend
) -> HeadGradients:
    """Gradients of a loss of log-probabilities at `ids` [N, K] and of entropies [N].

    Args:
        new: hidden states [N, D] and the head.
        slopes: is given log-probabilities [n, K] and entropies [n].
        blocks: consecutive rows, as from `blocks_of`.
    """
    hidden, weight, bias, head = new.hidden, new.weight, new.bias, new.head
    assert weight is not None
    kernels, blocks = kernels_for(backend, hidden), list(blocks)
    with head.weights_at_hand(), torch.autocast(hidden.device.type, enabled=False):
        found = empty_results(hidden, ids, 0, with_min=False)
        rows = max((block.stop - block.start for block in blocks), default=0)
        buffer = workspace(hidden, weight.shape[0], rows, found.entropy.dtype)
        total = HeadGradients(_needed(new), hidden, weight, bias, found.entropy.dtype)
        dtype = gradient_dtype(hidden, weight, buffer.dtype)
        for block in blocks:
            out = found.at(block)
            kernels.reduce_block(head, hidden[block], weight, bias, ids[block], buffer, out)
            grad_log_probs, grad_entropy = slopes(block, (out.log_probs, out.entropy))
            log_sum = out.largest + out.log_total
            arrived = gather_upstream(log_sum, out.entropy, None, grad_entropy, (ids[block], grad_log_probs))
            kept = buffer[: block.stop - block.start]
            at = torch.arange(block.start, block.stop, device=hidden.device)
            if may_ask(kept):
                touched = arrived.touched().nonzero().squeeze(-1)
                kept, arrived, at = keep_rows(kept, touched), arrived.at(touched), at[touched]
            if len(at):
                where = block if len(at) == block.stop - block.start else at
                total.add(where, kernels.gradient_of_kept(head, kept, arrived, bias=bias, dtype=dtype))
        return total


def trust_region_in_one_pass(
    new: HiddenStates,
    old: HiddenStates,
    ids: Tensor,
    kl_bound: float,
    slopes: Slopes,
    blocks: Iterable[slice],
    backend: Backend,
) -> HeadGradients:
    """The same of what `linear_trust_region` returns: the four values that carry a gradient.

    Args:
        new, old: hidden states [N, D] and heads; `old.support` is [N, K].
        ids: the sampled tokens, [N].
        slopes: is given the state of a block by `TokenState.tensors`.
    """
    hidden, weight, bias = new.hidden, new.weight, new.bias
    assert weight is not None
    blocks = list(blocks)
    with new.head.weights_at_hand(), torch.autocast(hidden.device.type, enabled=False):
        rows = max((block.stop - block.start for block in blocks), default=0)
        kernels = use_triton(backend, hidden)
        whole = PolicyPair.of(new.head, hidden, weight, bias, old, rows=rows, kernels=kernels)
        ratio_range = whole.log_ratio_range()
        total = HeadGradients(_needed(new), hidden, weight, bias, whole.buffers.dtype)
        state, backlog = TokenState.empty(hidden), Backlog()

        def gradient_of(block: slice) -> tuple[slice | Tensor, Tensor]:
            """Rows that received any, and the gradient of the head's raw output for them."""
            held = evaluate_block(whole, block, ids, ratio_range, kl_bound, state, backlog)
            backlog.finish()  # which holds the last gradient of logits: its memory is the next one's
            some = state.part(block)
            if may_ask(hidden):
                check_values(some, first=block.start)
            arrived = Arrived.of(some, ids[block], tuple(slopes(block, some.tensors())), None)
            touched = arrived.rows() if may_ask(hidden) else slice(None)
            pair = whole.block(block).holding(held)
            grad = gradient_of_block(pair, touched, ids[block], arrived, kl_bound)
            if isinstance(touched, slice) or len(touched) == len(some.kl):
                return block, grad
            return touched + block.start, grad

        for block in blocks:
            rows, grad = gradient_of(block)
            if len(grad):
                backlog.keep(partial(total.add, rows, grad))
            # In place of the logits, it must go before the next ones come.
            if not grad.is_cuda or grad.dtype == whole.buffers.dtype:
                backlog.finish()
            del grad  # before the next block's
        backlog.finish()
        if not may_ask(hidden):
            check_values(state)
        return total


class WithGradients(torch.autograd.Function):
    """A loss whose gradients are known already: ``apply(loss, known, *inputs)``.

    They are rounded to the precision of their inputs when they are asked for: after the scale of the loss,
    without which small ones would vanish in float16.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, known: HeadGradients, *_: Tensor | None) -> Tensor:
        ctx.known = known
        return loss.clone()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        known, ctx.known = ctx.known, None  # handed on, not copied: they are as large as the head
        if known is None:
            raise InvalidInputError(
                "the gradients of a linear_policy_loss were handed on by an earlier backward pass. Compute "
                "the loss again, or add losses up before calling backward once."
            )
        if not may_ask(upstream) or float(upstream) != 1:
            known.scale(upstream)
        return (upstream, None, *known.rounded())


def _needed(new: HiddenStates) -> tuple[bool, bool, bool]:
    weight, bias = new.weight, new.bias
    return (
        new.hidden.requires_grad,
        weight is not None and weight.requires_grad,
        bias is not None and bias.requires_grad,
    )
