"""From hidden states and the LM head straight to log-probabilities at a few ids.

The [tokens, vocabulary] logits of a batch are the largest tensor of LLM training and are never
needed as a whole. They are formed here for a block of tokens at a time, reduced to what was asked
for, and formed again in the backward pass, unless a single block holds all tokens: then it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tether.ops import rows as plain_rows
from tether.ops.checks import check_gather, check_vocabulary_size, signed
from tether.ops.head import Head, HeadGradients
from tether.ops.memory import KEPT, WORKSPACE, tokens_at_a_time
from tether.ops.rows import Reduced, Upstream, gather_upstream
from tether.projection.backend import Backend, use_triton
from tether.projection.first_derivative import first_derivative
from tether.projection.solve import may_ask
from tether.projection.support import check_ids


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
    log_prob_min: Tensor | None = None
    """The smallest log-probability of an id that can be sampled, [N], if it was asked for; no gradient."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    top_k: int | None = None,
    with_min: bool = False,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocabulary_size: int | None = None,
    weights_at_hand: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backend: Backend = "auto",
) -> LinearLogProbs:
    """Log-probabilities of a language model at a few ids a token, without the logits in memory.

    Equals, but never holds [N, V]::

        raw = hidden.float() @ weight.float().T + bias
        logits = softcap * tanh(logit_scale * raw / softcap) / temperature     # softcap optional
        log_probs = logits.log_softmax(-1).gather(-1, ids)

    Memory beyond inputs, outputs and gradients: on a CPU 2^24 logits in float32 (or one row of them; a
    batch that has no more keeps them from the forward pass to the backward pass, which then spares a
    product) and a few blocks that fit its cache. An accelerator holds the logits of at least 1024 tokens
    (more if 2^24 are more, or a 64th of a GPU's memory, up to 8192 tokens): with the Triton kernels, their
    gradient beside them if it is in half precision; without, up to five times as much. A half-precision
    head is widened 4096 rows at a time, or not at all where the accelerator multiplies it as it is; its
    gradient is summed in float32.

    Gradients flow to `hidden`, `weight` and `bias` from everything but `top_ids`;
    a frozen head costs nothing in the backward pass, nor do rows without incoming gradient.

    Args:
        hidden: last hidden states, [N, D].
        weight: LM head, [V, D]; tied or not.
        ids: vocabulary ids, [N, K] integer; -1 marks an empty slot.
        bias: of the LM head, [V].
        top_k: also return this many of the most likely ids (at most V).
        with_min: also return the smallest log-probability, for `tether.projection.certify`.
        temperature: the sampling temperature, positive.
        logit_scale: multiplies the raw logits (Cohere, Granite), positive.
        softcap: soft cap of the scaled logits (Gemma), positive.
        vocabulary_size: rows of `weight` from here on are padding and can never be sampled.
        weights_at_hand: context entered around each use of the weights, forward and backward, for
            heads that are sharded at rest (DeepSpeed ZeRO-3).
        backend: "triton" for the kernels, "torch" for the plain path, "auto" for the kernels on a CUDA
            device where Triton is installed. The results differ by rounding alone; if hidden states and
            head are both in half precision, the kernels hand the logits' gradient to the library in it.

    Raises:
        InvalidInputError: shapes that do not fit, an id outside the vocabulary, a setting that is
            not positive, or a backend that cannot run here.
        MissingDependencyError: backend="triton" without the package.

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
    check_gather(hidden, weight, bias, ids, top_k)
    check_vocabulary_size(vocabulary_size, weight.shape[0])
    check_ids(ids, weight.shape[0])
    ids = signed(ids)
    head = Head(temperature, logit_scale, softcap, vocabulary_size, weights_at_hand)
    found = evaluate(hidden, weight, bias, ids, top_k, head, backend, with_min)
    log_sum = found.largest + found.log_total
    return LinearLogProbs(
        log_probs=found.log_probs,
        log_sum_exp=log_sum,
        entropy=found.entropy,
        top_ids=found.top_ids if top_k else None,
        top_log_probs=found.top_log_probs if top_k else None,
        log_prob_min=(found.smallest.squeeze(-1) - log_sum.detach()) if with_min else None,
    )


def evaluate(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    top_k: int | None,
    head: Head,
    backend: Backend,
    with_min: bool = False,
    sum_hidden_gradient: Callable[[Tensor], object] | None = None,
) -> Reduced:
    """`linear_log_probs` without the checks, in the parts that the shards of a head are merged from.

    `sum_hidden_gradient` adds up, in place, what the shards have of the gradient of `hidden`, before it is
    rounded to the precision of `hidden`.
    """
    kernels = kernels_for(backend, hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        return Reduced(
            *_LinearLogProbs.apply(
                hidden, weight, bias, ids, top_k or 0, head, kernels, with_min, sum_hidden_gradient
            )
        )


def kernels_for(backend: Backend, hidden: Tensor) -> ModuleType:
    """What reduces rows of logits and gives their gradient: two modules with the same two functions."""
    if not use_triton(backend, hidden):
        return plain_rows
    from tether.ops import rows_triton

    return rows_triton


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        top_k: int,
        head: Head,
        kernels: ModuleType,
        with_min: bool,
        sum_hidden_gradient: Callable[[Tensor], object] | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kept = None
        with head.weights_at_hand():
            vocabulary = weight.shape[0]
            top_k = min(top_k, head.vocabulary_size or vocabulary)
            found = empty_results(hidden, ids, top_k, with_min, vocabulary)
            buffer = workspace(hidden, vocabulary, hidden.shape[0], found.entropy.dtype)
            for block in _token_blocks(hidden, vocabulary):
                kernels.reduce_block(head, hidden[block], weight, bias, ids[block], buffer, found.at(block))
        log_sum = found.largest + found.log_total
        if any(ctx.needs_input_grad[:3]) and kernels is plain_rows and 0 < hidden.shape[0] <= buffer.shape[0]:
            ctx.kept = KEPT.offer(buffer)
        ctx.save_for_backward(hidden, weight, bias, ids, found.top_ids, log_sum, found.entropy)
        ctx.head, ctx.kernels, ctx.sum_hidden_gradient = head, kernels, sum_hidden_gradient
        ctx.mark_non_differentiable(found.largest, found.top_ids, found.top_logits, found.smallest)
        return tuple(found)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, top_ids, log_sum, entropy = ctx.saved_tensors
        grad_log_probs, _, grad_log_total, grad_entropy, _, grad_top, _, _ = grads
        upstream = gather_upstream(
            log_sum,
            entropy,
            grad_log_total,
            grad_entropy,
            (ids, grad_log_probs),
            (top_ids, grad_top),
        )
        with ctx.head.weights_at_hand():
            total = HeadGradients(ctx.needs_input_grad[:3], hidden, weight, bias, log_sum.dtype)
            for block, grad in _gradient_blocks(ctx, hidden, weight, bias, upstream):
                total.add(block, grad)
        if total.hidden is not None and ctx.sum_hidden_gradient is not None:
            ctx.sum_hidden_gradient(total.hidden)
        return (*total.rounded(), None, None, None, None, None, None)


def _gradient_blocks(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Upstream
) -> Iterator[tuple[Any, Tensor]]:
    """Which tokens, and the gradient that reaches the head's output for them: of all that received any."""
    rows = _rows_with_gradient(upstream)
    count = hidden.shape[0] if rows is None else rows.shape[0]
    kept, ctx.kept = ctx.kept, None  # spoiled here: another backward pass forms the logits again
    if kept is None:
        buffer = workspace(hidden, weight.shape[0], count, upstream.log_sum.dtype)
        for block in _row_blocks(rows, hidden, weight.shape[0]):
            block_upstream = upstream.at(block)
            yield (
                block,
                ctx.kernels.gradient_block(ctx.head, hidden[block], weight, bias, buffer, block_upstream),
            )
    elif rows is None:
        yield slice(None), plain_rows.gradient_of_kept(ctx.head, kept, upstream)
    elif count:
        kept = plain_rows.keep_rows(kept, rows)
        yield rows, plain_rows.gradient_of_kept(ctx.head, kept, upstream.at(rows))


def wide_enough(dtype: torch.dtype, vocabulary: int) -> torch.dtype:
    """A type of ids that holds every id of a vocabulary: the given one if it does."""
    return dtype if torch.iinfo(dtype).max >= vocabulary else torch.int64


def empty_results(hidden: Tensor, ids: Tensor, top_k: int, with_min: bool, vocabulary: int = 0) -> Reduced:
    """Where the forward pass puts what it finds; with `top_k`, out of how many ids."""
    tokens = hidden.shape[0]
    log_probs = hidden.new_empty(ids.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    row, top = log_probs.new_empty(tokens), log_probs.new_empty((tokens, top_k))
    return Reduced(
        log_probs=log_probs,
        largest=row,
        log_total=torch.empty_like(row),
        entropy=torch.empty_like(row),
        top_ids=ids.new_empty(top.shape, dtype=wide_enough(ids.dtype, vocabulary)),
        top_log_probs=top,
        top_logits=torch.empty_like(top),
        smallest=log_probs.new_empty((tokens, int(with_min))),
    )


def _rows_with_gradient(upstream: Upstream) -> Tensor | None:
    """Rows that received gradient; None if all did, and where asking would stall an accelerator."""
    if not may_ask(upstream.total):
        return None
    touched = upstream.touched()
    return None if bool(touched.all()) else touched.nonzero().squeeze(-1)


def workspace(hidden: Tensor, vocabulary: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """The one buffer of logits a pass uses, [n, V]."""
    return WORKSPACE.take(hidden, (tokens_at_a_time(hidden, vocabulary, tokens), vocabulary), dtype)


def _token_blocks(hidden: Tensor, vocabulary: int) -> Iterator[slice]:
    tokens = hidden.shape[0]
    size = max(1, tokens_at_a_time(hidden, vocabulary, tokens))
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _row_blocks(rows: Tensor | None, hidden: Tensor, vocabulary: int) -> Iterator[Any]:
    if rows is None:
        return _token_blocks(hidden, vocabulary)
    if not rows.numel():
        return iter(())
    return iter(rows.split(tokens_at_a_time(hidden, vocabulary, rows.shape[0])))
