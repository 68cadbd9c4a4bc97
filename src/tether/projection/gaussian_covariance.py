"""Moves a covariance to the border of its trust region, and differentiates where it ends up.

The Kullback-Leibler projection is `_ProjectFactorKL`, which needs no eigenvalues: a Cholesky
factorisation tells divergence and slope of a step. `_ProjectFactorByCurve` does the same for any curve
of `gaussian_curves.py` in the eigenbasis; it is the only way for Wasserstein-2, and the plain reference
for the other.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from tether.projection.first_derivative import first_derivative
from tether.projection.gaussian_curves import (
    CovarianceCurve,
    KullbackLeiblerCurve,
    WassersteinCurve,
    kl_of_scales,
)
from tether.projection.solve import solve_increasing

# Elements of a block that a CPU core's cache holds together with the temporaries of one evaluation.
_BLOCK_ELEMENTS = 1 << 17

CONVERGED = 1e-9
"""How far a converged projection's divergence may be from its bound, relative to the bound."""

# The solver aims closer than that.
_TOLERANCE = CONVERGED / 10

GaussianMethod = Literal["kl", "wasserstein", "frobenius"]


def project_factor(
    factor: Tensor, old: Tensor, bound: float, method: GaussianMethod
) -> tuple[Tensor, Tensor, Tensor]:
    """Projected Cholesky factors [N, W, W], the divergences before, [N] in float64, and what converged."""
    if method == "frobenius":
        return _project_frobenius(factor, old, bound)
    if method == "wasserstein":
        return _ProjectFactorByCurve.apply(factor, old, WassersteinCurve(), float(bound))
    return _ProjectFactorKL.apply(factor, old, float(bound))


def project_scale(
    scale: Tensor, old: Tensor, bound: float, method: GaussianMethod
) -> tuple[Tensor, Tensor, Tensor]:
    """Projected standard deviations [N, W], the divergences before, [N] in float64, and what converged."""
    if method == "frobenius":
        return _project_frobenius_diagonal(scale, old, bound)
    curve = WassersteinCurve() if method == "wasserstein" else KullbackLeiblerCurve()
    return _ProjectScale.apply(scale, old, curve, float(bound))


class _ProjectFactorKL(torch.autograd.Function):
    """Cholesky factor [N, W, W] in and out; also the divergence before, [N] in float64, and what converged.

    Where the old covariance is the identity, the new one is R Rᵀ with R = L_o⁻¹ L, its precision K, and the
    geodesic is S⁻¹ = A = (1-s) I + s K. With A = U Uᵀ, U upper triangular, C = U⁻ᵀ is the Cholesky
    factor of S, whose divergence is a sum without cancellation; its slope is ‖S - I‖² / (2 s). The
    projected factor is L_o C: a product of lower triangular matrices, the second close to the identity.

    Backward: let H be the gradient by S in the coordinates of C, so that a change dS changes the loss by
    <H, C⁻¹ dS C⁻ᵀ>. The constraint removes its component along E = Cᵀ C - I, the direction in which the
    divergence grows; what is left of H reaches the new precision as -s C H Cᵀ.
    """

    @staticmethod
    def forward(ctx: Any, factor: Tensor, old: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        output, divergence = factor.clone(), factor.new_empty(factor.shape[0], dtype=torch.float64)
        converged = torch.ones_like(divergence, dtype=torch.bool)
        saved: list[Tensor] = []
        for block in _blocks(factor):
            old_block, new = old[block].double(), factor[block].double()
            ratio = torch.linalg.solve_triangular(old_block, new, upper=False)
            divergence[block] = _kl_of_triangle(ratio)
            active = (divergence[block] > bound).nonzero().squeeze(-1)
            if active.numel() == 0:
                continue
            rows = active + block.start
            if active.numel() < new.shape[0]:
                old_block, new, ratio = old_block[active], new[active], ratio[active]
            step, root, reached = _step_on_geodesic(torch.cholesky_inverse(ratio), divergence[rows], bound)
            output[rows] = (old_block @ root).to(output.dtype)
            converged[rows] = _meets(reached, bound)
            saved += [rows, new, old_block, ratio, step, root]
        ctx.mark_non_differentiable(divergence, converged)
        ctx.save_for_backward(*saved)
        return output, divergence, converged

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None]:
        saved = ctx.saved_tensors
        if grad is None or not saved:
            return grad, None, None
        grad_in = grad.clone()
        for first in range(0, len(saved), 6):
            rows, new, old, ratio, step, root = saved[first : first + 6]
            inner = _half_symmetric(root.mT @ (old.mT @ grad[rows].double()))
            excess = _minus_identity(root.mT @ root)
            along = _inner_product(inner, excess) / _squared_norm(excess)
            inner -= along[:, None, None] * excess
            half = torch.linalg.solve_triangular(ratio, root, upper=False)
            by_precision = half @ inner @ half.mT
            grad_new = torch.linalg.solve_triangular(new.mT, by_precision, upper=True)
            grad_in[rows] = (grad_new.tril_() * (2 * step)[:, None, None]).to(grad.dtype)
        return grad_in, None, None


def _blocks(factor: Tensor) -> list[slice]:
    """Rows that are worked on together: a cacheful on a CPU, everything on an accelerator."""
    rows, size = factor.shape[0], factor.shape[-1]
    block = max(1, _BLOCK_ELEMENTS // size**2) if factor.device.type == "cpu" else rows
    return [slice(start, min(start + block, rows)) for start in range(0, rows, block)]


def _meets(reached: Tensor, bound: float, tolerance: float = CONVERGED) -> Tensor:
    """Whether divergences are the bound, up to a relative tolerance."""
    return (reached / bound - 1).abs() <= tolerance


def _step_on_geodesic(precision: Tensor, divergence: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """The step [N] that meets the bound from whitened precisions K [N, W, W]; C = chol(S) and its divergence.

    Args:
        precision: K.
        divergence: at the end of the geodesic, s = 1, above the bound.
        bound: in nats.
    """
    change = _minus_identity(precision)
    # Reversing rows and columns turns the lower Cholesky factor into the upper one.
    reversed_change = change.flip((-1, -2))
    identity = torch.eye(change.shape[-1], dtype=change.dtype, device=change.device).expand_as(change)

    def inverse_at(s: Tensor) -> Tensor:
        mixed = s[:, None, None] * reversed_change
        mixed.diagonal(dim1=-2, dim2=-1).add_(1.0)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(mixed), identity, upper=False)

    def divergence_and_slope(s: Tensor) -> tuple[Tensor, Tensor]:
        inverse = inverse_at(s)
        excess = _minus_identity(inverse @ inverse.mT)  # of the spectrum of S - I
        return _kl_of_triangle(inverse), _squared_norm(excess) / (2 * s)

    low, guess = _bracket_and_guess(change, divergence, bound)
    # One Newton step (of the solver's kind) from the guess does for the bounds in use ...
    value, slope = divergence_and_slope(guess)
    step = guess - 2 * (value - (value * bound).sqrt()) / slope
    step = torch.where((step > low) & (step < 1), step, guess)
    inverse = inverse_at(step)
    reached = _kl_of_triangle(inverse)
    if bool(_meets(reached, bound, _TOLERANCE).all()):
        return step, inverse.flip((-1, -2)).mT, reached
    # ... and not for a policy that ran far away.
    target, end = torch.full_like(step, bound), torch.ones_like(step)
    step = solve_increasing(divergence_and_slope, target, low, end, step, tolerance=_TOLERANCE).x
    inverse = inverse_at(step)
    return step, inverse.flip((-1, -2)).mT, _kl_of_triangle(inverse)


def _bracket_and_guess(change: Tensor, divergence: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """A step [N] certainly inside the bound, and a guess of the one on it.

    The guess solves the divergence's series s²/4 tr D² - s³/3 tr D³ + 3/8 s⁴ tr D⁴ with D = K - I, in
    which a projection onto a usual bound leaves an error of about 1e-6.
    """
    squared = change @ change
    second = _squared_norm(change)
    third = 4 / 3 * _inner_product(squared, change) / second
    fourth = 3 / 2 * _squared_norm(squared) / second
    guess = first_guess = 2 * (bound / second).sqrt()
    for _ in range(3):  # the root is real: (tr D³)² <= tr D² tr D⁴
        guess = first_guess * (1 - guess * (third - guess * fourth)).rsqrt()
    # dKL/ds <= s/2 (‖K - I‖² + ‖M - I‖²), where the last counts eigenvalues lam > 1 of M = K⁻¹ alone; and
    # lam - 1 <= 2 (lam - 1 - ln lam) + 2 ln 2 - 1, summed, bounds that by the divergence.
    growth = 4 * divergence + (2 * math.log(2) - 1) * change.shape[-1]
    low = 2 * (bound / (second + growth.square())).sqrt() * (1 - 1e-6)
    return low.clamp_max(0.5), torch.where(guess < 1, guess, (bound / divergence).sqrt())


def _minus_identity(matrix: Tensor) -> Tensor:
    """matrix - I, in place."""
    matrix.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return matrix


def _half_symmetric(matrix: Tensor) -> Tensor:
    """Half of the lower triangle of `matrix` on either side of the diagonal, and half the diagonal."""
    below = matrix.tril(-1)
    half = below + below.mT
    half.diagonal(dim1=-2, dim2=-1).copy_(matrix.diagonal(dim1=-2, dim2=-1))
    return half.mul_(0.5)


class _ProjectFactorByCurve(torch.autograd.Function):
    """Cholesky factor [N, W, W] in and out; also the divergence before, [N] in float64, and what converged.

    With R = L_o⁻¹ L, R Rᵀ = U diag(lam) Uᵀ and S = U diag(v(lam, s)) Uᵀ, the projected factor is
    L_o chol(S): a product of lower triangular matrices, whose second one is close to the identity and so
    loses no digits to the conditioning of the covariances.
    """

    @staticmethod
    def forward(
        ctx: Any, factor: Tensor, old: Tensor, curve: CovarianceCurve, bound: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        old = old.double()
        ratio = torch.linalg.solve_triangular(old, factor.double(), upper=False)
        if isinstance(curve, KullbackLeiblerCurve):  # needs no eigenvalues, so only few rows need them
            divergence = kl_of_whitened_factor(ratio)
        else:
            divergence = curve.divergence(torch.linalg.svdvals(ratio).square())
        rows = (divergence > bound).nonzero().squeeze(-1)
        output = factor.clone()
        converged = torch.ones_like(divergence, dtype=torch.bool)
        ctx.curve, ctx.rows = curve, rows
        ctx.mark_non_differentiable(divergence, converged)
        if rows.numel() == 0:
            return output, divergence, converged
        ratio, old = ratio[rows], old[rows]
        lam, basis = _eigen(ratio)
        step = curve.step(lam, torch.full_like(lam[:, 0], bound))
        ratios = curve.ratios(lam, step)
        inner = (basis * ratios[:, None, :]) @ basis.mT
        root = torch.linalg.cholesky(inner)
        output[rows] = (old @ root).to(output.dtype)
        converged[rows] = _meets(curve.divergence(ratios), bound)
        ctx.save_for_backward(ratio, old, lam, basis, step, root)
        return output, divergence, converged

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None]:
        if grad is None or ctx.rows.numel() == 0:
            return grad, None, None, None
        ratio, old, lam, basis, step, root = ctx.saved_tensors
        curve: CovarianceCurve = ctx.curve
        grad_root = (old.mT @ grad[ctx.rows].double()).tril()
        upstream = basis.mT @ _cholesky_gradient(root, grad_root) @ basis
        # dL/dM in the eigenbasis: the move at a fixed step, and what the lam do to the step.
        inner = upstream * curve.quotient(lam[:, :, None], lam[:, None, :], step)
        along = (upstream.diagonal(dim1=-2, dim2=-1) * curve.slope(lam, step)).sum(-1, keepdim=True)
        inner = inner + torch.diag_embed(along * curve.step_gradient(lam, step))
        grad_ratio = 2 * (basis @ inner @ basis.mT) @ ratio
        grad_factor = torch.linalg.solve_triangular(old.mT, grad_ratio, upper=True)
        grad_in = grad.clone()
        grad_in[ctx.rows] = grad_factor.tril().to(grad.dtype)
        return grad_in, None, None, None


class _ProjectScale(torch.autograd.Function):
    """`_ProjectFactorByCurve` for diagonal covariances: standard deviations [N, W] in and out."""

    @staticmethod
    def forward(
        ctx: Any, scale: Tensor, old: Tensor, curve: CovarianceCurve, bound: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        old = old.double()
        ratio = scale.double() / old
        divergence = curve.divergence(ratio.square())
        rows = (divergence > bound).nonzero().squeeze(-1)
        output = scale.clone()
        converged = torch.ones_like(divergence, dtype=torch.bool)
        ctx.curve, ctx.rows = curve, rows
        ctx.mark_non_differentiable(divergence, converged)
        if rows.numel() == 0:
            return output, divergence, converged
        ratio, old = ratio[rows], old[rows]
        lam = ratio.square()
        step = curve.step(lam, torch.full_like(lam[:, 0], bound))
        ratios = curve.ratios(lam, step)
        root = ratios.sqrt()
        output[rows] = (old * root).to(output.dtype)
        converged[rows] = _meets(curve.divergence(ratios), bound)
        ctx.save_for_backward(ratio, old, step, root)
        return output, divergence, converged

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None]:
        if grad is None or ctx.rows.numel() == 0:
            return grad, None, None, None
        ratio, old, step, root = ctx.saved_tensors
        curve: CovarianceCurve = ctx.curve
        lam = ratio.square()
        upstream = grad[ctx.rows].double() * old / (2 * root)  # with respect to v
        along = (upstream * curve.slope(lam, step)).sum(-1, keepdim=True)
        inner = upstream * curve.quotient(lam, lam, step) + along * curve.step_gradient(lam, step)
        grad_in = grad.clone()
        grad_in[ctx.rows] = (inner * 2 * ratio / old).to(grad.dtype)
        return grad_in, None, None, None


def _eigen(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [N, W] and eigenvectors of ratio ratioᵀ, kept positive where rounding would not."""
    lam, basis = torch.linalg.eigh(ratio @ ratio.mT)
    return torch.maximum(lam, lam[:, -1:] * torch.finfo(lam.dtype).eps), basis


def _cholesky_gradient(root: Tensor, grad_root: Tensor) -> Tensor:
    """Gradient with respect to the symmetric matrix whose Cholesky factor `root` has `grad_root`."""
    inner = (root.mT @ grad_root).tril()
    inner = inner - 0.5 * torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    half = torch.linalg.solve_triangular(root.mT, inner, upper=True)
    grad = torch.linalg.solve_triangular(root, half, upper=False, left=False)
    return 0.5 * (grad + grad.mT)


def _project_frobenius(factor: Tensor, old: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """Interpolated covariances; the distance grows with the square of the step: nothing to solve."""
    old_cov = old.double() @ old.double().mT
    change = factor.double() @ factor.double().mT - old_cov
    distance = change.square().sum((-1, -2))
    active = distance > bound
    step = torch.where(active, bound / torch.where(active, distance, 1.0), 0.0).sqrt()[:, None, None]
    # Rows inside the bound are not factored: their covariance may be singular to rounding.
    identity = torch.eye(factor.shape[-1], dtype=old_cov.dtype, device=factor.device)
    moved = torch.where(active[:, None, None], old_cov + step * change, identity)
    # Nor are those of which rounding has left no covariance; they keep the old one.
    failed = torch.linalg.cholesky_ex(moved.detach()).info != 0
    root = torch.linalg.cholesky_ex(torch.where(failed[:, None, None], identity, moved)).L
    reached = (root @ root.mT - old_cov).detach().square().sum((-1, -2))
    projected = torch.where(failed[:, None, None], old.double(), root).to(factor.dtype)
    output = torch.where(active[:, None, None], projected, factor)
    return output, distance.detach(), ~active | ~failed & _meets(reached, bound)


def _project_frobenius_diagonal(scale: Tensor, old: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    old_variance = old.double().square()
    change = scale.double().square() - old_variance
    distance = change.square().sum(-1)
    active = distance > bound
    step = (bound / torch.where(active, distance, 1.0)).sqrt()
    step = torch.where(active, step, 0.0)[:, None]
    projected = (old_variance + step * change).sqrt()
    output = torch.where(active[:, None], projected.to(scale.dtype), scale)
    reached = (projected.detach().square() - old_variance).square().sum(-1)
    return output, distance.detach(), ~active | _meets(reached, bound)


def _kl_of_triangle(ratio: Tensor) -> Tensor:
    """`kl_of_whitened_factor` of what is triangular to the bit, in fewer passes and without gradient."""
    diagonal = ratio.diagonal(dim1=-2, dim2=-1)
    kept = diagonal.clone()
    diagonal.zero_()
    below = _squared_norm(ratio)
    diagonal.copy_(kept)
    return kl_of_scales(kept) + 0.5 * below


def _inner_product(first: Tensor, second: Tensor) -> Tensor:
    return torch.einsum("nij,nij->n", first, second)


def _squared_norm(matrix: Tensor) -> Tensor:
    # Solvers return column-major matrices: their transpose is flat without a copy.
    matrix = matrix if matrix.is_contiguous() else matrix.mT
    return torch.linalg.vector_norm(matrix.flatten(1), dim=1).square()


def kl_of_whitened_factor(ratio: Tensor) -> Tensor:
    """KL(N(0, R Rᵀ) ‖ N(0, I)) of lower triangular R, [..., W, W] -> [...]."""
    diagonal = ratio.diagonal(dim1=-2, dim2=-1)
    below = torch.linalg.vector_norm(ratio.tril(-1), dim=(-2, -1)).square()
    return kl_of_scales(diagonal) + 0.5 * below
