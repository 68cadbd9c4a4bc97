"""The divergence between token distributions, and the fused passes that it and the projection stand on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection.solve import may_ask

# Elements of a block that a CPU core's cache holds together with the temporaries of one evaluation.
BLOCK_ELEMENTS = 1 << 17


def kl_categorical(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(new || old) in nats of every row, [..., V] -> [...]; infinite where only the old has a zero.

    Rows are normalised on the way, so a constant added to a row changes nothing. A probability too
    small for the precision counts as zero. float32 at least; differentiable.

    Raises:
        InvalidInputError: rows of different vocabularies, or of none.

    Example:
        >>> import torch
        >>> new, old = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
        >>> round(kl_categorical(new, old).item(), 4)
        0.1438
    """
    if log_probs.shape[-1:] != old_log_probs.shape[-1:] or not log_probs.shape[-1:].numel():
        raise InvalidInputError(
            "log_probs and old_log_probs must have the same last dimension, V >= 1, got "
            f"{tuple(log_probs.shape)} and {tuple(old_log_probs.shape)}."
        )
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, old_log_probs.dtype), torch.float32)
    log_new, log_old = normalised(log_probs.to(dtype)), normalised(old_log_probs.to(dtype))
    # 0 log(0/q) = 0 even for q = 0. The inner where keeps the gradient from seeing -inf.
    zero = log_new.exp() == 0
    terms = torch.where(zero, 0.0, log_new).exp() * torch.where(zero, 0.0, log_new - log_old)
    # A NaN anywhere makes a whole row NaN, and must come out.
    return terms.sum(-1).clamp_min(0)


def normalised(logits: Tensor) -> Tensor:
    """log_softmax, whose own sum over 10^5 outcomes is off by up to 1e-4 in float32."""
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    return shifted - shifted.logsumexp(-1, keepdim=True)


def rows_kl(new: Tensor, old: Tensor) -> Tensor:
    """What `kl_categorical` returns, [N, V] -> [N], in a fraction of its time and without a gradient."""
    largest_new, log_sum_new, probs = log_partition(new)
    largest_old, log_sum_old, _ = log_partition(old)
    mass = probs.sum(-1)
    offset = log_sum_new - log_sum_old
    terms = (new - largest_new).sub_(old - largest_old).sub_(offset).mul_(probs)
    terms.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)  # 0 times infinity
    kl = terms.sum(-1).clamp_min_(0) / mass
    return torch.where(offset.squeeze(-1).isfinite(), kl, torch.nan)


def region_kl(new: Tensor, old: Tensor, weight: Tensor, counted: Tensor | None) -> Tensor:
    """Mean divergence of each region's tokens: rows [G, R, V] weighted by [G, R] -> [G]."""
    new, old = new.flatten(0, 1), old.flatten(0, 1)
    size = max(1, BLOCK_ELEMENTS // new.shape[-1]) if may_ask(new) else new.shape[0]
    blocks = zip(new.split(size), old.split(size), strict=True)
    kl = torch.cat([rows_kl(*block) for block in blocks]).view_as(weight)
    return (weight * where(counted, kl, 0.0)).sum(-1)  # what is not counted may be NaN


def log_partition(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What to take from logits to normalise them, in two parts, and the probabilities.

    ``logits.logsumexp(-1, keepdim=True)`` is the sum of the two parts, the largest logit and the log
    of the sum relative to it; apart, they keep their digits. softmax is one fused pass, faster than exp
    alone, and its largest entry is 1 / sum(exp). It adds up naively, which its own sum corrects.
    """
    probs = logits.softmax(-1)
    largest_prob = probs.amax(-1, keepdim=True) / probs.sum(-1, keepdim=True)
    return logits.amax(-1, keepdim=True), -largest_prob.log(), probs


def log_softmax(logits: Tensor) -> Tensor:
    """Normalised logits; the sum stays exact over vocabularies where torch.log_softmax drifts."""
    largest, log_sum, _ = log_partition(logits)
    return (logits - largest).sub_(log_sum)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) of numbers below zero, by the form that keeps its digits (Maechler 2012)."""
    return torch.where(x > -math.log(2), (-x.expm1()).log(), (-x.exp()).log1p())


def where(condition: Tensor | None, values: Tensor, other: Tensor | float) -> Tensor:
    """torch.where in which no condition is one that always holds."""
    return values if condition is None else torch.where(condition, values, other)
