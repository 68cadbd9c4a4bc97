"""Independent solutions to compare with: float64, dense, numpy and other people's solvers.

Nothing here imports Tether, and each solution takes another road than the library does.
"""

from __future__ import annotations

from collections.abc import Sequence

import cvxpy as cp
import numpy as np
import scipy.optimize
import scipy.special
from numpy.typing import NDArray

Array = NDArray[np.float64]

# A cone program ends this near to its optimum; by Pinsker's inequality its probabilities then are within
# the root of twice as much. At a tenth of it, the last bit of the input decides whether the solver ends.
_CONE_PROGRAM_GAP = 1e-10
CONE_PROGRAM_ERROR = (2 * _CONE_PROGRAM_GAP) ** 0.5

# Below this a float32 probability is zero or denormal.
SMALLEST_FLOAT32 = 1.2e-38


def normalise(log_probs: object) -> Array:
    """log_softmax in float64 of anything array-like."""
    values = np.asarray(log_probs, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        values = values - values.max(-1, keepdims=True)  # first, or 1e30 would swallow the log of the sum
        return values - scipy.special.logsumexp(values, axis=-1, keepdims=True)


def kl(new: object, old: object, *, smallest: float = 0.0) -> Array:
    """KL(new || old) of rows, term by term in float64; probabilities up to `smallest` are zeros."""
    log_new, log_old = normalise(new), normalise(old)
    probs = np.exp(log_new)
    with np.errstate(invalid="ignore"):
        return np.where(probs > smallest, probs * (log_new - log_old), 0.0).sum(-1)


def geodesic(new: object, old: object, s: float) -> Array:
    """log of q^(1-s) p^s, normalised; zeros of either stay zeros for s > 0."""
    log_new, log_old = normalise(new), normalise(old)
    with np.errstate(invalid="ignore"):
        mixed = (1 - s) * log_old + s * log_new
    return normalise(np.where(np.isneginf(log_old) | np.isneginf(log_new), -np.inf, mixed))


def project_by_root(new: object, old: object, bound: float) -> tuple[Array, float]:
    """The projection of one row (or the rows of a sequence, in the mean) by Brent's method on s."""

    def excess(s: float) -> float:
        return float(np.mean(kl(geodesic(new, old, s), old))) - bound

    if float(np.mean(kl(new, old))) <= bound:
        return normalise(new), 1.0
    if excess(1.0) <= 0:  # only possible where old zeros left the picture
        return geodesic(new, old, 1.0), 1.0
    s = scipy.optimize.brentq(excess, 1e-14, 1.0, xtol=1e-16, rtol=1e-14, maxiter=500)
    return geodesic(new, old, float(s)), float(s)


def project_by_cone_program(new: object, old: object, bound: float) -> Array:
    """Probabilities of the projection from the primal problem itself, handed to an interior-point solver.

    Rows [V], or [R, V] for a sequence whose mean divergence is bounded.
    """
    p, q = np.exp(np.atleast_2d(normalise(new))), np.exp(np.atleast_2d(normalise(old)))
    pi = cp.Variable(p.shape, nonneg=True)
    rows = p.shape[0]
    problem = cp.Problem(
        cp.Minimize(cp.sum(cp.rel_entr(pi, p))),
        [cp.sum(cp.rel_entr(pi, q)) / rows <= bound, cp.sum(pi, axis=1) == 1],
    )
    problem.solve(
        solver=cp.CLARABEL,
        tol_gap_abs=_CONE_PROGRAM_GAP,
        tol_gap_rel=_CONE_PROGRAM_GAP,
        tol_feas=_CONE_PROGRAM_GAP,
        tol_ktratio=1e-9,
        max_iter=400,
    )
    assert problem.status == "optimal", problem.status
    return np.asarray(pi.value).reshape(np.shape(new))


def project_by_descent(new: object, old: object, bound: float) -> Array:
    """Probabilities of the projection of one row by sequential quadratic programming on the primal."""
    log_new, log_old = normalise(new), normalise(old)

    def divergence(pi: Array, reference: Array) -> float:
        return float(np.sum(pi * (np.log(pi) - reference)))

    result = scipy.optimize.minimize(
        lambda pi: divergence(pi, log_new),
        np.exp(log_old),
        jac=lambda pi: np.log(pi) - log_new + 1,
        method="SLSQP",
        bounds=[(1e-12, 1.0)] * log_new.size,
        constraints=[
            {"type": "eq", "fun": lambda pi: pi.sum() - 1, "jac": np.ones_like},
            {
                "type": "ineq",
                "fun": lambda pi: bound - divergence(pi, log_old),
                "jac": lambda pi: -(np.log(pi) - log_old + 1),
            },
        ],
        options={"maxiter": 500, "ftol": 1e-15},
    )
    return np.asarray(result.x)


def central_differences(function: object, point: object, step: float = 1e-6) -> Array:
    """Gradient of a scalar function of an array, one coordinate at a time."""
    assert callable(function)
    base = np.array(point, dtype=np.float64)
    gradient = np.zeros_like(base)
    for index in np.ndindex(base.shape):
        shift = np.zeros_like(base)
        shift[index] = step
        gradient[index] = (function(base + shift) - function(base - shift)) / (2 * step)
    return gradient


def aggregate(
    token_loss: Sequence[Sequence[float]], mask: Sequence[Sequence[int]], mode: str, length: int | None = None
) -> float:
    """The four aggregation modes as plain loops."""
    rows = [
        [value for value, counts in zip(losses, row, strict=True) if counts]
        for losses, row in zip(token_loss, mask, strict=True)
    ]
    if mode == "token-mean":
        return sum(map(sum, rows)) / max(1, sum(map(len, rows)))
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / max(1, len(row)) for row in rows) / len(rows)
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * (length or len(mask[0])))


def ppo_clip_token(
    log_prob: float, old_log_prob: float, advantage: float, low: float, high: float, dual: float | None
) -> float:
    """One token's clipped surrogate loss, spelled out case by case."""
    ratio = float(np.exp(log_prob - old_log_prob))
    if advantage >= 0:
        return -min(ratio, 1 + high) * advantage
    weight = max(ratio, 1 - low)
    if dual is not None:
        weight = min(weight, dual)
    return -weight * advantage
