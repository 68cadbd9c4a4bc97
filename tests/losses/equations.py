"""Losses written out token by token in plain Python, from the papers' equations: loss and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: A token's loss and its derivative by the token's new log-probability.
Term = tuple[float, float]


def token_mean(mask: Array, term: Callable[[int, int], Term]) -> tuple[float, Array]:
    """Sum of the terms of all tokens that count over their number, and its gradient [B, T]."""
    count = int(mask.sum())
    loss, gradient = 0.0, np.zeros(mask.shape)
    for b, t in zip(*np.nonzero(mask), strict=True):
        value, slope = term(b, t)
        loss += value / count
        gradient[b, t] = slope / count
    return loss, gradient


def kl(first: Sequence[float], second: Sequence[float]) -> float:
    """KL(first || second) of two lists of probabilities."""
    return math.fsum(p * math.log(p / q) for p, q in zip(first, second, strict=True) if p > 0)


def total_variation(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest difference of the probabilities of an event."""
    return math.fsum(max(p - q, 0.0) for p, q in zip(first, second, strict=True))


def with_rest(probabilities: Sequence[float], ids: Sequence[int]) -> list[float]:
    """Probabilities of the kept ids, and of everything else together."""
    kept = [probabilities[i] for i in ids]
    return [*kept, 1.0 - math.fsum(kept)]
