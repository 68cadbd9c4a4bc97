"""Projection of token distributions onto a KL ball around the old policy's.

The answer lies on the geodesic pi_s ∝ q^(1-s) p^s from the old distribution q to the new one p.
`geodesic.py` evaluates that curve, `solve.py` finds the step s on it; this file differentiates the
result in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection.backend import Backend, use_triton
from tether.projection.divergence import BLOCK_ELEMENTS, region_kl, where
from tether.projection.first_derivative import first_derivative
from tether.projection.geodesic import Geodesic
from tether.projection.solve import may_ask
from tether.settings import Region, TROLLSettings, check_choice, check_kl_bound


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
    converged: Tensor
    """Whether the region was inside the bound or the solver met it, bool: to a relative 1e-10 in float64,
    1e-3 in float32, whose sums resolve some 3e-7 nats, so that bounds below 1e-3 are met less closely. Where
    not, it ran out of steps or digits; the result is the last known to respect the bound."""


def project_categorical(
    log_probs: Tensor,
    old_log_probs: Tensor,
    kl_bound: float,
    *,
    region: Region = TROLLSettings.region,
    mask: Tensor | None = None,
    backend: Backend = "auto",
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

    `torch.func` (grad, vmap) does not go through it: give it batches, and take gradients with autograd.

    Args:
        log_probs: new log-probabilities, [..., V]; for sequences [..., T, V].
        old_log_probs: old log-probabilities, same shape.
        kl_bound: the bound in nats, positive; `math.inf` switches the projection off.
        region: "token" (one step a row) or "sequence" (one step for the rows of dimension -2).
        mask: which tokens count, [..., T]; only for sequences. Others are returned as they are.
        backend: "triton" for one kernel that solves a row in registers, "torch" for the plain path, "auto"
            for the kernel on a CUDA device where Triton is installed. It takes single tokens; a row of
            more than 4096 outcomes goes through the registers in chunks. The results differ by rounding
            alone.

    Raises:
        InvalidInputError: shapes differ, the bound is not positive, a row holds NaN or +inf or
            nothing but -inf, or the backend cannot run here. (On an accelerator the check of the
            values is an asynchronous device assertion, because waiting for it would stall the queue.)
        MissingDependencyError: backend="triton" without the package.

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
        if use_triton(backend, new, unfit=_unfit_for_kernel(region)):
            from tether.projection.categorical_triton import project_rows

            found = project_rows(new.squeeze(1), old.squeeze(1), float(kl_bound))
        else:
            found = _Project.apply(new, old, counted, float(kl_bound))
    projected_log_probs, step, kl, converged = found
    _check_values(kl)
    return CategoricalProjection(
        log_probs=projected_log_probs.reshape(log_probs.shape),
        step=step.reshape(region_shape),
        kl=kl.reshape(region_shape),
        projected=(kl > kl_bound).reshape(region_shape),
        converged=converged.reshape(region_shape),
    )


def _unfit_for_kernel(region: Region) -> str | None:
    """Why the kernel cannot do it, if it cannot."""
    return None if region == "token" else "the kernel projects single tokens, not sequences"


class _Project(torch.autograd.Function):
    """Rows are [G, R, V]: G regions of R tokens each, of which those `counted` [G, R] matter."""

    @staticmethod
    def forward(
        ctx: Any, new: Tensor, old: Tensor, counted: Tensor | None, kl_bound: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        weight = _token_weights(new, counted)
        kl = region_kl(new, old, weight, counted)
        active = kl > kl_bound
        step, converged = torch.ones_like(kl), torch.ones_like(active)
        output = new.clone()
        pieces = []
        for rows in _blocks_to_project(active, new[0].numel()):
            geodesic = Geodesic(new[rows], old[rows], weight[rows], _at(counted, rows), kl[rows], kl_bound)
            x, constrained, met = geodesic.solve()
            log_probs, probs, centred, variance = geodesic.at(x)
            moved = _moved(active[rows], _at(counted, rows))
            output[rows] = where(moved, log_probs, output[rows])
            step[rows] = torch.where(active[rows], x / geodesic.scale, step[rows])
            converged[rows] = met | ~active[rows]
            held = constrained & (variance > smallest_variance(kl_bound, new.dtype))
            pieces.append((rows, probs, centred, variance, step[rows], held, moved, geodesic.free))
        if ctx.needs_input_grad[0]:
            ctx.blocks = [piece[0] for piece in pieces]
            ctx.save_for_backward(*(tensor for piece in pieces for tensor in piece[1:]))
        ctx.mark_non_differentiable(step, kl, converged)
        return output, step, kl, converged

    @staticmethod
    @first_derivative
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
    held: Tensor,
    moved: Tensor | None,
    free: Tensor | None,
) -> Tensor:
    """Gradient with respect to the new log-probabilities of projected regions.

    dL/dz = s [g - pi sum(g) - (sum(g c) / sum(pi c^2)) pi c] with c = z - E[z]. The last term takes
    out the direction that would change the divergence, which the constraint holds fixed, in regions `held`
    by it; c is given up to a factor, the same for all tokens of a region.
    """
    # A projected probability of zero is constant: whatever arrives for it goes nowhere.
    pulled = where(free, upstream, 0.0)
    along = torch.where(held, (pulled * centred).sum((-1, -2)) / variance, 0.0)
    # The probability first: where it is zero, the other two may be as large as a float32 can be.
    drop = torch.mul(probs, centred).mul_(along[:, None, None])
    drop.addcmul_(probs, pulled.sum(-1, keepdim=True))
    inner = torch.sub(pulled, drop, out=drop).mul_(step[:, None, None])
    return where(moved, where(free, inner, 0.0), upstream)


def smallest_variance(kl_bound: float, dtype: torch.dtype) -> float:
    """Up to this variance of the centred tilt no direction changes the divergence, whatever the bound asks.

    The variance is what the divergence gains where the step grows by its own size, and at the bound it is
    near twice the bound. Below the bound's rounding all mass is on one outcome, and the others, however
    unlikely, would get a gradient without end.
    """
    numbers = torch.finfo(dtype)
    return max(numbers.tiny * 1e6, numbers.eps * kl_bound)


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
    return [_as_slice(block) for block in rows.split(max(1, BLOCK_ELEMENTS // region_size))]


def _as_slice(rows: Tensor) -> Tensor | slice:
    """Consecutive rows as a slice, which selects without copying."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == rows.numel() else rows


def _moved(active: Tensor, counted: Tensor | None) -> Tensor | None:
    """Which tokens of a block the projection moves, [G, R, 1]; None if all."""
    if counted is not None:
        return (counted & active[:, None])[..., None]
    return None if may_ask(active) else active[:, None, None]


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
    zeros = torch.zeros_like(ones)
    return CategoricalProjection(log_probs, ones, zeros, zeros.bool(), ones.bool())


def _check_arguments(new: Tensor, old: Tensor, kl_bound: float, region: str, mask: Tensor | None) -> None:
    check_kl_bound(kl_bound)
    if new.shape != old.shape:
        raise InvalidInputError(
            f"log_probs and old_log_probs must have the same shape, got {tuple(new.shape)} and "
            f"{tuple(old.shape)}. Both are [..., vocabulary]."
        )
    if not new.is_floating_point() or not old.is_floating_point():
        raise InvalidInputError(f"log-probabilities must be floating point, got {new.dtype} and {old.dtype}.")
    check_choice("region", region, get_args(Region))
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
