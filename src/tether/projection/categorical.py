"""Projection of token distributions onto a KL ball around the old policy's.

The answer lies on the geodesic pi_s ∝ q^(1-s) p^s from the old distribution q to the new one p.
`solve.py` finds the step s; this file evaluates the geodesic and differentiates the result in
closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.errors import InvalidInputError
from tether.projection.solve import may_ask, solve_increasing

Region = Literal["token", "sequence"]

# Log-ratio that stands for "the new probability is exactly zero". The projection is then its limit
# as that probability goes to zero, which exists although the geodesic itself jumps there.
_VANISHING = -1e30

# Nats by which a distribution is tilted above which x E[u] - A(x) has lost too many digits to rounding.
_FAR = 4.0

# Elements of a block that a CPU core's cache holds together with the temporaries of one evaluation.
_BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class CategoricalProjection:
    """What `project_categorical` returns."""

    log_probs: Tensor
    """Projected log-probabilities, shape of the input."""
    step: Tensor
    """Step s in [0, 1] along the geodesic, a value a region: 1 where nothing had to be done."""
    kl: Tensor
    """KL(new || old) in nats before the projection, a value a region (sequence: mean over tokens)."""
    projected: Tensor
    """Where the bound was exceeded and the projection acted, bool, a value a region."""


def project_categorical(
    log_probs: Tensor,
    old_log_probs: Tensor,
    kl_bound: float,
    *,
    region: Region = "token",
    mask: Tensor | None = None,
) -> CategoricalProjection:
    """Solve argmin_π KL(π ‖ p) subject to KL(π ‖ q) <= kl_bound, exactly and differentiably.

    p is the new distribution (`log_probs`), q the old one. Inside the bound the result is p itself,
    to the bit, with the identity's gradient. Outside, it is π_s ∝ q^(1-s) p^s with the s for which
    the bound holds with equality, and the gradient with respect to p is that of the exact solution
    (implicit differentiation; nothing is unrolled). q is data: it receives no gradient.

    With ``region="sequence"`` all tokens of a sequence share one step s, chosen so that the mean of
    their divergences meets the bound; a few tokens may then move far if the others stay.

    The arithmetic is float32 for half-precision inputs (and the result is float32, which holds every
    half-precision value exactly), otherwise in the inputs' precision. A constant added to a row of
    either input changes neither the divergence nor the projection, so rounding errors in the
    normalisation of half-precision log-probabilities do no harm.

    Zeros (-inf): where the old probability is zero and the new one is not, no bound can hold; the
    projected probability is zero there. Where the new probability is zero, the projection is the
    limit of ever smaller new probabilities.

    Args:
        log_probs: new log-probabilities, [..., V]; for sequences [..., T, V].
        old_log_probs: old log-probabilities, same shape.
        kl_bound: the bound in nats, positive; `math.inf` switches the projection off.
        region: "token" (one step a row) or "sequence" (one step for the rows of dimension -2).
        mask: which tokens count, [..., T]; only for sequences. Others are returned as they are.

    Raises:
        InvalidInputError: shapes differ, the bound is not positive, a row holds NaN or +inf or
            nothing but -inf. (On an accelerator the check of the values is an asynchronous device
            assertion, because waiting for it would stall the queue.)

    Source: TROLL (arXiv 2510.03817, section 3); trust region layers (arXiv 2101.09207).

    Example:
        >>> import torch
        >>> old = torch.tensor([0.7, 0.2, 0.1]).log()
        >>> new = torch.tensor([0.1, 0.2, 0.7]).log().requires_grad_()
        >>> result = project_categorical(new, old, kl_bound=0.05)
        >>> kl = (result.log_probs.exp() * (result.log_probs - old)).sum()
        >>> bool(result.projected), round(kl.item(), 4), round(result.kl.item(), 4)
        (True, 0.05, 1.1675)
    """
    _check_arguments(log_probs, old_log_probs, kl_bound, region, mask)
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, old_log_probs.dtype), torch.float32)
    if log_probs.numel() == 0:
        return _nothing_to_project(log_probs.to(dtype), region)
    vocabulary = log_probs.shape[-1]
    tokens = log_probs.shape[-2] if region == "sequence" else 1
    region_shape = log_probs.shape[: -2 if region == "sequence" else -1]
    new = log_probs.to(dtype).reshape(-1, tokens, vocabulary)
    old = old_log_probs.detach().to(dtype).reshape(-1, tokens, vocabulary)
    counted = None if mask is None else (mask != 0).reshape(-1, tokens)
    with torch.autocast(new.device.type, enabled=False):
        projected_log_probs, step, kl = _Project.apply(new, old, counted, float(kl_bound))
    _check_values(kl)
    return CategoricalProjection(
        log_probs=projected_log_probs.reshape(log_probs.shape),
        step=step.reshape(region_shape),
        kl=kl.reshape(region_shape),
        projected=(kl > kl_bound).reshape(region_shape),
    )


class _Project(torch.autograd.Function):
    """Rows are [G, R, V]: G regions of R tokens each, of which those `counted` [G, R] matter."""

    @staticmethod
    def forward(
        ctx: Any, new: Tensor, old: Tensor, counted: Tensor | None, kl_bound: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        weight = _token_weights(new, counted)
        kl = _region_kl(new, old, weight, counted)
        active = kl > kl_bound
        step = torch.ones_like(kl)
        output = new.clone()
        pieces = []
        for rows in _blocks_to_project(active, new[0].numel()):
            geodesic = _Geodesic(new[rows], old[rows], weight[rows], _at(counted, rows), kl[rows], kl_bound)
            x, constrained = geodesic.solve()
            log_probs, probs, centred, variance = geodesic.at(x)
            moved = _moved(active[rows], _at(counted, rows))
            output[rows] = _where(moved, log_probs, output[rows])
            step[rows] = torch.where(active[rows], x / geodesic.scale, step[rows])
            pieces.append((rows, probs, centred, variance, step[rows], constrained, moved, geodesic.free))
        if ctx.needs_input_grad[0]:
            ctx.blocks = [piece[0] for piece in pieces]
            ctx.save_for_backward(*(tensor for piece in pieces for tensor in piece[1:]))
        ctx.mark_non_differentiable(step, kl)
        return output, step, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None]:
        if grad is None or not ctx.blocks:
            return grad, None, None, None
        grad_in = grad.clone()
        saved = ctx.saved_tensors
        size = len(saved) // len(ctx.blocks)
        for index, rows in enumerate(ctx.blocks):
            grad_in[rows] = _implicit_gradient(grad[rows], *saved[index * size : (index + 1) * size])
        return grad_in, None, None, None


def _implicit_gradient(
    upstream: Tensor,
    probs: Tensor,
    centred: Tensor,
    variance: Tensor,
    step: Tensor,
    constrained: Tensor,
    moved: Tensor | None,
    free: Tensor | None,
) -> Tensor:
    """Gradient with respect to the new log-probabilities of projected regions.

    dL/dz = s [g - pi sum(g) - (sum(g c) / sum(pi c^2)) pi c] with c = z - E[z]. The last term takes
    out the direction that would change the divergence, which the constraint holds fixed.
    """
    # A projected probability of zero is constant: whatever arrives for it goes nowhere.
    pulled = _where(free, upstream, 0.0)
    # No variance: all mass on one outcome, and no direction that would change the divergence.
    constrained = constrained & (variance > torch.finfo(variance.dtype).tiny * 1e6)
    along = torch.where(constrained, (pulled * centred).sum((-1, -2)) / variance, 0.0)
    drop = torch.addcmul(pulled.sum(-1, keepdim=True), along[:, None, None], centred).mul_(probs)
    inner = torch.sub(pulled, drop, out=drop).mul_(step[:, None, None])
    return _where(moved, _where(free, inner, 0.0), upstream)


class _Geodesic:
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
        new, old = _where(self.counted, new, 0.0), _where(self.counted, old, 0.0)
        self.old = _log_softmax(old)
        ratio = _log_softmax(new).sub_(self.old)
        ratio.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)  # zero in both: stays zero
        if not _surely_finite(ratio):
            ratio = self._treat_zeros(ratio)
        elif not _surely_finite(self.old):
            self.free = ~torch.isneginf(self.old)
        ratio.clamp_(_VANISHING, -_VANISHING)  # else the width could overflow
        old_probs = self.old.softmax(-1)
        ratio -= _centre(ratio, old_probs)
        width = _where(self.counted, ratio.amax(-1, keepdim=True) - ratio.amin(-1, keepdim=True), 0.0)
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
        jump = _where(self.counted, (self.weight * -left)[..., None], 0.0).sum((-1, -2)).clamp_min(0)
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
        """log pi_x, pi_x, the centred ratio and its variance summed over the region's tokens."""
        curve = self._curve(x)
        largest, log_sum, probs = _log_partition(curve)
        centred = self.ratio - (probs * self.ratio).sum(-1, keepdim=True)
        centred = _where(self.counted, centred, 0.0)
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
        largest, log_sum, probs = _log_partition(curve)
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

    def solve(self) -> tuple[Tensor, Tensor]:
        """x with KL = bound, and where that (and not the end of the curve) determines it, both [G]."""
        end = self.kl_at_end
        infinite = torch.isinf(end)  # an old zero: the curve ends without it
        if not may_ask(end) or bool(infinite.any()):
            end = torch.where(infinite, self.kl_and_slope(self.scale)[0], end)
        constrained = end > self.bound
        # KL(x) <= KL(0) + x^2 / 8 as the ratio has range 1 (Hoeffding): a bracket nobody must search.
        low = ((self.bound - self.kl_at_zero) * 8 * (1 - 1e-4)).sqrt()
        low = torch.minimum(low, self.scale)
        x = solve_increasing(
            self._evaluate_if(constrained), self.bound, low, self.scale, self._first_guess(end)
        )
        return torch.where(constrained, x, self.scale), constrained

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


def kl_categorical(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(new || old) in nats of every row, [..., V] -> [...]; infinite where only the old has a zero.

    Rows are normalised on the way, so a constant added to a row changes nothing. A probability too
    small for the precision counts as zero. float32 at least; differentiable.

    Example:
        >>> import torch
        >>> new, old = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
        >>> round(kl_categorical(new, old).item(), 4)
        0.1438
    """
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, old_log_probs.dtype), torch.float32)
    log_new, log_old = _normalised(log_probs.to(dtype)), _normalised(old_log_probs.to(dtype))
    # 0 log(0/q) = 0 even for q = 0. The inner where keeps the gradient from seeing -inf.
    zero = log_new.exp() == 0
    terms = torch.where(zero, 0.0, log_new).exp() * torch.where(zero, 0.0, log_new - log_old)
    # A NaN anywhere makes a whole row NaN, and must come out.
    return terms.sum(-1).clamp_min(0)


def _normalised(logits: Tensor) -> Tensor:
    """log_softmax, whose own sum over 10^5 outcomes is off by up to 1e-4 in float32."""
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    return shifted - shifted.logsumexp(-1, keepdim=True)


def _rows_kl(new: Tensor, old: Tensor) -> Tensor:
    """What `kl_categorical` returns, [N, V] -> [N], in a fraction of its time and without a gradient."""
    largest_new, log_sum_new, probs = _log_partition(new)
    largest_old, log_sum_old, _ = _log_partition(old)
    mass = probs.sum(-1)
    offset = log_sum_new - log_sum_old
    terms = (new - largest_new).sub_(old - largest_old).sub_(offset).mul_(probs)
    terms.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)  # 0 times infinity
    kl = terms.sum(-1).clamp_min_(0) / mass
    return torch.where(offset.squeeze(-1).isfinite(), kl, torch.nan)


def _log_partition(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What to take from logits to normalise them, in two parts, and the probabilities.

    ``logits.logsumexp(-1, keepdim=True)`` is the sum of the two parts, the largest logit and the log
    of the sum relative to it; apart, they keep their digits. softmax is one fused pass, faster than exp
    alone, and its largest entry is 1 / sum(exp). It adds up naively, which its own sum corrects.
    """
    probs = logits.softmax(-1)
    largest_prob = probs.amax(-1, keepdim=True) / probs.sum(-1, keepdim=True)
    return logits.amax(-1, keepdim=True), -largest_prob.log(), probs


def _log_softmax(logits: Tensor) -> Tensor:
    largest, log_sum, _ = _log_partition(logits)
    return (logits - largest).sub_(log_sum)


def _region_kl(new: Tensor, old: Tensor, weight: Tensor, counted: Tensor | None) -> Tensor:
    new, old = new.flatten(0, 1), old.flatten(0, 1)
    size = max(1, _BLOCK_ELEMENTS // new.shape[-1]) if may_ask(new) else new.shape[0]
    blocks = zip(new.split(size), old.split(size), strict=True)
    kl = torch.cat([_rows_kl(*block) for block in blocks]).view_as(weight)
    return (weight * _where(counted, kl, 0.0)).sum(-1)  # what is not counted may be NaN


def _blocks_to_project(active: Tensor, region_size: int) -> list[Any]:
    """Which regions to work on, in blocks.

    A CPU picks the regions outside the bound and takes them a cacheful at a time. An accelerator
    takes everything at once, because asking which regions need work would stall its queue.
    """
    if not may_ask(active):
        return [slice(None)]
    rows = active.nonzero().squeeze(-1)
    if rows.numel() == 0:
        return []
    return [_as_slice(block) for block in rows.split(max(1, _BLOCK_ELEMENTS // region_size))]


def _as_slice(rows: Tensor) -> Tensor | slice:
    """Consecutive rows as a slice, which selects without copying."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == rows.numel() else rows


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


def _moved(active: Tensor, counted: Tensor | None) -> Tensor | None:
    """Which tokens of a block the projection moves, [G, R, 1]; None if all."""
    if counted is not None:
        return (counted & active[:, None])[..., None]
    return None if may_ask(active) else active[:, None, None]


def _where(condition: Tensor | None, values: Tensor, other: Tensor | float) -> Tensor:
    """torch.where in which no condition is one that always holds."""
    return values if condition is None else torch.where(condition, values, other)


def _at(tensor: Tensor | None, rows: Any) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def _token_weights(rows: Tensor, counted: Tensor | None) -> Tensor:
    """Each token's part in its region's mean, [G, R]."""
    if counted is None:
        return rows.new_full(rows.shape[:-1], 1 / rows.shape[-2])
    weight = counted.to(rows.dtype)
    return weight / weight.sum(-1, keepdim=True).clamp_min(1)


def _nothing_to_project(log_probs: Tensor, region: Region) -> CategoricalProjection:
    shape = log_probs.shape[: -2 if region == "sequence" else -1]
    ones = log_probs.new_ones(shape)
    return CategoricalProjection(log_probs, ones, torch.zeros_like(ones), torch.zeros_like(ones).bool())


def check_kl_bound(kl_bound: float) -> None:
    """Refuse a bound that is not a positive number (infinity is one)."""
    if not (isinstance(kl_bound, (int, float)) and kl_bound > 0):
        raise InvalidInputError(
            f"kl_bound must be a positive number of nats, got {kl_bound!r}. "
            "Typical values are 0.01 to 0.25; math.inf switches the projection off."
        )


def _check_arguments(new: Tensor, old: Tensor, kl_bound: float, region: str, mask: Tensor | None) -> None:
    check_kl_bound(kl_bound)
    if new.shape != old.shape:
        raise InvalidInputError(
            f"log_probs and old_log_probs must have the same shape, got {tuple(new.shape)} and "
            f"{tuple(old.shape)}. Both are [..., vocabulary]."
        )
    if not new.is_floating_point() or not old.is_floating_point():
        raise InvalidInputError(f"log-probabilities must be floating point, got {new.dtype} and {old.dtype}.")
    if region not in ("token", "sequence"):
        raise InvalidInputError(f'region must be "token" or "sequence", got {region!r}.')
    if new.dim() < (2 if region == "sequence" else 1) or (new.shape[-1] == 0 and new.shape[:-1].numel()):
        wanted = "[..., tokens, vocabulary]" if region == "sequence" else "[..., vocabulary]"
        raise InvalidInputError(
            f'region="{region}" needs log-probabilities {wanted}, got {tuple(new.shape)}.'
        )
    if mask is not None and region == "token":
        raise InvalidInputError(
            'mask only has a meaning with region="sequence": with one step a token, '
            "select the tokens that count from the result."
        )
    if mask is not None and mask.shape != new.shape[:-1]:
        raise InvalidInputError(
            f"mask must have the shape of log_probs without its last dimension, {tuple(new.shape[:-1])}, "
            f"got {tuple(mask.shape)}."
        )


def _check_values(kl: Tensor) -> None:
    """A NaN, +inf or empty row anywhere makes its divergence NaN; say so."""
    invalid = kl.isnan()
    if not may_ask(kl):
        torch._assert_async(
            ~invalid.any(), "project_categorical: log-probabilities hold NaN, +inf or an empty row"
        )
    elif bool(invalid.any()):
        first = int(invalid.nonzero()[0, 0])
        raise InvalidInputError(
            f"log-probabilities hold NaN, +inf or a row of nothing but -inf ({int(invalid.sum())} of "
            f"{kl.numel()} regions, the first at flat index {first}). Look for overflow in the logits or "
            "a mask that removed every token."
        )
