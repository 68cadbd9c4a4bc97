"""The curves from an old covariance to a new one, along which the projections of `gaussian.py` move.

In coordinates where the old covariance is the identity the new one has eigenvalues lam ("variance
ratios"), and every point of a curve has the same eigenvectors and eigenvalues v(lam, s). The step s
runs from 0 (the old covariance) to 1 (the new one). A curve therefore only has to know what
happens to one eigenvalue; the matrices stay in `gaussian.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tether.projection.solve import solve_increasing

# Below this the closed form x - log(1 + x) has lost more digits than the series has terms.
_SERIES_RADIUS = 2e-3
_SERIES_TERMS = 5


class CovarianceCurve(Protocol):
    """What a projection of the covariance has to know; `lam` and `v` are [N, W], `s` and `bound` [N]."""

    def divergence(self, lam: Tensor) -> Tensor:
        """Divergence of variance ratios from 1, [N]: what the bound limits."""

    def step(self, lam: Tensor, bound: Tensor) -> Tensor:
        """The step s at which the divergence is `bound`, for rows whose divergence exceeds it, [N]."""

    def ratios(self, lam: Tensor, s: Tensor) -> Tensor:
        """Variance ratios v(lam, s), [N, W]."""

    def quotient(self, first: Tensor, second: Tensor, s: Tensor) -> Tensor:
        """(v(a, s) - v(b, s)) / (a - b), and its limit dv/da for a = b, without dividing by a - b."""

    def slope(self, lam: Tensor, s: Tensor) -> Tensor:
        """dv/ds, [N, W]."""

    def step_gradient(self, lam: Tensor, s: Tensor) -> Tensor:
        """ds/dlam where the step is held on the bound, [N, W]."""


class KullbackLeiblerCurve:
    """Interpolated precisions: v = lam / (s + (1 - s) lam), bounded in KL(N(0, v) || N(0, 1)).

    The exponential family's geodesic, so the same one-parameter problem as for token distributions.

    >>> curve = KullbackLeiblerCurve()
    >>> lam = torch.tensor([[4.0, 0.5]], dtype=torch.float64)
    >>> bound = torch.tensor([0.01], dtype=torch.float64)
    >>> v = curve.ratios(lam, curve.step(lam, bound))
    >>> round(curve.divergence(v).item(), 10)
    0.01
    """

    def divergence(self, lam: Tensor) -> Tensor:
        return 0.5 * x_minus_log1p(lam - 1, lam.log()).sum(-1)

    def step(self, lam: Tensor, bound: Tensor) -> Tensor:
        # dKL/ds = s/2 sum((lam - 1) / den)^2 with den between 1 and lam: both ends of a bracket.
        steepest = ((lam - 1) / lam.clamp_max(1)).square().sum(-1)
        flattest = ((lam - 1) / lam.clamp_min(1)).square().sum(-1)
        low = (4 * bound / steepest).sqrt() * (1 - 1e-6)
        high = (4 * bound / flattest).sqrt().mul(1 + 1e-6).clamp_max(1.0)
        low = torch.minimum(low, high)
        start = (bound / self.divergence(lam)).sqrt()

        def divergence_and_slope(s: Tensor) -> tuple[Tensor, Tensor]:
            denominator = self._denominator(lam, s)
            moved, log = (lam - 1) / denominator, (lam / denominator).log()
            return 0.5 * x_minus_log1p(s[:, None] * moved, log).sum(-1), 0.5 * s * moved.square().sum(-1)

        # Whether it converged is judged by the divergence of the result, once for all methods.
        return solve_increasing(divergence_and_slope, bound, low, high, start).x

    def ratios(self, lam: Tensor, s: Tensor) -> Tensor:
        return lam / self._denominator(lam, s)

    def quotient(self, first: Tensor, second: Tensor, s: Tensor) -> Tensor:
        s = s.reshape(-1, *(1,) * (first.dim() - 1))
        return s / ((s + (1 - s) * first) * (s + (1 - s) * second))

    def slope(self, lam: Tensor, s: Tensor) -> Tensor:
        return lam * (lam - 1) / self._denominator(lam, s).square()

    def step_gradient(self, lam: Tensor, s: Tensor) -> Tensor:
        squared = self._denominator(lam, s).square()
        divergence_slope = s * ((lam - 1).square() / squared).sum(-1)
        return -(s.square() / divergence_slope)[:, None] * (lam - 1) / (lam * squared)

    @staticmethod
    def _denominator(lam: Tensor, s: Tensor) -> Tensor:
        return s[:, None] + (1 - s[:, None]) * lam


class WassersteinCurve:
    """Interpolated square roots: v = (1 + s (sqrt(lam) - 1))^2, bounded in sum (sqrt(lam) - 1)^2.

    The squared Wasserstein-2 distance and its geodesic between N(0, lam) and N(0, 1), exact because
    everything commutes with the identity. The divergence is quadratic in s, so the step needs no search.
    """

    def divergence(self, lam: Tensor) -> Tensor:
        return (lam.sqrt() - 1).square().sum(-1)

    def step(self, lam: Tensor, bound: Tensor) -> Tensor:
        return (bound / self.divergence(lam)).sqrt()

    def ratios(self, lam: Tensor, s: Tensor) -> Tensor:
        return self._root(lam, s[:, None]).square()

    def quotient(self, first: Tensor, second: Tensor, s: Tensor) -> Tensor:
        s = s.reshape(-1, *(1,) * (first.dim() - 1))
        return s * (self._root(first, s) + self._root(second, s)) / (first.sqrt() + second.sqrt())

    def slope(self, lam: Tensor, s: Tensor) -> Tensor:
        return 2 * self._root(lam, s[:, None]) * (lam.sqrt() - 1)

    def step_gradient(self, lam: Tensor, s: Tensor) -> Tensor:
        return -(s / (2 * self.divergence(lam)))[:, None] * (1 - lam.rsqrt())

    @staticmethod
    def _root(lam: Tensor, s: Tensor) -> Tensor:
        return 1 + s * (lam.sqrt() - 1)


def kl_of_scales(ratio: Tensor) -> Tensor:
    """KL(N(0, r^2) ‖ N(0, 1)) of standard deviations r, [..., W] -> [...], in nats; their signs say nothing.

    >>> round(kl_of_scales(torch.tensor([1.0, -0.5], dtype=torch.float64)).item(), 6)
    0.318147
    """
    return 0.5 * x_minus_log1p((ratio - 1) * (ratio + 1), 2 * ratio.abs().log()).sum(-1)


def x_minus_log1p(x: Tensor, log: Tensor) -> Tensor:
    """x - log(1 + x) to full relative accuracy, also where the two nearly cancel and where x is nearly -1.

    Args:
        x: above -1, or -1 by rounding.
        log: log(1 + x) to its own accuracy, used where 1 + x has lost digits that x cannot hold.

    >>> x = torch.tensor(1e-12, dtype=torch.float64)
    >>> round(x_minus_log1p(x, x.log1p()).item() * 1e24, 9)
    0.5
    """
    small = x.abs() < _SERIES_RADIUS
    near = torch.where(small, x, 0.0)
    series = torch.zeros_like(x)
    for power in range(_SERIES_TERMS + 1, 1, -1):  # Horner: x^2 (1/2 - x/3 + x^2/4 - ...)
        series = 1 / power - near * series
    far = x < -0.5
    log1p = torch.where(far, log, torch.where(small | far, 0.0, x).log1p())
    return torch.where(small, near.square() * series, x - log1p)
