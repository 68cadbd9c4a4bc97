"""Rows of logits and what is kept of them, and their gradient: the plain PyTorch path.

A block of tokens at a time; `rows_triton.py` does the same in one pass on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tether.ops.head import Head
from tether.ops.top_k import GROUP, group_maxima, top_k_by_groups
from tether.projection.solve import may_ask
from tether.projection.sparse import EMPTY

# Logits a CPU takes through all its passes at a time: 1 MiB of float32. Its cache holds them with the
# temporaries.
_CACHED_ELEMENTS = 1 << 18
# Rows whose most likely ids a CPU selects at a time: two dozen small operations.
_SELECTED_ROWS = 64


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
    smallest: Tensor
    """Smallest logit of an id that can be sampled, [n, 1], or [n, 0] if nobody asked; no gradient."""

    def at(self, rows: slice) -> Reduced:
        return Reduced(*(tensor[rows] for tensor in self))


class Upstream(NamedTuple):
    """What the backward pass knows of some rows."""

    log_sum: Tensor
    entropy: Tensor
    total: Tensor
    """How much of the row's probabilities the gradient takes away, [n]."""
    grad_entropy: Tensor | None
    gathered: tuple[tuple[Tensor, Tensor], ...]
    """Ids and the gradient that arrived for them, zero at empty slots."""

    def at(self, rows: Any) -> Upstream:
        return Upstream(
            self.log_sum[rows],
            self.entropy[rows],
            self.total[rows],
            _at(self.grad_entropy, rows),
            tuple((ids[rows], grad[rows]) for ids, grad in self.gathered),
        )

    def touched(self) -> Tensor:
        """Rows that any gradient reaches, [n] bool."""
        touched = self.total != 0
        if self.grad_entropy is not None:
            touched |= self.grad_entropy != 0
        for _, grad in self.gathered:
            touched |= (grad != 0).any(-1)
        return touched


def gather_upstream(
    log_sum: Tensor,
    entropy: Tensor,
    grad_log_total: Tensor | None,
    grad_entropy: Tensor | None,
    *gathered: tuple[Tensor, Tensor | None],
) -> Upstream:
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
    return Upstream(log_sum, entropy, total, grad_entropy, kept)


def reduce_block(
    head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, buffer: Tensor, out: Reduced
) -> None:
    """Reduce the logits of a block of tokens to what `out` has room for.

    In `buffer` is left what `gradient_of_kept` starts from: probabilities, up to a factor a row, or logits
    where the slope of a soft cap is read off them.
    """
    logits = head.logits(hidden, weight, bias, buffer)
    shifted = None
    top_ids, largest = _most_likely(logits, out.top_ids)
    for rows in _cached_rows(logits):
        part = logits[rows]
        smallest = _smallest(part, head, out)
        probs = part if head.softcap is None else None
        zeros = head.vocabulary_size is not None
        shifted = torch.empty_like(part) if shifted is None else shifted[: len(part)]
        found = reduce_rows(
            part, ids[rows], top_ids[rows], largest=None if largest is None else largest[rows],
            probs=probs, shifted=shifted, zeros=zeros,
        )._replace(smallest=smallest)  # fmt: skip
        for result, value in zip(out.at(rows), found, strict=True):
            result.copy_(value)


def gradient_block(
    head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor, upstream: Upstream
) -> Tensor:
    """Gradient that reaches the head's raw output for a block of tokens, [n, V]."""
    logits = head.logits(hidden, weight, bias, buffer)
    if head.softcap is None:
        for part in _cached_rows(logits):
            torch.softmax(logits[part], -1, out=logits[part])
    return gradient_of_kept(head, logits, upstream)


def gradient_of_kept(head: Head, kept: Tensor, upstream: Upstream, **_: Any) -> Tensor:
    """The same from what `reduce_block` left, which it overwrites, in its precision."""
    for part in _cached_rows(kept):
        if head.softcap is None:
            probs_to_gradient(kept[part], upstream.at(part), head.constant_slope)
        else:
            logits = kept[part]
            slope = head.slope(logits)
            logits_to_gradient(logits, upstream.at(part))
            logits.mul_(slope)
    if head.vocabulary_size is not None:  # padding is -inf whatever the weights
        kept[:, head.vocabulary_size :] = 0
    return kept


def keep_rows(logits: Tensor, rows: Tensor) -> Tensor:
    """Move some rows, in rising order, to the front: ``logits[rows]`` without a second buffer."""
    if rows.shape[0] == logits.shape[0]:
        return logits
    for at in _cached_rows(logits[: rows.shape[0]]):
        logits[at] = logits[rows[at]]
    return logits[: rows.shape[0]]


def probs_to_gradient(probs: Tensor, upstream: Upstream, slope: float) -> None:
    """Replace probabilities, up to a factor a row, by `slope` times the gradient that reaches their logits.

    That is scatter(g) - p sum(g) - p (log p + H) g_H.
    """
    mass = probs.sum(-1, keepdim=True)
    taken = upstream.total[:, None]
    if upstream.grad_entropy is not None:
        # Far below what has a probability in float64, and finite: 0 times infinity is NaN.
        centred = (probs / mass).log_().clamp_min_(-1e4).add_(upstream.entropy[:, None])
        probs.mul_(centred.mul_(upstream.grad_entropy[:, None]).add_(taken)).mul_(-slope / mass)
    else:
        probs.mul_(taken * (-slope / mass))
    for ids, arrived in upstream.gathered:
        probs.scatter_add_(-1, ids.clamp_min(0).long(), arrived * slope)


def logits_to_gradient(logits: Tensor, upstream: Upstream) -> None:
    """Replace logits by the gradient that reaches them, as `probs_to_gradient` does with a slope of one."""
    logits.sub_(upstream.log_sum[:, None]).exp_()
    probs_to_gradient(logits, upstream, 1.0)


def _most_likely(logits: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """As many of the most likely ids as `out` has room for, and the largest logits if they were met."""
    rows, top_k = out.shape
    if not top_k or logits.shape[-1] < GROUP:
        return (out.long() if not top_k else top_k_by_groups(logits, top_k)), None
    size = _SELECTED_ROWS if may_ask(logits) else max(1, rows)
    found, largest = [], []
    for some in logits.split(size):
        maxima = group_maxima(some)
        found.append(top_k_by_groups(some, top_k, maxima))
        # The most likely id is the first.
        largest.append(some.gather(-1, found[-1][:, :1]))
    return torch.cat(found), torch.cat(largest)


def reduce_rows(
    logits: Tensor,
    ids: Tensor,
    top_ids: Tensor | None = None,
    *,
    largest: Tensor | None = None,
    probs: Tensor | None = None,
    shifted: Tensor | None = None,
    zeros: bool = False,
) -> Reduced:
    """What the forward pass returns of a few rows.

    Args:
        top_ids: the most likely ids, if they are wanted.
        largest: the largest logits [n, 1], if they are at hand.
        probs: where their probabilities go, up to a factor a row; may be `logits`.
        shifted: where what is measured from the largest logit goes. Memory that is asked for a few rows at a
            time may have to be mapped anew each time, which takes longer than what is done with it.
        zeros: whether some ids are known to have a logit of -inf.
    """
    if top_ids is None:
        top_ids = torch.empty((logits.shape[0], 0), dtype=torch.long, device=logits.device)
    if largest is None:
        largest = logits.amax(-1, keepdim=True)
    top_logits = logits.gather(-1, top_ids)
    # Measured from the largest logit, nothing below cancels.
    shifted = torch.sub(logits, largest, out=shifted)
    log_probs = _gather(shifted, ids)
    probs = torch.softmax(shifted, -1) if probs is None else torch.softmax(shifted, -1, out=probs)
    # softmax is one fused pass, faster than exp alone. It adds up naively, which its own sum corrects, and
    # its largest entry is 1 / sum(exp).
    mass = probs.sum(-1)
    log_total = (mass / probs.amax(-1)).log()
    expected = _expected(probs, shifted, mass, zeros)
    return Reduced(
        log_probs=log_probs - log_total[:, None],
        largest=largest.squeeze(-1),
        log_total=log_total,
        entropy=log_total - expected,
        top_ids=top_ids,
        top_log_probs=top_logits - largest - log_total[:, None],
        top_logits=top_logits,
        smallest=largest[:, :0],
    )


def _expected(probs: Tensor, shifted: Tensor, mass: Tensor, zeros: bool) -> Tensor:
    """E[shifted] a row; 0 times -inf is 0."""
    if not zeros and may_ask(probs):
        expected = torch.linalg.vecdot(probs, shifted) / mass
        if bool(expected.isfinite().all()):
            return expected
    return torch.linalg.vecdot(probs, shifted.clamp_min_(-1e4)) / mass


def _smallest(logits: Tensor, head: Head, out: Reduced) -> Tensor:
    if not out.smallest.shape[-1]:
        return logits[:, :0]
    return logits[:, : head.vocabulary_size].amin(-1, keepdim=True)


def _gather(logits: Tensor, ids: Tensor) -> Tensor:
    held = ids != EMPTY
    return torch.where(held, logits.gather(-1, torch.where(held, ids, 0).long()), -torch.inf)


def _cached_rows(logits: Tensor) -> Iterator[slice]:
    """Rows to reduce at a time: what a core's cache holds on a CPU, all of them on an accelerator."""
    rows, vocabulary = logits.shape
    size = max(1, _CACHED_ELEMENTS // vocabulary) if may_ask(logits) else max(1, rows)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _at(tensor: Tensor | None, rows: Any) -> Tensor | None:
    return None if tensor is None else tensor[rows]
