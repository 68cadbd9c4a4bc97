"""The trust-region step of wide rows in few passes, where no probability is zero and no row has moved far.

`geodesic.py` is the reference beside it and takes every row. Here a row's log-ratios are measured from one
outcome, so that a divergence needs no log-sum-exp of its own: one fused softmax and one moment a pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tether.projection.solve import TOLERANCE

# Steps after which a row is left to the reference; two or three are usual.
_MAX_STEPS = 6
# Nats below which the anchor's probability has lost its digits, and from which differences lose too many.
_SMALLEST, _FAR = -60.0, 4.0
# Squared mean over variance from which the variance is not taken from raw moments.
_LARGEST_OFFSET = 64.0


class AnchoredStep(NamedTuple):
    """What is known of the projections of some rows, [n] each but for `probs`."""

    step: Tensor
    probs: Tensor
    """[n, V], up to a factor a row."""
    log_prob: Tensor
    """Of the anchor."""
    mean: Tensor
    """E[u] under the projection, with u the log-ratio less the anchor's."""
    variance: Tensor
    kl: Tensor
    """KL(projection || old), as evaluated."""
    met: Tensor
    """Whether the bound is met and nothing lost too many digits, bool; where not, ask the reference."""


class AnchoredCurve:
    """Both ends of the curves pi_s ∝ q^(1-s) p^s of rows of logits [n, V], measured from one outcome a row.

    KL(pi_s || q) = s E_s[u] + log pi_s(o) - log q(o) with u = log(p / q) - log(p / q)(o): no normalisation of
    the log-ratio and none of the logits enters.
    """

    def __init__(self, new: Tensor, old: Tensor, anchor: Tensor) -> None:
        self.index = anchor[:, None].long()
        self.old = old
        self.ratio = torch.sub(new, old)
        self.ratio.sub_(self.ratio.gather(-1, self.index))
        self.new_probs, self.new_mass, self.log_new = self._softmax(new)
        self.old_probs, self.old_mass, self.log_old = self._softmax(old)
        self.mean_new = torch.linalg.vecdot(self.new_probs, self.ratio) / self.new_mass
        self.kl = (self.mean_new + self.log_new - self.log_old).clamp_min(0)

    @property
    def reliable(self) -> Tensor:
        """Rows whose `kl` has its digits, bool; a zero, NaN or infinity anywhere is none."""
        near = self.mean_new.abs() <= _FAR * (1 + self.kl)
        return near & (self.log_old > _SMALLEST) & (self.log_new > _SMALLEST) & self.kl.isfinite()

    def at(self, rows: Tensor) -> AnchoredCurve:
        """Of some rows."""
        if rows.numel() == len(self.kl):
            return self
        part = object.__new__(AnchoredCurve)
        for name, value in vars(self).items():
            setattr(part, name, value[rows])
        return part

    def solve(self, kl_bound: float) -> AnchoredStep:
        """The steps of rows whose `kl` exceeds the bound.

        Halley's method on sqrt(KL(s)) - sqrt(bound), whose derivatives are moments of u: where Newton's
        doubles the digits of a step, it triples them, and a moment is cheaper than another softmax.
        """
        step = self._first_guess(kl_bound)
        low, high = torch.zeros_like(step), torch.ones_like(step)
        tolerance = TOLERANCE[step.dtype]
        # Made anew: they are results, or would be held until the next row anyway.
        probs, scratch = torch.empty_like(self.ratio), self.old_probs
        for last in [False] * (_MAX_STEPS - 1) + [True]:
            torch.addcmul(self.old, step[:, None], self.ratio, out=scratch)
            _, mass, log_prob = self._softmax(scratch, probs)
            moment = torch.mul(probs, self.ratio, out=scratch)
            mean = moment.sum(-1) / mass
            kl = step * mean + log_prob - self.log_old
            square = torch.linalg.vecdot(moment, self.ratio) / mass
            variance = square - mean * mean
            close = (kl / kl_bound - 1).abs() <= tolerance
            if last or bool(close.all()):
                break
            cube = torch.linalg.vecdot(moment.mul_(self.ratio), self.ratio) / mass
            skew = cube - mean * (3 * square - 2 * mean * mean)
            low, high = torch.where(kl < kl_bound, step, low), torch.where(kl < kl_bound, high, step)
            moved = step - _halley(step, kl, variance, skew, kl_bound)
            inside = (moved > low) & (moved < high)
            moved = torch.where(inside, moved, torch.where(low > 0, (low * high).sqrt(), 0.5 * high))
            step = torch.where(close, step, moved)
        near = (step * mean).abs() <= _FAR
        met = close & near & (mean * mean <= _LARGEST_OFFSET * variance) & (log_prob > _SMALLEST)
        return AnchoredStep(step, probs, log_prob, mean, variance, kl, met)

    def _softmax(self, logits: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities up to a factor a row, that factor, and the anchor's log-probability without it."""
        probs = torch.softmax(logits, -1) if out is None else torch.softmax(logits, -1, out=out)
        mass = probs.sum(-1)
        return probs, mass, (probs.gather(-1, self.index).squeeze(-1) / mass).log()

    def _first_guess(self, kl_bound: float) -> Tensor:
        """Where a s + b s^2 + c s^3 meets the bound: sqrt(2 KL) with its slope at both ends and its value."""
        moment = torch.mul(self.old_probs, self.ratio)
        mean, mass = moment.sum(-1) / self.old_mass, self.old_mass
        slope = (torch.linalg.vecdot(moment, self.ratio) / mass - mean * mean).clamp_min(0).sqrt()
        torch.mul(self.new_probs, self.ratio, out=moment)
        end = (2 * self.kl).sqrt()
        variance = torch.linalg.vecdot(moment, self.ratio) / self.new_mass - self.mean_new.square()
        third = variance / end - 2 * end + slope
        second = end - slope - third
        target = (2 * kl_bound) ** 0.5
        # Of the parabola through both ends, then once by Newton's method on the cubic.
        guess = 2 * target / (slope + (slope * slope + 4 * (end - slope) * target).sqrt())
        value = guess * (slope + guess * (second + guess * third))
        guess = guess - (value - target) / (slope + guess * (2 * second + guess * 3 * third))
        return torch.where((guess > 0) & (guess < 1), guess, target / end)


def _halley(step: Tensor, kl: Tensor, variance: Tensor, skew: Tensor, kl_bound: float) -> Tensor:
    """What to take from a step, by Halley's method on f = sqrt(KL(s)) - sqrt(bound)."""
    root = kl.clamp_min(torch.finfo(kl.dtype).tiny).sqrt()
    f = root - kl_bound**0.5
    first = step * variance / (2 * root)
    second = (variance + step * skew - 2 * first * first) / (2 * root)
    bent = 2 * first * first - f * second
    return torch.where(bent > first * first, 2 * f * first / bent, f / first)
