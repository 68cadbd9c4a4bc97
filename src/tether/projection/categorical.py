"""Projection of token distributions onto a KL ball around the old policy's.

The answer lies on the geodesic pi_s ∝ q^(1-s) p^s from the old distribution q to the new one p.
`solve.py` finds the step s; this file evaluates the geodesic and differentiates the result in
closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.errors import InvalidInputError
from tether.projection.solve import solve_increasing

Region = Literal["token", "sequence"]

# Log-ratio that stands for "the new probability is exactly zero". The projection is then its limit
# as that probability goes to zero, which exists although the geodesic itself jumps there.
_VANISHING = -1e30

# Elements of a block that a CPU core's cache holds together with the temporaries of one evaluation.
_BLOCK_ELEMENTS = 1 << 16


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
    if log_probs.numel() == 0:
        return _nothing_to_project(log_probs, region)
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, old_log_probs.dtype), torch.float32)
    vocabulary = log_probs.shape[-1]
    tokens = log_probs.shape[-2] if region == "sequence" else 1
    region_shape = log_probs.shape[: -2 if region == "sequence" else -1]
    new = log_probs.to(dtype).reshape(-1, tokens, vocabulary)
    old = old_log_probs.detach().to(dtype).reshape(-1, tokens, vocabulary)
    weight = _token_weights(mask, new)
    with torch.autocast(new.device.type, enabled=False):
        projected_log_probs, step, kl = _Project.apply(new, old, weight, float(kl_bound))
    _check_values(kl)
    return CategoricalProjection(
        log_probs=projected_log_probs.reshape(log_probs.shape),
        step=step.reshape(region_shape),
        kl=kl.reshape(region_shape),
        projected=(kl > kl_bound).reshape(region_shape),
    )


class _Project(torch.autograd.Function):
    """Rows are [G, R, V]: G regions of R tokens each, weighted by [G, R] (zero: token left alone)."""

    @staticmethod
    def forward(
        ctx: Any, new: Tensor, old: Tensor, weight: Tensor, kl_bound: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        kl = _region_kl(new, old, weight)
        step = torch.ones_like(kl)
        output = new.clone()
        pieces = []
        for rows in _blocks_to_project(kl, kl_bound, new[0].numel()):
            geodesic = _Geodesic(new[rows], old[rows], weight[rows], kl_bound)
            x, constrained = geodesic.solve()
            active = (kl > kl_bound)[rows]
            moved = geodesic.counted & active[:, None, None]
            log_probs, probs, centred, variance = geodesic.at(x)
            output[rows] = torch.where(moved, log_probs, output[rows])
            step[rows] = torch.where(active, x / geodesic.scale, step[rows])
            pieces.append((rows, probs, centred, variance, step[rows], constrained, moved, geodesic.free))
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
    moved: Tensor,
    free: Tensor,
) -> Tensor:
    """Gradient with respect to the new log-probabilities of projected regions.

    dL/dz = s [g - pi sum(g) - (sum(g c) / sum(pi c^2)) pi c] with c = z - E[z]. The last term takes
    out the direction that would change the divergence, which the constraint holds fixed.
    """
    # A projected probability of zero is constant: whatever arrives for it goes nowhere.
    pulled = torch.where(free, upstream, 0.0)
    tangent = pulled - probs * pulled.sum(-1, keepdim=True)
    along = torch.where(constrained, (pulled * centred).sum((-1, -2)) / variance, 0.0)
    inner = step[:, None, None] * (tangent - along[:, None, None] * probs * centred)
    return torch.where(moved, torch.where(free, inner, 0.0), upstream)


class _Geodesic:
    """The curve pi_x ∝ q exp(x u) with u the log-ratio scaled to range 1, so that x = s * scale.

    The scaling keeps variances finite for log-ratios of any size.
    """

    def __init__(self, new: Tensor, old: Tensor, weight: Tensor, kl_bound: float) -> None:
        self.weight = weight
        self.counted = (weight > 0)[..., None]
        self.bound = new.new_full(new.shape[:1], kl_bound)
        support = ~torch.isneginf(old)  # old zeros leave the picture
        self.free = support & ~torch.isneginf(new)
        self.old = old - old.logsumexp(-1, keepdim=True)
        self.kl_at_zero = self._drop_new_zeros_within_reach()
        ratio = torch.where(self.free, new, -torch.inf)
        ratio = ratio - ratio.logsumexp(-1, keepdim=True) - self.old
        ratio = torch.where(self.free, ratio, _VANISHING)
        # A constant added to u changes nothing but the rounding error. Zero at the old mode, where
        # the mass of any pi_x near q is, keeps the terms of the divergence from cancelling.
        mode = torch.where(self.free, self.old, -torch.inf).argmax(-1, keepdim=True)
        on_curve = ~torch.isneginf(self.old) & self.free.any(-1, keepdim=True)
        ratio = torch.where(on_curve, ratio - ratio.gather(-1, mode), 0.0)
        width = torch.where(on_curve & self.counted, ratio, 0.0)
        width = (width.amax(-1) - width.amin(-1)).amax(-1)
        self.scale = width.clamp_min(torch.finfo(new.dtype).tiny * 1e6)
        self.ratio = ratio / self.scale[:, None, None]

    def _drop_new_zeros_within_reach(self) -> Tensor:
        """Leave new zeros out of the curve where it can reach them within the bound.

        The curve jumps at its start from q to q without the new zeros, at a divergence of
        -log(mass left). If that is within the bound, the answer has those zeros and lies further on;
        if not, it lies inside the jump, and `_VANISHING` stands for the zeros. Returns the
        divergence at the start of what is left of the curve, [G].
        """
        left = torch.where(self.free, self.old, -torch.inf).logsumexp(-1)
        jump = (self.weight * -left).sum(-1).clamp_min(0)
        jump = torch.where(jump.isfinite(), jump, torch.inf)  # nothing left, or 0 * inf
        within = jump < self.bound
        self.old = torch.where(self.free | ~within[:, None, None], self.old, -torch.inf)
        return torch.where(within, jump, 0.0)

    def _log_probs(self, x: Tensor) -> Tensor:
        unnormalised = torch.addcmul(self.old, x[:, None, None], self.ratio)
        return unnormalised.sub_(unnormalised.logsumexp(-1, keepdim=True))

    def at(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log pi_x, pi_x, the centred ratio and its variance summed over the region's tokens."""
        log_probs = self._log_probs(x)
        probs = log_probs.exp()
        centred = self.ratio - (probs * self.ratio).sum(-1, keepdim=True)
        centred = torch.where(self.counted, centred, 0.0)
        variance = (probs * centred * centred).sum((-1, -2))
        return log_probs, probs, centred, variance.clamp_min(torch.finfo(x.dtype).tiny)

    def kl_and_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """KL(pi_x || q) in its region's mean, and its derivative x Var[u], both [G].

        The divergence is summed term by term, log pi - log q, rather than as x E[u] - A(x): the
        rounding error of a large x u then cannot hide a large divergence.
        """
        log_probs = self._log_probs(x)
        probs = log_probs.exp()
        mean = (probs * self.ratio).sum(-1, keepdim=True)
        variance = (self.ratio - mean).square_().mul_(probs).sum(-1)
        terms = log_probs.sub_(self.old).nan_to_num_(0.0).mul_(probs)  # nan: -inf - -inf, at pi = 0
        return (self.weight * terms.sum(-1)).sum(-1), x * (self.weight * variance).sum(-1)

    def solve(self) -> tuple[Tensor, Tensor]:
        """x with KL = bound, and where that (and not the end of the curve) determines it, both [G]."""
        end, _ = self.kl_and_slope(self.scale)
        constrained = end > self.bound
        # KL(x) <= KL(0) + x^2 / 8 as the ratio has range 1 (Hoeffding): a bracket nobody must search.
        low = ((self.bound - self.kl_at_zero) * 8 * (1 - 1e-4)).sqrt()
        low = torch.minimum(low, self.scale)
        # The divergence is nearly quadratic in x, which makes this a good guess in all but extremes.
        start = self.scale * (self.bound / torch.where(constrained, end, self.bound)).sqrt()
        x = solve_increasing(self._evaluate_if(constrained), self.bound, low, self.scale, start)
        return torch.where(constrained, x, self.scale), constrained

    def _evaluate_if(self, constrained: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Rows without a root report that they have found it, so that no other row waits for them."""

        def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
            kl, slope = self.kl_and_slope(x)
            return torch.where(constrained, kl, self.bound), slope

        return evaluate


def kl_categorical(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(new || old) in nats of every row, [..., V] -> [...]; infinite where only the old has a zero.

    Rows are normalised on the way, so a constant added to a row changes nothing.

    Example:
        >>> import torch
        >>> new, old = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
        >>> round(kl_categorical(new, old).item(), 4)
        0.1438
    """
    log_new = log_probs - log_probs.logsumexp(-1, keepdim=True)
    log_old = old_log_probs - old_log_probs.logsumexp(-1, keepdim=True)
    probs = log_new.exp()
    # 0 log(0/q) = 0 even for q = 0; but a NaN that comes in must come out.
    terms = torch.where(probs == 0, 0.0, probs * (log_new - log_old))
    return terms.sum(-1).clamp_min(0)


def _blocks_to_project(kl: Tensor, kl_bound: float, region_size: int) -> list[Any]:
    """Which regions to work on, in blocks.

    A CPU picks the few regions outside the bound and takes them a cacheful at a time. An accelerator
    takes everything at once, because asking which regions need work would stall its queue.
    """
    if kl.device.type != "cpu":
        return [slice(None)]
    rows = (kl > kl_bound).nonzero().squeeze(-1)
    if rows.numel() == 0:
        return []
    return list(rows.split(max(1, _BLOCK_ELEMENTS // region_size)))


def _region_kl(new: Tensor, old: Tensor, weight: Tensor) -> Tensor:
    # A weightless token may hold anything, infinities included.
    return torch.where(weight > 0, weight * kl_categorical(new, old), 0.0).sum(-1)


def _token_weights(mask: Tensor | None, rows: Tensor) -> Tensor:
    if mask is None:
        return rows.new_full(rows.shape[:-1], 1 / rows.shape[-2])
    weight = mask.reshape(rows.shape[:-1]).to(rows.dtype)
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
    if new.dim() < (2 if region == "sequence" else 1) or (new.numel() and new.shape[-1] < 1):
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
    if kl.device.type != "cpu":
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
