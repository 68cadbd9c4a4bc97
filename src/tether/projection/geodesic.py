"""The curve from the old token distribution to the new one, on which every projection lies."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tether.projection.divergence import log_partition, log_softmax, where
from tether.projection.solve import may_ask, solve_increasing

# Log-ratio that stands for "the new probability is exactly zero". The projection is then its limit
# as that probability goes to zero, which exists although the geodesic itself jumps there.
_VANISHING = -1e30

# Nats by which a distribution is tilted above which x E[u] - A(x) has lost too many digits to rounding.
_FAR = 4.0


class Geodesic:
    """The curve pi_x ∝ q exp(x u) with u the log-ratio scaled to range 1, so that x = s * scale.

    The scaling keeps variances finite for log-ratios of any size.
    """

    def __init__(
        self, new: Tensor, old: Tensor, weight: Tensor, counted: Tensor | None, kl: Tensor, kl_bound: float
    ) -> None:
        self.weight = weight
        self.counted = None if counted is None else counted[..., None]
        self.bound = new.new_full(new.shape[:1], kl_bound)
        self.kl_at_zero = torch.zeros_like(self.bound)
        self.kl_at_end = kl
        self.free: Tensor | None = None
        # What is not counted may hold anything, NaN included: blank it.
        new, old = where(self.counted, new, 0.0), where(self.counted, old, 0.0)
        self.old = log_softmax(old)
        ratio = log_softmax(new).sub_(self.old)
        ratio.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)  # zero in both: stays zero
        if not _surely_finite(ratio):
            ratio = self._treat_zeros(ratio)
        elif not _surely_finite(self.old):
            self.free = ~torch.isneginf(self.old)
        ratio.clamp_(_VANISHING, -_VANISHING)  # else the width could overflow
        old_probs = self.old.softmax(-1)
        ratio -= _centre(ratio, old_probs)
        width = where(self.counted, ratio.amax(-1, keepdim=True) - ratio.amin(-1, keepdim=True), 0.0)
        self.scale = width.amax((-1, -2)).clamp_min(torch.finfo(new.dtype).tiny * 1e6)
        self.ratio = ratio.div_(self.scale[:, None, None])
        self.variance_at_zero = (weight * old_probs.mul_(self.ratio).mul_(self.ratio).sum(-1)).sum(-1)

    def _treat_zeros(self, ratio: Tensor) -> Tensor:
        """Give the log-ratio a finite value at zeros, and leave out those that the curve leaves at once.

        Old zeros stay zero along the whole curve. Where the new probability is zero, the curve jumps at
        its start from q to q without those outcomes, at a divergence of -log(mass left). If that is
        within the bound, the answer has those zeros too and lies further on; if not, it lies inside
        the jump, and `_VANISHING` stands for the zeros.
        """
        old_zero, new_zero = torch.isneginf(self.old), torch.isneginf(ratio)
        self.free = ~(old_zero | new_zero)
        left = torch.where(self.free, self.old, -torch.inf).logsumexp(-1)
        jump = where(self.counted, (self.weight * -left)[..., None], 0.0).sum((-1, -2)).clamp_min(0)
        within = jump < self.bound
        self.kl_at_zero = torch.where(within, jump, 0.0)
        left_out = new_zero & within[:, None, None]
        self.old = torch.where(left_out, -torch.inf, self.old)
        # A row of which nothing would be left stays where it is.
        vanishing = new_zero & ~left_out & self.free.any(-1, keepdim=True)
        return torch.where(self.free, ratio, torch.where(vanishing, _VANISHING, 0.0))

    def _curve(self, x: Tensor) -> Tensor:
        """Unnormalised log pi_x."""
        return torch.addcmul(self.old, x[:, None, None], self.ratio)

    def at(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log pi_x, pi_x, the centred tilt x (u - E[u]) and its variance summed over the region's tokens.

        At the bound that variance is near twice the bound, whatever the log-ratio's range; of u alone it can
        be too small for a float32, where one outcome that is all but impossible sets the range.
        """
        curve = self._curve(x)
        largest, log_sum, probs = log_partition(curve)
        centred = self.ratio - (probs * self.ratio).sum(-1, keepdim=True)
        centred = where(self.counted, centred.mul_(x[:, None, None]), 0.0)
        variance = (probs * centred).mul_(centred).sum((-1, -2))
        return (
            curve.sub_(largest).sub_(log_sum),
            probs,
            centred,
            variance.clamp_min(torch.finfo(x.dtype).tiny),
        )

    def kl_and_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """KL(pi_x || q) in its region's mean, and its derivative x Var[u], both [G].

        x E[u] - A(x) is cheap and exact near the old policy. Far from it the two cancel; there the
        divergence is summed term by term, log pi - log q.
        """
        curve = self._curve(x)
        largest, log_sum, probs = log_partition(curve)
        mass = probs.sum(-1)  # 1 but for the rounding of a large vocabulary
        moment = probs * self.ratio
        mean = moment.sum(-1) / mass
        variance = moment.mul_(self.ratio).sum(-1) / mass - mean * mean
        tilt = x[:, None] * mean
        divergence = tilt - (largest + log_sum).squeeze(-1)
        far = tilt.abs() > _FAR
        if not may_ask(x) or bool(far.any()):
            # nan: -inf - -inf, at pi = 0
            terms = curve.sub_(largest).sub_(log_sum).sub_(self.old).nan_to_num_(0.0).mul_(probs)
            divergence = torch.where(far, terms.sum(-1) / mass, divergence)
        return (self.weight * divergence).sum(-1), x * (self.weight * variance).sum(-1).clamp_min(0)

    def solve(self) -> tuple[Tensor, Tensor, Tensor]:
        """x with KL = bound, where that (and not the end of the curve) determines it, and whether it was met
        (where it had to be), [G] each."""
        end = self.kl_at_end
        infinite = torch.isinf(end)  # an old zero: the curve ends without it
        if not may_ask(end) or bool(infinite.any()):
            end = torch.where(infinite, self.kl_and_slope(self.scale)[0], end)
        constrained = end > self.bound
        # KL(x) <= KL(0) + x^2 / 8 as the ratio has range 1 (Hoeffding): a bracket nobody must search.
        low = ((self.bound - self.kl_at_zero) * 8 * (1 - 1e-4)).sqrt()
        low = torch.minimum(low, self.scale)
        x, converged = solve_increasing(
            self._evaluate_if(constrained), self.bound, low, self.scale, self._first_guess(end)
        )
        return torch.where(constrained, x, self.scale), constrained, converged | ~constrained

    def _first_guess(self, end: Tensor) -> Tensor:
        """Where a x + b x^2, fitted to sqrt(2 KL) at both ends of the curve, meets the bound."""
        a = self.variance_at_zero.sqrt()
        b = ((2 * end).sqrt() / self.scale - a) / self.scale
        target = (2 * self.bound).sqrt()
        return 2 * target / (a + (a * a + 4 * b * target).sqrt())

    def _evaluate_if(self, constrained: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Rows without a root report that they have found it, so that no other row waits for them."""

        def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
            kl, slope = self.kl_and_slope(x)
            return torch.where(constrained, kl, self.bound), slope

        return evaluate


def _centre(ratio: Tensor, old_probs: Tensor) -> Tensor:
    """The constant to take from a row of log-ratios, [..., 1].

    It changes nothing but the rounding error, which is smallest with E[u] = 0 near the old policy. An
    outcome about to vanish must not dictate it, so its part is limited.
    """
    mean = (ratio * old_probs).sum(-1, keepdim=True)
    if may_ask(ratio) and bool((mean.abs() < 8).all()):
        return mean
    candidates = torch.where(ratio > _VANISHING / 2, old_probs, -1.0)
    at_mode = ratio.gather(-1, candidates.argmax(-1, keepdim=True))
    return at_mode + ((ratio - at_mode).clamp_(-8, 8) * old_probs).sum(-1, keepdim=True)


def _surely_finite(values: Tensor) -> bool:
    """False if a value is infinite, and on accelerators, which cannot be asked without stalling them."""
    return may_ask(values) and math.isfinite(float(values.sum()))
