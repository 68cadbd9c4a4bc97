"""The trust-region step of wide rows in few passes, where no probability is zero and no row has moved far.

`geodesic.py` is the reference beside it and takes every row. Here a row's log-ratios are measured from one
outcome, so that a divergence needs no log-sum-exp of its own: one fused softmax and one moment a pass. Rows
are taken a few at a time, which a CPU core's cache holds; what is one number a row is computed for all rows
of a block at once, in float64, where it costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Logits of one policy taken through all passes at a time: 1 MiB of float32.
_STRIP_ELEMENTS = 1 << 18
# Evaluations after which a row is left to the reference; one or two are usual.
MAX_STEPS = 4
# Nats below which the anchor's probability has lost its digits, and from which differences lose too many.
SMALLEST, FAR = -60.0, 4.0
# Squared distance of the mean from where it was expected, over the variance, from which moments lose digits.
LARGEST_OFFSET = 16.0
# Share by which a term of the series in the step may change the variance. Terms fall geometrically: the first
# that is left out is the third power of it.
LARGEST_CHANGE = {torch.float32: 1e-2, torch.float64: 1e-4}
# Newton's method on the series, whose start is off by a few per cent.
SERIES_STEPS = 6
# By how much the series may miss the bound, a share of it and in nats, once that method has converged: it is
# computed in float64.
LARGEST_MISS, ROUNDING = 1e-9, 64 * torch.finfo(torch.float64).eps

Rows = slice | Tensor


class AnchoredStep(NamedTuple):
    """What is known of the projections of some rows, [n] each."""

    step: Tensor
    log_prob: Tensor
    """Of the anchor."""
    mean: Tensor
    """E[u] under the projection, with u the log-ratio less the anchor's."""
    variance: Tensor
    kl: Tensor
    """KL(projection || old)."""
    met: Tensor
    """Whether the bound is met and nothing lost too many digits, bool; where not, ask the reference."""


class _Series(NamedTuple):
    """The log-partition K of the curve about a step, [n] each, float64: K'' and so on are cumulants of u."""

    step: Tensor
    value: Tensor
    mean: Tensor
    variance: Tensor
    third: Tensor
    fourth: Tensor

    def at(self, delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """KL(pi_s || q) = s K' - K, K, K' and K'' at the step plus `delta`."""
        third, fourth = self.third, self.fourth
        variance = self.variance + delta * (third + delta * (fourth / 2))
        mean = self.mean + delta * (self.variance + delta * (third / 2 + delta * (fourth / 6)))
        inner = self.variance / 2 + delta * (third / 6 + delta * (fourth / 24))
        value = self.value + delta * (self.mean + delta * inner)
        return (self.step + delta) * mean - value, value, mean, variance

    def root(self, kl_bound: float) -> Tensor:
        """The `delta` at which the divergence meets the bound, by Newton's method on its root."""
        delta = torch.zeros_like(self.step)
        for _ in range(SERIES_STEPS):
            kl, _, _, variance = self.at(delta)
            root = kl.clamp_min(torch.finfo(kl.dtype).tiny).sqrt()
            delta = delta - (root - kl_bound**0.5) * 2 * root / ((self.step + delta) * variance)
        return delta

    def change(self, delta: Tensor) -> Tensor:
        """By how much, relatively, a term of the series changes the variance."""
        bent = (self.fourth.abs() / (2 * self.variance)).sqrt()
        return delta.abs() * torch.maximum((self.third / self.variance).abs(), bent)


class AnchoredCurve:
    """Both ends of the curves pi_s ∝ q^(1-s) p^s of rows of logits, measured from one outcome a row.

    With u = log(p / q) - log(p / q)(o), K(s) = log E_q[e^(s u)] is log q(o) - log pi_s(o), and
    KL(pi_s || q) = s K'(s) - K(s): no normalisation of the log-ratio and none of the logits enters.

    Args:
        new: logits, [N, V].
        old: of some of those rows, [n, V].
        anchor: the outcome of each old row, [n]; the sampled token.
        rows: which of the new rows the old ones belong to, [n].
        kl_bound: rows that exceed it can be projected.
    """

    def __init__(
        self, new: Tensor, old: Tensor, anchor: Tensor, kl_bound: float, rows: Tensor | None = None
    ) -> None:
        self.new, self.old, self.kl_bound = new, old, kl_bound
        self.index, self.rows = anchor[:, None].long(), rows
        self._scratch = old.new_empty((3, self._strip, old.shape[-1]))
        self.log_new, self.log_old, self.mean_new, self.kl, *self._moments = torch.zeros(
            (7, len(old)), dtype=old.dtype, device=old.device
        )
        for part in self._strips(len(old)):
            self._measure(part)

    @property
    def reliable(self) -> Tensor:
        """Rows whose `kl` has its digits, bool; a zero, NaN or infinity anywhere is none."""
        near = self.mean_new.abs() <= FAR * (1 + self.kl)
        return near & (self.log_old > SMALLEST) & (self.log_new > SMALLEST) & self.kl.isfinite()

    def solve(self, rows: Tensor) -> AnchoredStep:
        """The steps of rows whose `kl` exceeds the bound.

        One evaluation where the first guess is good: four moments of u give the divergence about it as a
        series, exact to the precision as far as the step then moves. Where it moves further, one more there.
        """
        step, centre = self._first_guess(rows)
        found = None
        pending = torch.arange(len(rows), device=rows.device)
        for _ in range(MAX_STEPS):
            series, sound = self._series(rows[pending], step, centre)
            delta = series.root(self.kl_bound)
            kl, value, mean, variance = series.at(delta)
            step, centre = series.step + delta, mean
            log_prob = self.log_old[rows[pending]].double() - value
            inside = sound & (step > 0) & (step < 1)
            met = inside & (series.change(delta) <= LARGEST_CHANGE[self.old.dtype])
            # A guess so near the old policy that its divergence is rounding alone leads nowhere.
            met &= (kl - self.kl_bound).abs() <= LARGEST_MISS * self.kl_bound + ROUNDING
            near = ((step * mean).abs() <= FAR) & (log_prob > SMALLEST) & (variance > 0)
            latest = torch.stack((step, log_prob, mean, variance, kl, (met & near).double()))
            found = latest if found is None else found.index_copy_(1, pending, latest)
            again = inside & ~met
            if not bool(again.any()):
                break
            pending, step, centre = pending[again], step[again], centre[again]
        assert found is not None
        return AnchoredStep._make((*found[:-1].to(self.old.dtype), found[-1].bool()))

    def _measure(self, part: slice) -> None:
        """Both ends of some rows; what the first guess needs only if one of them is outside the bound."""
        new, old = self._new_at(part), self.old[part]
        index, (ratio, probs, old_probs) = self.index[part], self._scratch[:, : len(old)]
        torch.sub(new, old, out=ratio)
        ratio.sub_(ratio.gather(-1, index))
        torch.softmax(new, -1, out=probs)
        torch.softmax(old, -1, out=old_probs)
        mass, old_mass = probs.sum(-1), old_probs.sum(-1)
        log_new = torch.log(probs.gather(-1, index).squeeze(-1) / mass, out=self.log_new[part])
        log_old = torch.log(old_probs.gather(-1, index).squeeze(-1) / old_mass, out=self.log_old[part])
        mean = torch.div(probs.mul_(ratio).sum(-1), mass, out=self.mean_new[part])
        kl = self.kl[part].copy_(mean + log_new - log_old).clamp_min_(0)
        if bool((kl > self.kl_bound).any()):
            square, old_mean, old_square = (moment[part] for moment in self._moments)
            torch.div(torch.linalg.vecdot(probs, ratio), mass, out=square)
            torch.div(old_probs.mul_(ratio).sum(-1), old_mass, out=old_mean)
            torch.div(torch.linalg.vecdot(old_probs, ratio), old_mass, out=old_square)

    def _series(self, rows: Tensor, step: Tensor, centre: Tensor) -> tuple[_Series, Tensor]:
        """The curves about some steps, and whether the moments have their digits.

        Args:
            centre: what E[u] is expected to be there.
        """
        shift, tilt = centre.to(self.old.dtype), (step - 1).to(self.old.dtype)
        sums = torch.empty((6, len(rows)), dtype=self.old.dtype, device=rows.device)
        whole = len(rows) == len(self.old)
        for part in self._strips(len(rows)):
            at = part if whole else rows[part]
            new, old, index = self._new_at(at), self.old[at], self.index[at]
            ratio, probs, _ = self._scratch[:, : len(old)]
            mass, anchor, first, second, third, fourth = sums[:, part]
            torch.sub(new, old, out=ratio)
            torch.addcmul(new, tilt[part, None], ratio, out=probs)
            torch.softmax(probs, -1, out=probs)
            torch.sum(probs, -1, out=mass)
            anchor.copy_(probs.gather(-1, index).squeeze(-1))
            ratio.sub_(ratio.gather(-1, index) + shift[part, None])
            for moment in (first, second, third):
                torch.sum(probs.mul_(ratio), -1, out=moment)
            torch.linalg.vecdot(probs, ratio, out=fourth)
        mass, anchor, *raw = sums.double()
        first, second, third, fourth = (moment / mass for moment in raw)
        square = first * first
        variance = second - square
        # The step as it was taken, rounded.
        series = _Series(
            step=tilt.double() + 1,
            value=self.log_old[rows].double() - (anchor / mass).log(),
            mean=first + shift.double(),
            variance=variance,
            third=third - 3 * first * second + 2 * first * square,
            fourth=fourth
            - 4 * first * third
            - 3 * second.square()
            + 12 * second * square
            - 6 * square.square(),
        )
        return series, square <= LARGEST_OFFSET * variance

    def _first_guess(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where a s + b s^2 + c s^3 meets the bound, and E[u] there.

        The cubic is sqrt(2 KL) with its slope at both ends and its value; E[u] is the cubic with the means
        and variances of both ends.
        """
        names = (self.kl, self.mean_new, *self._moments)
        kl, mean_new, square_new, mean_old, square_old = (value[rows].double() for value in names)
        variance_new, variance_old = square_new - mean_new.square(), square_old - mean_old.square()
        slope = variance_old.clamp_min(0).sqrt()
        end = (2 * kl).sqrt()
        third = variance_new / end - 2 * end + slope
        second = end - slope - third
        target = (2 * self.kl_bound) ** 0.5
        # Of the parabola through both ends, then by Newton's method on the cubic.
        s = 2 * target / (slope + (slope * slope + 4 * (end - slope) * target).sqrt())
        for _ in range(2):
            value = s * (slope + s * (second + s * third))
            s = s - (value - target) / (slope + s * (2 * second + s * 3 * third))
        s = torch.where((s > 0) & (s < 1), s, target / end)
        rise, bend = s * s * (3 - 2 * s), s * (1 - s)
        mean = mean_old + rise * (mean_new - mean_old) + bend * ((1 - s) * variance_old - s * variance_new)
        return s, mean

    def _new_at(self, rows: Rows) -> Tensor:
        return self.new[rows if self.rows is None else self.rows[rows]]

    @property
    def _strip(self) -> int:
        return max(1, min(len(self.old), _STRIP_ELEMENTS // self.old.shape[-1]))

    def _strips(self, count: int) -> Iterator[slice]:
        return (slice(start, start + self._strip) for start in range(0, count, self._strip))
