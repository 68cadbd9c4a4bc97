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


Terms = Callable[[int, int], Term]


def m2po_term(new: Array, old: Array, advantages: Array, mask: Array, *, second_moment: float) -> Terms:
    """Drop the largest (log r)^2, of equals the last, one by one until the mean of what is left fits."""
    log_ratio = new - old
    kept = [(b, t) for b, t in zip(*np.nonzero(mask), strict=True) if advantages[b, t] * log_ratio[b, t] > 0]
    dropped = []
    while kept and math.fsum(log_ratio[place] ** 2 for place in kept) / len(kept) > second_moment:
        worst = max(kept, key=lambda place: (abs(log_ratio[place]), place))
        kept.remove(worst)
        dropped.append(worst)

    def term(b: int, t: int) -> Term:
        value = 0.0 if (b, t) in dropped else -math.exp(log_ratio[b, t]) * advantages[b, t]
        return value, value

    return term


def cppo_term(
    new: Array,
    old: Array,
    advantages: Array,
    mask: Array,
    *,
    probability_bound: float,
    last_weight: float = 0.8,
    prefix_budget: float = 0.02,
    budget_growth: float = 2.0,
    ratio_cap: float = 20.0,
) -> Terms:
    """Walk along each response, adding up what its tokens moved."""
    kept = {}
    for b in range(mask.shape[0]):
        places = [t for t in range(mask.shape[1]) if mask[b, t]]
        moved = [abs(math.exp(new[b, t]) - math.exp(old[b, t])) for t in places]
        budget = min(max(float(np.quantile(moved, 0.9)), prefix_budget), budget_growth * prefix_budget)
        spent = allowed = 0.0
        for position, (t, distance) in enumerate(zip(places, moved, strict=True), start=1):
            remaining = (len(places) - position) / max(len(places) - 1, 1)
            weight = last_weight + (1 - last_weight) * remaining
            room = min(probability_bound, probability_bound + budget * allowed - spent)
            back = advantages[b, t] * (new[b, t] - old[b, t]) <= 0
            kept[b, t] = back or weight * distance <= room
            spent, allowed = spent + weight * distance, allowed + weight

    def term(b: int, t: int) -> Term:
        weight = min(math.exp(new[b, t] - old[b, t]), ratio_cap) * advantages[b, t] if kept[b, t] else 0.0
        return -weight * new[b, t], -weight

    return term


def ipo_term(
    new: Array, old: Array, advantages: Array, mask: Array, *, probability_bound: float, kl_coef: float
) -> Terms:
    """A probability that changed by more than the bound leaves only the square."""

    def term(b: int, t: int) -> Term:
        p, q = math.exp(new[b, t]), math.exp(old[b, t])
        weight = p / q * advantages[b, t] if abs(p - q) <= probability_bound else 0.0
        log_ratio = new[b, t] - old[b, t]
        return -weight * new[b, t] + kl_coef * log_ratio**2, -weight + 2 * kl_coef * log_ratio

    return term


def drpo_term(new: Array, old: Array, advantages: Array, mask: Array, *, probability_bound: float) -> Terms:
    """The gradient by the paper's weight 1 - sign(A (r - 1)) |p - q| / bound."""

    def term(b: int, t: int) -> Term:
        p, q, a = math.exp(new[b, t]), math.exp(old[b, t]), advantages[b, t]
        loss = -p / q * a + abs(a) * q * (p / q - 1) ** 2 / (2 * probability_bound)
        weight = 1 - math.copysign(1.0, a * (p - q)) * abs(p - q) / probability_bound
        return loss, -weight * p / q * a

    return term


def mis_term(
    new: Array,
    old: Array,
    advantages: Array,
    mask: Array,
    *,
    level: str,
    ratio_low: float,
    ratio_high: float,
    ratio_cap: float = 2.0,
) -> Terms:
    """Products of ratios, and their roots."""

    def term(b: int, t: int) -> Term:
        ratios = [math.exp(new[b, i] - old[b, i]) for i in range(mask.shape[1]) if mask[b, i]]
        product = math.prod(ratios)
        measure = product if level == "sequence" else product ** (1 / len(ratios))
        weight = product if level == "sequence" else min(math.exp(new[b, t] - old[b, t]), ratio_cap)
        if not ratio_low <= measure <= ratio_high:
            weight = 0.0
        return -weight * advantages[b, t] * new[b, t], -weight * advantages[b, t]

    return term


def decoupled_clip_term(
    new: Array,
    old: Array,
    advantages: Array,
    mask: Array,
    *,
    lag: float,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    weight_cap: float = 5.0,
) -> Terms:
    """The proximal policy is the geometric mean of old and new that is one update from new."""

    def term(b: int, t: int) -> Term:
        p, q, a = math.exp(new[b, t]), math.exp(old[b, t]), advantages[b, t]
        proximal = q ** (1 / lag) * p ** (1 - 1 / lag)
        weight, ratio = min(proximal / q, weight_cap), p / proximal
        clipped = min(max(ratio, 1 - clip_ratio_low), 1 + clip_ratio_high)
        slope = 0.0 if clipped * a < ratio * a else ratio * a
        return -weight * min(ratio * a, clipped * a), -weight * slope

    return term
