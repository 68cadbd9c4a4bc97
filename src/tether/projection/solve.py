"""The one root every trust-region projection needs, found for a whole batch at once.

Along the geodesic from the old policy (x = 0) to the new one, the divergence from the old policy
grows monotonically. `solve_increasing` finds where it meets the bound. It knows nothing about
distributions and nothing about gradients: those live with each projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Relative tolerance on the divergence. float32 sums over a vocabulary cannot do much better than
# 1e-5; float64 leaves room below the 1e-9 that is promised outside.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

# How many times the tolerance a divergence may be off and still count as on its bound: what is left where
# x has no digits to improve.
_CONVERGED = 100

# Typical rows need 2-3 evaluations. The first is spent on extreme rows of a device that can stop
# early, the second is always spent on one that cannot (asking would stall its queue).
_MAX_ITERATIONS = 60
_FIXED_ITERATIONS = 20


class Root(NamedTuple):
    """What `solve_increasing` found, [N] each."""

    x: Tensor
    converged: Tensor
    """Whether D(x) is the bound to a hundred times the tolerance, bool. Where not, the search ran out of
    steps or of digits, and x is the largest that is known to respect the bound."""


def solve_increasing(
    divergence_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    bound: Tensor,
    low: Tensor,
    high: Tensor,
    start: Tensor,
    *,
    tolerance: float | None = None,
) -> Root:
    """Find x in [low, high] with D(x) = bound, for a batch of increasing functions D.

    Newton's method runs on sqrt(D(x)) - sqrt(bound), which is nearly linear because D grows like
    x^2 near the old policy. Each step is checked against a bracket; one that would leave it is
    replaced by the bracket's geometric mean, so a root that lies many orders of magnitude below
    `high` costs a handful of extra evaluations instead of dozens.

    A row stops when D, not x, is within `tolerance` of the bound; one Newton step before that, if the
    convergence seen so far says that the step will get there; or when x has no digits left to improve.
    A row that does none of these ends at the lower end of its bracket, so the bound is never given up
    for convergence; `Root.converged` tells such rows from the others.

    Args:
        divergence_and_slope: maps x [N] to (D(x) [N], dD/dx [N]); called 2-3 times as a rule.
        bound: the value to reach, [N], positive (nats for a KL divergence).
        low: [N], positive, with D(low) <= bound.
        high: [N], with D(high) >= bound.
        start: first guess, [N]; one outside the bracket is ignored.
        tolerance: relative tolerance on D; by default 1e-5 in float32 and 1e-12 in float64.

    Returns:
        x, [N], in [low, high], and whether the bound is met there.

    Example:
        >>> import torch
        >>> two = torch.tensor([2.0], dtype=torch.float64)
        >>> x, converged = solve_increasing(lambda x: (x**2, 2 * x), two, two * 1e-6, two, two / 2)
        >>> round(x.item(), 6), converged.item()
        (1.414214, True)
    """
    tolerance = TOLERANCE[bound.dtype] if tolerance is None else tolerance
    resolution = 2 * torch.finfo(bound.dtype).eps
    may_stop_early = may_ask(bound)
    root_of_bound = bound.sqrt()
    x = _inside(start, low, high)
    done = torch.zeros_like(x, dtype=torch.bool)
    converged = done
    previous_error = torch.full_like(x, torch.inf)  # of the Newton step that led here, if one did
    for _ in range(_MAX_ITERATIONS if may_stop_early else _FIXED_ITERATIONS):
        value, slope = divergence_and_slope(x)
        error = (value / bound - 1).abs()
        met = ~done & (error <= tolerance)
        done, converged = done | met, converged | met
        if may_stop_early and bool(done.all()):
            return Root(x, converged)
        below = value < bound
        low = torch.where(below & ~done, x, low)
        high = torch.where(~below & ~done, x, high)
        root = value.clamp_min(0).sqrt()
        newton = x - (root - root_of_bound) * 2 * root / slope
        # A step that the last one shows to be misled (by rounding: it gained next to nothing) is not taken.
        trusted = (newton > low) & (newton < high) & ~(error > 0.5 * previous_error)
        # Newton's error goes as C e^2, and the last step shows C. One that is sure to end within the
        # tolerance need not be evaluated.
        coefficient = (error / previous_error.square()).clamp_min(1)
        arrives = trusted & previous_error.isfinite() & (coefficient * error.square() <= tolerance)
        # No digits of x are left to improve: keep to the side that respects the bound.
        no_step = (error < 0.1) & ((newton - x).abs() <= resolution * x)
        exhausted = no_step | (high - low <= resolution * high)
        step = torch.where(trusted, newton, _middle(low, high))
        step = torch.where(exhausted, torch.maximum(low, x * (1 - resolution)), step)
        x = torch.where(done, x, step)
        converged = converged | ~done & (arrives | exhausted & (error <= _CONVERGED * tolerance))
        done = done | arrives | exhausted
        previous_error = torch.where(trusted, error, torch.inf)
        if may_stop_early and bool(done.all()):
            return Root(x, converged)
    # Not converged to tolerance: `low` is the largest x known to respect the bound.
    return Root(torch.where(done, x, low), converged)


def may_ask(tensor: Tensor) -> bool:
    """Whether to look at values and branch on them: on an accelerator that would stall its queue."""
    return tensor.device.type == "cpu"


def _inside(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Keep x if it lies strictly inside the bracket (a NaN does not), else bisect."""
    return torch.where((x > low) & (x < high), x, _middle(low, high))


def _middle(low: Tensor, high: Tensor) -> Tensor:
    """Halve a bracket in log space."""
    return low.sqrt() * high.sqrt()
