"""From hidden states and the LM head straight to log-probabilities at a few ids.

The [tokens, vocabulary] logits of a batch are the largest tensor of LLM training and are never
needed as a whole. They are formed here for a block of tokens at a time, reduced to what was asked
for, and formed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.errors import InvalidInputError
from tether.ops.top_k import GROUP, group_maxima, top_k_by_groups
from tether.projection.divergence import BLOCK_ELEMENTS
from tether.projection.solve import may_ask
from tether.projection.sparse import EMPTY, check_support_size

# Logits held at a time, in elements: 64 MiB of float32. The backward pass turns them into their
# gradient in place.
_WORKSPACE_ELEMENTS = 1 << 24
# Rows of a half-precision head that are widened to float32 at a time.
_VOCABULARY_BLOCK = 1 << 12


@dataclass(frozen=True)
class LinearLogProbs:
    """What `linear_log_probs` returns; everything in nats and at least float32."""

    log_probs: Tensor
    """Log-probabilities at the given ids, [N, K]; -inf at empty slots. Differentiable."""
    log_sum_exp: Tensor
    """Log of the sum of exponentials of each row's transformed logits, [N]."""
    entropy: Tensor
    """Entropy of each row over the whole vocabulary, [N]. Differentiable."""
    top_ids: Tensor | None
    """The `top_k` most likely ids, most likely first, ties by lowest id, [N, top_k]."""
    top_log_probs: Tensor | None
    """Their log-probabilities, [N, top_k]. Differentiable."""


@dataclass(frozen=True)
class _Head:
    """How hidden states become logits, apart from the weights."""

    temperature: float
    logit_scale: float
    softcap: float | None
    vocabulary_size: int | None
    weights_at_hand: Callable[[], AbstractContextManager[Any]]

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
        """Transformed logits of a block of tokens, [n, V], in the first rows of `buffer`."""
        dtype = buffer.dtype
        hidden = hidden.to(dtype)
        logits = buffer[: hidden.shape[0]]
        if weight.dtype == dtype:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            for start in range(0, weight.shape[0], _VOCABULARY_BLOCK):
                block = weight[start : start + _VOCABULARY_BLOCK].to(dtype)
                torch.mm(hidden, block.t(), out=logits[:, start : start + block.shape[0]])
        if bias is not None:
            logits += bias.to(dtype)
        if self.softcap is not None:
            logits.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.logit_scale != self.temperature:
            logits.mul_(self.logit_scale / self.temperature)
        if self.vocabulary_size is not None:
            logits[:, self.vocabulary_size :] = -torch.inf
        return logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of the transformed logits with respect to the head's raw output."""
        slope = self.logit_scale / self.temperature
        if self.softcap is None:
            return slope
        capped = logits * (self.temperature / self.softcap)
        return torch.where(torch.isneginf(logits), 0.0, slope * (1 - capped * capped))


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

    Gradients flow to `hidden`, `weight` and `bias` from `log_probs`, `top_log_probs` and `entropy`;
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
    _check_arguments(hidden, weight, ids, bias, top_k, temperature, logit_scale, softcap, vocabulary_size)
    head = _Head(temperature, logit_scale, softcap, vocabulary_size, weights_at_hand)
    with torch.autocast(hidden.device.type, enabled=False):
        log_probs, log_sum, entropy, top_ids, top = _LinearLogProbs.apply(
            hidden, weight, bias, ids, top_k or 0, head
        )
    return LinearLogProbs(log_probs, log_sum, entropy, top_ids if top_k else None, top if top_k else None)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, top_k: int, head: _Head
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with head.weights_at_hand():
            vocabulary = weight.shape[0]
            top_k = min(top_k, head.vocabulary_size or vocabulary)
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            log_probs = hidden.new_empty(ids.shape, dtype=dtype)
            log_sum = hidden.new_empty(hidden.shape[0], dtype=dtype)
            entropy = torch.empty_like(log_sum)
            top = hidden.new_empty((hidden.shape[0], top_k), dtype=dtype)
            top_ids = ids.new_empty(top.shape)
            buffer = _workspace(hidden, vocabulary, hidden.shape[0], dtype)
            for block in _token_blocks(hidden.shape[0], vocabulary):
                logits = head.logits(hidden[block], weight, bias, buffer)
                for rows in _cached_rows(logits):
                    at = slice(block.start + rows.start, block.start + rows.stop)
                    found = _reduce(logits[rows], ids[at], top_k)
                    log_probs[at], log_sum[at], entropy[at], top_ids[at], top[at] = found
        ctx.save_for_backward(hidden, weight, bias, ids, top_ids, log_sum, entropy)
        ctx.head = head
        ctx.mark_non_differentiable(log_sum, top_ids)
        return log_probs, log_sum, entropy, top_ids, top

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, _: Any, grad_entropy: Tensor | None, __: Any, grad_top: Any
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, top_ids, log_sum, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = _rows_with_gradient(grad_log_probs, grad_top, grad_entropy)
        grad_hidden = hidden.new_zeros(hidden.shape, dtype=log_sum.dtype) if needs_hidden else None
        with ctx.head.weights_at_hand():
            grad_weight = weight.new_zeros(weight.shape, dtype=log_sum.dtype) if needs_weight else None
            grad_bias = weight.new_zeros(weight.shape[0], dtype=log_sum.dtype) if needs_bias else None
            count = hidden.shape[0] if rows is None else rows.shape[0]
            buffer = _workspace(hidden, weight.shape[0], count, log_sum.dtype)
            for block in _row_blocks(rows, hidden.shape[0], weight.shape[0]):
                block_hidden = hidden[block].to(log_sum.dtype)
                grad = ctx.head.logits(block_hidden, weight, bias, buffer)
                state, block_grad_entropy = (log_sum[block], entropy[block]), _at(grad_entropy, block)
                gathered = ((ids[block], _at(grad_log_probs, block)), (top_ids[block], _at(grad_top, block)))
                for part in _cached_rows(grad):
                    part_gathered = tuple((i[part], _at(g, part)) for i, g in gathered)
                    slope = ctx.head.slope(grad[part])
                    _logits_to_gradient(
                        grad[part], state[0][part], state[1][part], _at(block_grad_entropy, part),
                        part_gathered,
                    )  # fmt: skip
                    grad[part].mul_(slope)
                if ctx.head.vocabulary_size is not None:  # padding is -inf whatever the weights
                    grad[:, ctx.head.vocabulary_size :] = 0
                if grad_hidden is not None:
                    grad_hidden[block] = _matmul(grad, weight)
                if grad_weight is not None:
                    grad_weight.addmm_(grad.t(), block_hidden)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None,
        )  # fmt: skip


def _reduce(logits: Tensor, ids: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the forward pass returns of a few rows, whose logits it spoils."""
    grouped = bool(top_k) and logits.shape[-1] >= GROUP
    maxima = group_maxima(logits) if grouped else logits
    largest = maxima.amax(-1, keepdim=True)
    if grouped and logits.shape[-1] % GROUP:
        rest = logits[:, logits.shape[-1] // GROUP * GROUP :].amax(-1, keepdim=True)
        largest = torch.maximum(largest, rest)
    # Measured from the largest logit, nothing below cancels.
    if top_k:
        top_ids = top_k_by_groups(logits, top_k, maxima if grouped else None)
    else:
        top_ids = ids.new_empty((logits.shape[0], 0))
    shifted = logits.sub_(largest)
    log_probs, top = _gather(shifted, ids), shifted.gather(-1, top_ids.long())
    weights = shifted.exp()
    total = weights.sum(-1)
    log_total = total.log()
    # 0 times -inf is 0, and -inf itself is no longer needed.
    expected = weights.mul_(shifted.clamp_min_(-1e4)).sum(-1) / total
    return (
        log_probs - log_total[:, None],
        largest.squeeze(-1) + log_total,
        log_total - expected,
        top_ids.to(ids.dtype),
        top - log_total[:, None],
    )


def _logits_to_gradient(
    logits: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_entropy: Tensor | None,
    gathered: tuple[tuple[Tensor, Tensor | None], ...],
) -> None:
    """Replace logits by the gradient that reaches them: scatter(g) - p sum(g) - p (log p + H) g_H."""
    kept = [
        (ids.clamp_min(0).long(), torch.where(ids == EMPTY, 0.0, upstream))
        for ids, upstream in gathered
        if upstream is not None and ids.shape[-1] > 0
    ]
    total = torch.zeros_like(log_sum)
    for _, upstream in kept:
        total += upstream.sum(-1)
    log_probs = logits.sub_(log_sum[:, None])
    if grad_entropy is None:
        grad = log_probs.exp_().mul_(-total[:, None])
    else:
        probs = log_probs.exp()
        # Far below what has a probability in float64, and finite: 0 times infinity is NaN.
        grad = log_probs.clamp_min_(-1e4).add_(entropy[:, None])
        grad.mul_(grad_entropy[:, None]).add_(total[:, None])
        grad.mul_(probs).neg_()
    for ids, upstream in kept:
        grad.scatter_add_(-1, ids, upstream)


def _gather(logits: Tensor, ids: Tensor) -> Tensor:
    held = ids != EMPTY
    return torch.where(held, logits.gather(-1, torch.where(held, ids, 0).long()), -torch.inf)


def _matmul(grad: Tensor, weight: Tensor) -> Tensor:
    """grad @ weight in grad's precision, widening a half-precision head block by block."""
    if weight.dtype == grad.dtype:
        return grad @ weight
    product = grad.new_zeros(grad.shape[0], weight.shape[1])
    for start in range(0, weight.shape[0], _VOCABULARY_BLOCK):
        block = weight[start : start + _VOCABULARY_BLOCK].to(grad.dtype)
        product.addmm_(grad[:, start : start + block.shape[0]], block)
    return product


def _rows_with_gradient(*grads: Tensor | None) -> Tensor | None:
    """Rows that received gradient; None (all of them) where asking would stall an accelerator."""
    used = [grad for grad in grads if grad is not None and grad.numel()]
    if not used:
        return torch.zeros(0, dtype=torch.long)
    if not may_ask(used[0]):
        return None
    touched = torch.stack([(grad != 0).reshape(grad.shape[0], -1).any(-1) for grad in used]).any(0)
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


def _check_arguments(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    top_k: int | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    vocabulary_size: int | None,
) -> None:
    if hidden.dim() != 2 or ids.dim() != 2 or hidden.shape[0] != ids.shape[0]:
        raise InvalidInputError(
            f"linear_log_probs needs hidden [N, D] and ids [N, K], got {tuple(hidden.shape)} and "
            f"{tuple(ids.shape)}. Flatten batch and time, and keep the tokens that count."
        )
    # A ZeRO-3 head is empty at rest, so its shape can be judged only where it is whole.
    if weight.numel() and (weight.dim() != 2 or weight.shape[1] != hidden.shape[1]):
        raise InvalidInputError(
            f"weight must be [V, {hidden.shape[1]}] to fit hidden {tuple(hidden.shape)}, "
            f"got {tuple(weight.shape)}."
        )
    if bias is not None and weight.numel() and bias.shape != weight.shape[:1]:
        raise InvalidInputError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}.")
    if top_k is not None:
        check_support_size(top_k, 1.0)
    for name, value in (("temperature", temperature), ("logit_scale", logit_scale), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise InvalidInputError(f"{name} must be positive, got {value!r}.")
    if vocabulary_size is not None and not 1 <= vocabulary_size <= (weight.shape[0] or vocabulary_size):
        raise InvalidInputError(
            f"vocabulary_size must lie in [1, {weight.shape[0]}], the rows of weight, "
            f"got {vocabulary_size!r}."
        )
    if may_ask(ids) and ids.numel() and weight.numel():
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < EMPTY or highest >= weight.shape[0]:
            raise InvalidInputError(
                f"ids must lie in [0, {weight.shape[0]}) or be -1 for an empty slot; "
                f"found {lowest if lowest < EMPTY else highest}."
            )
