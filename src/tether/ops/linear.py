"""From hidden states and the LM head straight to log-probabilities at a few ids.

The [tokens, vocabulary] logits of a batch are the largest tensor of LLM training and are never
needed as a whole. They are formed here for a block of tokens at a time, reduced to what was asked
for, and formed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.ops.head import Head, add_weight_gradient, check_arguments, times_weight
from tether.ops.top_k import GROUP, group_maxima, top_k_by_groups
from tether.projection.divergence import BLOCK_ELEMENTS
from tether.projection.solve import may_ask
from tether.projection.sparse import EMPTY

# Logits held at a time, in elements: 64 MiB of float32. The backward pass turns them into their
# gradient in place.
_WORKSPACE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class LinearLogProbs:
    """What `linear_log_probs` returns; everything in nats and at least float32."""

    log_probs: Tensor
    """Log-probabilities at the given ids, [N, K]; -inf at empty slots. Differentiable."""
    log_sum_exp: Tensor
    """Log of the sum of exponentials of each row's transformed logits, [N]. Differentiable."""
    entropy: Tensor
    """Entropy of each row over the whole vocabulary, [N]. Differentiable."""
    top_ids: Tensor | None
    """The `top_k` most likely ids, most likely first, ties by lowest id, [N, top_k]."""
    top_log_probs: Tensor | None
    """Their log-probabilities, [N, top_k]. Differentiable."""


def linear_log_probs(
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
    weights_at_hand: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> LinearLogProbs:
    """Log-probabilities of a language model at a few ids a token, without the logits in memory.

    Equals, but never holds [N, V]::

        raw = hidden.float() @ weight.float().T + bias
        logits = softcap * tanh(logit_scale * raw / softcap) / temperature     # softcap optional
        log_probs = logits.log_softmax(-1).gather(-1, ids)

    Memory beyond inputs, outputs and gradients, in elements of at least float32: 2^24 logits (or one row
    of them) and, on a CPU, a few blocks that fit its cache; an accelerator needs up to five times the
    logits. A half-precision head is widened 4096 rows at a time, and its gradient summed in float32.

    Gradients flow to `hidden`, `weight` and `bias` from everything but `top_ids`;
    a frozen head costs nothing in the backward pass, nor do rows without incoming gradient.

    Args:
        hidden: last hidden states, [N, D].
        weight: LM head, [V, D]; tied or not.
        ids: vocabulary ids, [N, K] integer; -1 marks an empty slot.
        bias: of the LM head, [V].
        top_k: also return this many of the most likely ids (at most V).
        temperature: the sampling temperature, positive.
        logit_scale: multiplies the raw logits (Cohere, Granite), positive.
        softcap: soft cap of the scaled logits (Gemma), positive.
        vocabulary_size: rows of `weight` from here on are padding and can never be sampled.
        weights_at_hand: context entered around each use of the weights, forward and backward, for
            heads that are sharded at rest (DeepSpeed ZeRO-3).

    Raises:
        InvalidInputError: shapes that do not fit, an id outside the vocabulary, or a setting that is
            not positive.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> hidden, weight = torch.randn(3, 8), torch.randn(50, 8)
        >>> ids = torch.tensor([[1, 2], [3, 4], [5, -1]])
        >>> few = linear_log_probs(hidden, weight, ids, top_k=5)
        >>> dense = (hidden @ weight.T).log_softmax(-1)
        >>> torch.allclose(few.log_probs[:2], dense[:2].gather(-1, ids[:2]), atol=1e-5)
        True
    """
    check_arguments(hidden, weight, ids, bias, top_k, temperature, logit_scale, softcap, vocabulary_size)
    head = Head(temperature, logit_scale, softcap, vocabulary_size, weights_at_hand)
    found = evaluate(hidden, weight, bias, ids, top_k, head)
    return LinearLogProbs(
        log_probs=found.log_probs,
        log_sum_exp=found.largest + found.log_total,
        entropy=found.entropy,
        top_ids=found.top_ids if top_k else None,
        top_log_probs=found.top_log_probs if top_k else None,
    )


class Reduced(NamedTuple):
    """What is kept of rows of logits. Its parts keep digits that their sums would lose."""

    log_probs: Tensor
    """At the given ids, [n, K]."""
    largest: Tensor
    """Largest logit, [n]; a constant to the backward pass."""
    log_total: Tensor
    """Log of the sum of exp(logit - largest), [n]; it carries the gradient of the log-sum-exp."""
    entropy: Tensor
    top_ids: Tensor
    top_log_probs: Tensor
    top_logits: Tensor
    """Exact, so that shards can be merged without making or breaking ties; no gradient."""

    def at(self, rows: slice) -> Reduced:
        return Reduced(*(tensor[rows] for tensor in self))


class _Upstream(NamedTuple):
    """What the backward pass knows of some rows."""

    log_sum: Tensor
    entropy: Tensor
    total: Tensor
    """How much of the row's probabilities the gradient takes away, [n]."""
    grad_entropy: Tensor | None
    gathered: tuple[tuple[Tensor, Tensor], ...]
    """Ids and the gradient that arrived for them, zero at empty slots."""

    def at(self, rows: Any) -> _Upstream:
        return _Upstream(
            self.log_sum[rows],
            self.entropy[rows],
            self.total[rows],
            _at(self.grad_entropy, rows),
            tuple((ids[rows], grad[rows]) for ids, grad in self.gathered),
        )


def evaluate(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, top_k: int | None, head: Head
) -> Reduced:
    """`linear_log_probs` without the checks, in the parts that the shards of a head are merged from."""
    with torch.autocast(hidden.device.type, enabled=False):
        return Reduced(*_LinearLogProbs.apply(hidden, weight, bias, ids, top_k or 0, head))


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, top_k: int, head: Head
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with head.weights_at_hand():
            vocabulary = weight.shape[0]
            top_k = min(top_k, head.vocabulary_size or vocabulary)
            found = _empty_results(hidden, ids, top_k)
            buffer = _workspace(hidden, vocabulary, hidden.shape[0], found.entropy.dtype)
            for block in _token_blocks(hidden.shape[0], vocabulary):
                logits = head.logits(hidden[block], weight, bias, buffer)
                for rows in _cached_rows(logits):
                    at = slice(block.start + rows.start, block.start + rows.stop)
                    for result, value in zip(found, _reduce(logits[rows], ids[at], top_k), strict=True):
                        result[at] = value
        log_sum = found.largest + found.log_total
        ctx.save_for_backward(hidden, weight, bias, ids, found.top_ids, log_sum, found.entropy)
        ctx.head = head
        ctx.mark_non_differentiable(found.largest, found.top_ids, found.top_logits)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, top_ids, log_sum, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_log_probs, _, grad_log_total, grad_entropy, _, grad_top, _ = grads
        upstream = _gather_upstream(
            log_sum, entropy, grad_log_total, grad_entropy, (ids, grad_log_probs), (top_ids, grad_top)
        )
        rows = _rows_with_gradient(upstream)
        grad_hidden = hidden.new_zeros(hidden.shape, dtype=log_sum.dtype) if needs_hidden else None
        with ctx.head.weights_at_hand():
            grad_weight = weight.new_zeros(weight.shape, dtype=log_sum.dtype) if needs_weight else None
            grad_bias = weight.new_zeros(weight.shape[0], dtype=log_sum.dtype) if needs_bias else None
            count = hidden.shape[0] if rows is None else rows.shape[0]
            buffer = _workspace(hidden, weight.shape[0], count, log_sum.dtype)
            for block in _row_blocks(rows, hidden.shape[0], weight.shape[0]):
                block_hidden = hidden[block]
                grad = _gradient_of_logits(ctx.head, block_hidden, weight, bias, buffer, upstream.at(block))
                if grad_hidden is not None:
                    grad_hidden[block] = times_weight(grad, weight, log_sum.dtype)
                if grad_weight is not None:
                    add_weight_gradient(grad_weight, grad, block_hidden)
                if grad_bias is not None:
                    grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None,
        )  # fmt: skip


def _empty_results(hidden: Tensor, ids: Tensor, top_k: int) -> Reduced:
    """Where the forward pass puts what it finds."""
    tokens = hidden.shape[0]
    log_probs = hidden.new_empty(ids.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    row, top = log_probs.new_empty(tokens), log_probs.new_empty((tokens, top_k))
    return Reduced(
        log_probs=log_probs,
        largest=row,
        log_total=torch.empty_like(row),
        entropy=torch.empty_like(row),
        top_ids=ids.new_empty(top.shape),
        top_log_probs=top,
        top_logits=torch.empty_like(top),
    )


def _reduce(logits: Tensor, ids: Tensor, top_k: int) -> Reduced:
    """What the forward pass returns of a few rows, whose logits it spoils."""
    grouped = bool(top_k) and logits.shape[-1] >= GROUP
    maxima = group_maxima(logits) if grouped else logits
    largest = maxima.amax(-1, keepdim=True)
    if grouped and logits.shape[-1] % GROUP:
        rest = logits[:, logits.shape[-1] // GROUP * GROUP :].amax(-1, keepdim=True)
        largest = torch.maximum(largest, rest)
    if top_k:
        top_ids = top_k_by_groups(logits, top_k, maxima if grouped else None)
    else:
        top_ids = torch.empty((logits.shape[0], 0), dtype=torch.long, device=logits.device)
    top_logits = logits.gather(-1, top_ids)
    # Measured from the largest logit, nothing below cancels.
    shifted = logits.sub_(largest)
    log_probs = _gather(shifted, ids)
    weights = shifted.exp()
    total = weights.sum(-1)
    log_total = total.log()
    # 0 times -inf is 0, and -inf itself is no longer needed.
    expected = weights.mul_(shifted.clamp_min_(-1e4)).sum(-1) / total
    return Reduced(
        log_probs=log_probs - log_total[:, None],
        largest=largest.squeeze(-1),
        log_total=log_total,
        entropy=log_total - expected,
        top_ids=top_ids.to(ids.dtype),
        top_log_probs=top_logits - largest - log_total[:, None],
        top_logits=top_logits,
    )


def _gather_upstream(
    log_sum: Tensor,
    entropy: Tensor,
    grad_log_total: Tensor | None,
    grad_entropy: Tensor | None,
    *gathered: tuple[Tensor, Tensor | None],
) -> _Upstream:
    """Everything that arrived, with what was sent to empty slots taken out."""
    kept = tuple(
        (ids, torch.where(ids == EMPTY, 0.0, grad))
        for ids, grad in gathered
        if grad is not None and ids.shape[-1] > 0
    )
    total = torch.zeros_like(log_sum)
    for _, grad in kept:
        total += grad.sum(-1)
    if grad_log_total is not None:
        total -= grad_log_total
    return _Upstream(log_sum, entropy, total, grad_entropy, kept)


def _gradient_of_logits(
    head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor, upstream: _Upstream
) -> Tensor:
    """Gradient that reaches the head's raw output for a block of tokens, [n, V]."""
    grad = head.logits(hidden, weight, bias, buffer)
    for part in _cached_rows(grad):
        slope = head.slope(grad[part])
        _logits_to_gradient(grad[part], upstream.at(part))
        grad[part].mul_(slope)
    if head.vocabulary_size is not None:  # padding is -inf whatever the weights
        grad[:, head.vocabulary_size :] = 0
    return grad


def _logits_to_gradient(logits: Tensor, upstream: _Upstream) -> None:
    """Replace logits by the gradient that reaches them: scatter(g) - p sum(g) - p (log p + H) g_H."""
    log_probs = logits.sub_(upstream.log_sum[:, None])
    if upstream.grad_entropy is None:
        grad = log_probs.exp_().mul_(-upstream.total[:, None])
    else:
        probs = log_probs.exp()
        # Far below what has a probability in float64, and finite: 0 times infinity is NaN.
        grad = log_probs.clamp_min_(-1e4).add_(upstream.entropy[:, None])
        grad.mul_(upstream.grad_entropy[:, None]).add_(upstream.total[:, None])
        grad.mul_(probs).neg_()
    for ids, gathered in upstream.gathered:
        grad.scatter_add_(-1, ids.clamp_min(0).long(), gathered)


def _gather(logits: Tensor, ids: Tensor) -> Tensor:
    held = ids != EMPTY
    return torch.where(held, logits.gather(-1, torch.where(held, ids, 0).long()), -torch.inf)


def _rows_with_gradient(upstream: _Upstream) -> Tensor | None:
    """Rows that received gradient; None (all of them) where asking would stall an accelerator."""
    if not may_ask(upstream.total):
        return None
    touched = upstream.total != 0
    if upstream.grad_entropy is not None:
        touched |= upstream.grad_entropy != 0
    for _, grad in upstream.gathered:
        touched |= (grad != 0).any(-1)
    return touched.nonzero().squeeze(-1)


def _workspace(hidden: Tensor, vocabulary: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """The one buffer of logits a pass uses, [n, V]."""
    rows = min(tokens, max(1, _WORKSPACE_ELEMENTS // vocabulary))
    return hidden.new_empty((rows, vocabulary), dtype=dtype)


def _cached_rows(logits: Tensor) -> Iterator[slice]:
    """Rows to reduce at a time: what a core's cache holds on a CPU, all of them on an accelerator."""
    rows, vocabulary = logits.shape
    size = max(1, BLOCK_ELEMENTS // vocabulary) if may_ask(logits) else max(1, rows)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _token_blocks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, _WORKSPACE_ELEMENTS // vocabulary)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _row_blocks(rows: Tensor | None, tokens: int, vocabulary: int) -> Iterator[Any]:
    if rows is None:
        return _token_blocks(tokens, vocabulary)
    return iter(rows.split(max(1, _WORKSPACE_ELEMENTS // vocabulary))) if rows.numel() else iter(())


def _at(tensor: Tensor | None, rows: Any) -> Tensor | None:
    return None if tensor is None else tensor[rows]
