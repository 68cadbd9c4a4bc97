"""Projection of Gaussian policies onto separate trust regions of mean and covariance.

This file has the mean's part, the entropy bound and the checks; `gaussian_covariance.py` moves the
covariance. Everything is computed in float64, whatever the inputs: the matrices are small and the
divergences that matter (1e-4 nats) are differences of much larger numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection.gaussian_covariance import (
    GaussianMethod,
    kl_of_whitened_factor,
    project_factor,
    project_scale,
)
from tether.projection.gaussian_curves import kl_of_scales
from tether.settings import is_number


@dataclass(frozen=True)
class GaussianProjection:
    """What `project_gaussian` and `project_diagonal_gaussian` return."""

    mean: Tensor
    """Projected mean, [..., W]."""
    scale_tril: Tensor
    """Projected Cholesky factor [..., W, W]; `project_diagonal_gaussian`: standard deviations [..., W]."""
    mean_kl: Tensor
    """Divergence of the new mean before the projection, in the method's unit (kl: nats), [...]."""
    cov_kl: Tensor
    """Divergence of the new covariance before the projection, likewise, [...]."""
    mean_projected: Tensor
    """Where the mean's bound was exceeded and the projection acted, bool, the shape of `mean_kl`."""
    cov_projected: Tensor
    """Where the covariance's bound was exceeded and the projection acted, bool, the shape of `cov_kl`."""
    cov_converged: Tensor
    """Whether the covariance was inside its bound or ends on it (to a relative 1e-9, in float64), bool, the
    shape of `cov_kl`. Where not, the solver ran out of steps or digits."""


def project_gaussian(
    mean: Tensor,
    scale_tril: Tensor,
    old_mean: Tensor,
    old_scale_tril: Tensor,
    mean_bound: float,
    cov_bound: float,
    *,
    method: GaussianMethod = "kl",
    entropy_bound: float | Tensor | None = None,
) -> GaussianProjection:
    """Solve argmin_π KL(π ‖ p) subject to KL(π ‖ q) <= bound, for mean and covariance separately.

    p = N(mean, scale_tril scale_trilᵀ) is the new policy, q the old one. With ``method="kl"``, the
    divergence KL(p ‖ q) has a part of the mean, ½ (μ-μ_o)ᵀ Σ_o⁻¹ (μ-μ_o), and a part of the
    covariance, KL(N(0, Σ) ‖ N(0, Σ_o)), each with a bound of its own. Inside its bound a part is
    returned as it is, to the bit, with the identity's gradient. Outside, the mean moves on the
    straight line and the covariance on the geodesic Σ'⁻¹ = (1-s) Σ_o⁻¹ + s Σ⁻¹, to where the bound
    holds with equality; the gradient is that of the exact solution (nothing is unrolled, and equal
    eigenvalues are no trouble). q is data: it receives no gradient.

    ``method="wasserstein"`` bounds (μ-μ_o)ᵀ Σ_o⁻¹ (μ-μ_o) and the squared Wasserstein-2 distance of
    the covariances, measured where Σ_o is the identity: the geodesic interpolates square roots there.
    This is exact, and equals the published closed form where Σ and Σ_o commute, which that one assumes.
    ``method="frobenius"`` bounds the same mean part and ‖Σ - Σ_o‖², and interpolates covariances.

    With an `entropy_bound` the projected covariance is widened, shape kept, to at least that entropy. It
    comes last: if it widens, the covariance may leave the trust region by that much.

    Leading dimensions broadcast. One covariance [W, W] for a batch of means [B, W] is projected once. Results
    are float32 at least: half precision rounds a policy out of its region. `torch.func.vmap` does not go
    through it.

    Args:
        mean, old_mean: [..., W], same shape.
        scale_tril, old_scale_tril: lower triangular with a positive diagonal, [..., W, W].
        mean_bound, cov_bound: positive; in nats for "kl". `math.inf` switches that part's projection off.
        method: "kl", "wasserstein" or "frobenius".
        entropy_bound: least entropy in nats, a number or a value a covariance.

    Raises:
        InvalidInputError: shapes that do not fit, a bound that is not positive, NaN, a factor that is
            not lower triangular with a positive diagonal, an unknown method, an entropy bound that is not
            finite.

    Source: trust region layers (arXiv 2101.09207, section 4 and appendix B).

    Example:
        >>> import torch
        >>> old_mean, new_mean = torch.zeros(2), torch.tensor([3.0, 0.0])
        >>> old_tril, new_tril = torch.eye(2), torch.tensor([[2.0, 0.0], [0.5, 1.0]])
        >>> result = project_gaussian(new_mean, new_tril, old_mean, old_tril, 0.05, 0.01)
        >>> mean_kl, cov_kl = kl_gaussian(result.mean, result.scale_tril, old_mean, old_tril)
        >>> round(mean_kl.item(), 5), round(cov_kl.item(), 5)
        (0.05, 0.01)
    """
    _check(mean, scale_tril, old_mean, old_scale_tril, mean_bound, cov_bound, method, matrix=True)
    mean, scale_tril = _at_least_float32(mean), _at_least_float32(scale_tril)
    old_mean, old_scale_tril = old_mean.detach(), old_scale_tril.detach()
    distance = _whiten(mean.double() - old_mean.double(), old_scale_tril.double()).square().sum(-1)
    projected_mean, mean_kl, mean_projected = _project_mean(mean, old_mean, distance, mean_bound, method)
    factors = _flatten_together(scale_tril, old_scale_tril, 2)
    factor, cov_kl, converged = map(
        factors.restore, project_factor(factors.new, factors.old, cov_bound, method)
    )
    if entropy_bound is not None:
        factor = _widen(factor, gaussian_entropy(factor.double()), entropy_bound, factor.shape[-1], 2)
    return GaussianProjection(
        projected_mean,
        factor,
        mean_kl,
        cov_kl.to(mean_kl.dtype),
        mean_projected,
        cov_kl > cov_bound,
        converged,
    )


def project_diagonal_gaussian(
    mean: Tensor,
    scale: Tensor,
    old_mean: Tensor,
    old_scale: Tensor,
    mean_bound: float,
    cov_bound: float,
    *,
    method: GaussianMethod = "kl",
    entropy_bound: float | Tensor | None = None,
) -> GaussianProjection:
    """Solve the problem of `project_gaussian` for independent dimensions, without a single matrix.

    Equals ``project_gaussian(mean, scale.diag_embed(), old_mean, old_scale.diag_embed(), ...)`` with the
    diagonal of its factor, at a cost linear in W.

    Args:
        mean, old_mean: [..., W], same shape.
        scale, old_scale: standard deviations, positive, [..., W].
        mean_bound, cov_bound, method, entropy_bound: as in `project_gaussian`.

    Returns:
        As `project_gaussian`, but `scale_tril` holds standard deviations [..., W].

    Raises:
        InvalidInputError: as in `project_gaussian`.

    Source: trust region layers (arXiv 2101.09207, section 4).

    Example:
        >>> import torch
        >>> zero, one = torch.zeros(3), torch.ones(3)
        >>> result = project_diagonal_gaussian(zero, 2 * one, zero, one, 0.05, 0.01)
        >>> [round(std, 4) for std in result.scale_tril.tolist()]
        [1.0583, 1.0583, 1.0583]
    """
    _check(mean, scale, old_mean, old_scale, mean_bound, cov_bound, method, matrix=False)
    mean, scale = _at_least_float32(mean), _at_least_float32(scale)
    old_mean, old_scale = old_mean.detach(), old_scale.detach()
    distance = ((mean.double() - old_mean.double()) / old_scale.double()).square().sum(-1)
    projected_mean, mean_kl, mean_projected = _project_mean(mean, old_mean, distance, mean_bound, method)
    scales = _flatten_together(scale, old_scale, 1)
    projected, cov_kl, converged = map(
        scales.restore, project_scale(scales.new, scales.old, cov_bound, method)
    )
    if entropy_bound is not None:
        entropy = diagonal_gaussian_entropy(projected.double())
        projected = _widen(projected, entropy, entropy_bound, projected.shape[-1], 1)
    return GaussianProjection(
        projected_mean,
        projected,
        mean_kl,
        cov_kl.to(mean_kl.dtype),
        mean_projected,
        cov_kl > cov_bound,
        converged,
    )


def kl_gaussian(
    mean: Tensor, scale_tril: Tensor, old_mean: Tensor, old_scale_tril: Tensor
) -> tuple[Tensor, Tensor]:
    """KL(new ‖ old) in nats as its two parts: of the mean and of the covariance; their sum is the whole.

    Differentiable in all four, computed in float64, returned in the inputs' precision, float32 at least.
    Shapes as in `project_gaussian`, old covariances broadcast.

    Example:
        >>> import torch
        >>> parts = kl_gaussian(torch.ones(2), torch.eye(2), torch.zeros(2), 2 * torch.eye(2))
        >>> [round(part.item(), 4) for part in parts]
        [0.25, 0.6363]
    """
    dtype = _wider(torch.promote_types(mean.dtype, scale_tril.dtype))
    old = old_scale_tril.double()
    mean_part = 0.5 * _whiten(mean.double() - old_mean.double(), old).square().sum(-1)
    factor = torch.linalg.solve_triangular(old, scale_tril.double(), upper=False)
    return mean_part.to(dtype), kl_of_whitened_factor(factor).to(dtype)


def kl_diagonal_gaussian(
    mean: Tensor, scale: Tensor, old_mean: Tensor, old_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """`kl_gaussian` for independent dimensions with standard deviations [..., W].

    Example:
        >>> import torch
        >>> parts = kl_diagonal_gaussian(torch.ones(2), torch.ones(2), torch.zeros(2), 2 * torch.ones(2))
        >>> [round(part.item(), 4) for part in parts]
        [0.25, 0.6363]
    """
    dtype = _wider(torch.promote_types(mean.dtype, scale.dtype))
    old = old_scale.double()
    mean_part = 0.5 * ((mean.double() - old_mean.double()) / old).square().sum(-1)
    return mean_part.to(dtype), kl_of_scales(scale.double() / old).to(dtype)


def gaussian_entropy(scale_tril: Tensor) -> Tensor:
    """Entropy in nats of a Gaussian with Cholesky factor [..., W, W] -> [...].

    Example:
        >>> import torch
        >>> round(gaussian_entropy(torch.eye(2)).item(), 4)
        2.8379
    """
    return diagonal_gaussian_entropy(scale_tril.diagonal(dim1=-2, dim2=-1))


def diagonal_gaussian_entropy(scale: Tensor) -> Tensor:
    """Entropy in nats of a Gaussian with standard deviations [..., W] -> [...]."""
    return scale.log().sum(-1) + 0.5 * scale.shape[-1] * (1 + math.log(2 * math.pi))


# ---------------------------------------------------------------------------------- mean and entropy


def _project_mean(
    mean: Tensor, old_mean: Tensor, distance: Tensor, bound: float, method: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean on the line to the old one, its divergence before, and where it was moved."""
    divergence = 0.5 * distance if method == "kl" else distance
    outside = divergence > bound
    step = (bound / torch.where(outside, divergence, 1.0)).sqrt()
    step = torch.where(outside, step, 1.0)[..., None]
    moved = old_mean.double() + step * (mean.double() - old_mean.double())
    projected = torch.where(outside[..., None], moved.to(mean.dtype), mean)
    return projected, divergence.detach().to(mean.dtype), outside


def _whiten(rows: Tensor, factor: Tensor) -> Tensor:
    """factor⁻¹ row for every row [..., W]; a factor without leading dimensions is not repeated."""
    if factor.dim() == 2:
        flat = rows.reshape(-1, rows.shape[-1])
        return torch.linalg.solve_triangular(factor, flat.mT, upper=False).mT.reshape(rows.shape)
    return torch.linalg.solve_triangular(factor, rows[..., None], upper=False).squeeze(-1)


def _widen(scale: Tensor, entropy: Tensor, least: float | Tensor, size: int, matrix_dims: int) -> Tensor:
    """Multiply every standard deviation alike where the entropy is below `least`."""
    if not (is_number(least) or (isinstance(least, Tensor) and _broadcasts(least.shape, entropy.shape))):
        got = tuple(least.shape) if isinstance(least, Tensor) else repr(least)
        raise InvalidInputError(
            f"entropy_bound must be a number or one a covariance, {tuple(entropy.shape)}, got {got}."
        )
    missing = torch.as_tensor(least, dtype=entropy.dtype, device=entropy.device) - entropy
    if not bool(torch.isfinite(missing).all()):
        raise InvalidInputError(f"entropy_bound must be finite, got {least!r}. Use None for no bound.")
    factor = (missing.clamp_min(0) / size).exp()
    factor = factor[(..., *(None,) * matrix_dims)]
    return torch.where(factor > 1, (scale.double() * factor).to(scale.dtype), scale)


# ------------------------------------------------------------------------------------ shapes, checks


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(_wider(values.dtype))


@dataclass(frozen=True)
class _Flattened:
    new: Tensor
    old: Tensor
    shape: torch.Size

    def restore(self, values: Tensor) -> Tensor:
        return values.reshape((*self.shape, *values.shape[1:]))


def _flatten_together(new: Tensor, old: Tensor, trailing: int) -> _Flattened:
    """Both with their leading dimensions broadcast against each other and made one, [N, ...]."""
    shape = torch.broadcast_shapes(new.shape[:-trailing], old.shape[:-trailing])
    flat = [value.expand(shape + value.shape[-trailing:]) for value in (new, old)]
    rows = math.prod(shape)
    new, old = (value.reshape((rows, *value.shape[-trailing:])) for value in flat)
    return _Flattened(new, old, shape)


def _check(
    mean: Tensor,
    scale: Tensor,
    old_mean: Tensor,
    old_scale: Tensor,
    mean_bound: float,
    cov_bound: float,
    method: str,
    *,
    matrix: bool,
) -> None:
    for name, bound in (("mean_bound", mean_bound), ("cov_bound", cov_bound)):
        if not (is_number(bound) and bound > 0):
            raise InvalidInputError(
                f"{name} must be a positive number, got {bound!r}. "
                "Typical values are 0.005 to 0.1 (mean) and 0.0005 to 0.02 (covariance)."
            )
    if method not in ("kl", "wasserstein", "frobenius"):
        raise InvalidInputError(f'method must be "kl", "wasserstein" or "frobenius", got {method!r}.')
    if mean.shape != old_mean.shape or mean.dim() < 1 or mean.numel() == 0:
        raise InvalidInputError(
            f"mean and old_mean must both be [..., W] and not empty, got {tuple(mean.shape)} and "
            f"{tuple(old_mean.shape)}."
        )
    for name, value in (("", scale), ("old_", old_scale)):
        _check_scale(name, value, mean, matrix=matrix)
    for name, value in (("mean", mean), ("old_mean", old_mean)):
        if not value.is_floating_point():
            raise InvalidInputError(f"{name} must be floating point, got {value.dtype}.")
        if not bool(torch.isfinite(value).all()):
            raise InvalidInputError(
                f"{name} holds NaN or infinity. Look for a learning rate that destroyed the network."
            )


def _check_scale(prefix: str, scale: Tensor, mean: Tensor, *, matrix: bool) -> None:
    size = mean.shape[-1]
    name = f"{prefix}scale_tril" if matrix else f"{prefix}scale"
    if not scale.is_floating_point():
        raise InvalidInputError(f"{name} must be floating point, got {scale.dtype}.")
    trailing, wanted = (2, "[..., W, W]") if matrix else (1, "[..., W]")
    leading = scale.shape[:-trailing]
    if scale.shape[-trailing:] != (size,) * trailing or not _broadcasts(leading, mean.shape[:-1]):
        raise InvalidInputError(
            f"{name} must be {wanted} with leading dimensions that broadcast to the mean's "
            f"{tuple(mean.shape)}, got {tuple(scale.shape)}."
        )
    diagonal = scale.diagonal(dim1=-2, dim2=-1) if matrix else scale
    if not bool(torch.isfinite(scale).all() & (diagonal > 0).all()):
        raise InvalidInputError(
            f"{name} must be finite with a positive {'diagonal' if matrix else 'value everywhere'}; its "
            f"smallest is {diagonal.min().item():.3g}. Parametrise it with softplus plus a minimum."
        )
    if matrix and bool(scale.triu(1).any()):
        raise InvalidInputError(
            f"{name} has entries above its diagonal. Pass the Cholesky factor (torch.linalg.cholesky), "
            "not the covariance."
        )


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, to) == to
    except RuntimeError:  # torch's way of saying that shapes do not broadcast
        return False
