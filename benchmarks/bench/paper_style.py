"""TROLL as the paper's code computes it, written from the paper: dense logits, top-K, union, bracketing.

All logits are held, normalised by a dense log-softmax whose result autograd keeps, and searched by
torch.topk. Both policies' most likely ids, cut where they hold 1 - 1e-5 of the mass, form a union; ids one
side lacks get probability 1e-12 and both sides are renormalised. The multiplier is searched by n-ary
bracketing (8 points, 20 rounds, eta from 1e-7 to 1e2) without gradient, and the implicit gradient is the
exact one. Only rows outside the bound are searched, in one fused pass an evaluation: no step is slower
than it has to be.

Source: TROLL (arXiv 2510.03817, sections 3-4 and appendix).
"""

from __future__ import annotations

import math

import torch
from benchmarks.projection import bracket
from torch import Tensor

from tether import SparseLogProbs

DEFAULT_PROBABILITY = 1e-12
MASS = 1 - 1e-5
EMPTY = -1


def paper_troll(
    hidden: Tensor,
    weight: Tensor,
    sampled: Tensor,
    old: SparseLogProbs,
    advantages: Tensor,
    *,
    top_k: int,
    kl_bound: float,
    alpha: float = 1.0,
) -> Tensor:
    """The loss, the mean over tokens; rows are [N, ...] and advantages [N]."""
    log_probs = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)
    ids, own = _support(log_probs, sampled, top_k)
    union = _union(ids, old.ids.long())
    new = _on_union(union, ids, own)
    old_rows = _on_union(union, old.ids.long(), old.log_probs)
    projected, outside = _project(new, old_rows, kl_bound)
    slot = (union == sampled[:, None]).int().argmax(-1, keepdim=True)
    log_ratio = (projected.gather(-1, slot) - old_rows.gather(-1, slot)).squeeze(-1)
    used = union != EMPTY
    new_finite = torch.where(used, new, 0.0)
    pull = new_finite.exp() * (new_finite - torch.where(used, projected.detach(), 0.0))
    regression = torch.where(used & outside[:, None], pull, 0.0).sum(-1)
    return (-log_ratio.exp() * advantages + alpha * regression).mean()


def _support(log_probs: Tensor, sampled: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The most likely ids up to the mass, and the sampled token, with their log-probabilities."""
    values, ids = log_probs.topk(top_k)
    probs = values.detach().exp()
    ids = torch.where(probs.cumsum(-1) - probs < MASS, ids, EMPTY)
    present = (ids == sampled[:, None]).any(-1, keepdim=True)
    ids = torch.cat((ids, torch.where(present, EMPTY, sampled[:, None])), -1)
    return ids, torch.cat((values, log_probs.gather(-1, sampled[:, None])), -1)


def _union(first: Tensor, second: Tensor) -> Tensor:
    """Ids of either side once, sorted, empty slots first."""
    both = torch.cat((first, second), -1).sort(-1).values
    repeated = torch.zeros_like(both, dtype=torch.bool)
    repeated[:, 1:] = both[:, 1:] == both[:, :-1]
    return torch.where(repeated, EMPTY, both).sort(-1).values


def _on_union(union: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
    """Log-probabilities on the union, the default where this side has none, renormalised."""
    # Empty slots are the first of the union; one more slot takes what is empty on this side.
    slots = torch.searchsorted(union.contiguous(), ids.contiguous())
    slots = torch.where(ids == EMPTY, union.shape[-1], slots)
    spread = log_probs.new_full((union.shape[0], union.shape[1] + 1), math.log(DEFAULT_PROBABILITY))
    spread = spread.scatter(-1, slots, log_probs)[:, :-1]
    return spread.masked_fill(union == EMPTY, -torch.inf).log_softmax(-1)


def _project(new: Tensor, old: Tensor, kl_bound: float) -> tuple[Tensor, Tensor]:
    """Projected rows, and which were outside the bound."""
    log_new, log_old = _finite(new.detach()), _finite(old)
    outside = (log_new.exp() * (log_new - log_old)).sum(-1) > kl_bound
    rows = outside.nonzero().squeeze(-1)
    if rows.numel() == 0:
        return new, outside
    step = bracket(log_old[rows], log_new[rows] - log_old[rows], stop_early=False)
    projected = _Implicit.apply(new[rows], old[rows], step)
    return new.index_copy(0, rows, projected), outside


def _finite(log_probs: Tensor) -> Tensor:
    """Empty slots as a log-probability that is zero in float32 and has no infinity in it."""
    return log_probs.clamp_min(-1e4)


class _Implicit(torch.autograd.Function):
    """pi_s of given steps s, with the gradient of the s that solves the constraint."""

    @staticmethod
    def forward(ctx, new: Tensor, old: Tensor, step: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ratio = _finite(new) - _finite(old)
        projected = (_finite(old) + step[:, None] * ratio).log_softmax(-1)
        ctx.save_for_backward(projected, ratio, step)
        return projected

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        projected, ratio, step = ctx.saved_tensors
        probs = projected.exp()
        centred = ratio - (probs * ratio).sum(-1, keepdim=True)
        variance = (probs * centred * centred).sum(-1, keepdim=True)
        along = (upstream * centred).sum(-1, keepdim=True) / variance
        grad = upstream - probs * upstream.sum(-1, keepdim=True) - along * probs * centred
        return step[:, None] * grad, None, None
