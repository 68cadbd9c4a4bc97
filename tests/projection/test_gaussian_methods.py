"""Wasserstein-2, Frobenius and the entropy bound against closed forms, scipy and torch.distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor

from gaussians import F64, random_factor, random_mean, tril_parameter
from tether.errors import InvalidInputError
from tether.projection import (
    diagonal_gaussian_entropy,
    gaussian_entropy,
    kl_diagonal_gaussian,
    kl_gaussian,
    project_diagonal_gaussian,
    project_gaussian,
)
from tether.projection.gaussian_curves import KullbackLeiblerCurve, WassersteinCurve

# ------------------------------------------------------------------------------- the other divergences


def test_wasserstein_equals_the_published_closed_form_where_the_covariances_commute() -> None:
    """Σ'^½ = (Σ^½ + η Σ_o^½) / (1 + η), η = sqrt(d / bound) - 1, in a shared eigenbasis."""
    basis = torch.linalg.qr(random_mean(4, 4, seed=0)).Q
    old_roots = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=F64)
    new_roots = torch.tensor([2.0, 1.0, 0.7, 3.0], dtype=F64)
    old, new = (torch.linalg.cholesky((basis * roots**2) @ basis.mT) for roots in (old_roots, new_roots))
    distance = ((new_roots / old_roots - 1) ** 2).sum()
    eta = (distance / 0.05).sqrt() - 1
    roots = (new_roots + eta * old_roots) / (1 + eta)
    mean = torch.zeros(4, dtype=F64)
    ours = project_gaussian(mean, new, mean, old, 0.1, 0.05, method="wasserstein")
    assert torch.allclose(ours.cov_kl, distance, rtol=1e-10)
    assert torch.allclose(ours.scale_tril @ ours.scale_tril.mT, (basis * roots**2) @ basis.mT, atol=1e-10)


def test_wasserstein_distance_in_old_coordinates_meets_the_bound_for_any_covariances() -> None:
    """The distance from the Bures formula with scipy's matrix square root."""
    old, new = random_factor(5, seed=0), random_factor(5, seed=1, spread=3)
    mean = torch.zeros(5, dtype=F64)
    ours = project_gaussian(mean, new, mean, old, 0.1, 0.05, method="wasserstein").scale_tril
    ratio = torch.linalg.solve_triangular(old, ours, upper=False).numpy()
    whitened = ratio @ ratio.T
    assert np.isclose(np.trace(whitened + np.eye(5) - 2 * np.real(sqrtm(whitened))), 0.05, rtol=1e-9)


def test_frobenius_interpolates_covariances_to_the_bound() -> None:
    old, new = random_factor(4, seed=0), random_factor(4, seed=1, spread=3)
    mean = torch.zeros(4, dtype=F64)
    ours = project_gaussian(mean, new, mean, old, 0.1, 0.05, method="frobenius").scale_tril
    change, whole = ours @ ours.mT - old @ old.mT, new @ new.mT - old @ old.mT
    assert torch.allclose((change**2).sum(), torch.tensor(0.05, dtype=F64), rtol=1e-9)
    omega = ((whole**2).sum() / 0.05).sqrt() - 1
    assert torch.allclose(change, whole / (1 + omega), atol=1e-11)


@pytest.mark.parametrize("method", ["wasserstein", "frobenius"])
def test_other_methods_bound_the_mahalanobis_distance_of_the_mean(method: str) -> None:
    old = 2 * torch.eye(2, dtype=F64)
    mean, zero = torch.tensor([2.0, 0.0], dtype=F64), torch.zeros(2, dtype=F64)
    result = project_gaussian(mean, old, zero, old, 0.25, 0.1, method=method)  # type: ignore[arg-type]
    assert result.mean_kl.item() == 1.0
    assert torch.allclose(result.mean, torch.tensor([1.0, 0.0], dtype=F64))


@pytest.mark.parametrize("curve", [KullbackLeiblerCurve(), WassersteinCurve()])
def test_curve_derivatives_are_those_of_finite_differences(
    curve: KullbackLeiblerCurve | WassersteinCurve,
) -> None:
    lam = torch.tensor([[3.0, 0.2, 1.4]], dtype=F64)
    bound, tiny = torch.tensor([0.03], dtype=F64), 1e-6
    s = curve.step(lam, bound)
    by_step = (curve.ratios(lam, s + tiny) - curve.ratios(lam, s - tiny)) / (2 * tiny)
    assert torch.allclose(curve.slope(lam, s), by_step, rtol=1e-7)
    for index in range(3):
        shift = torch.zeros_like(lam)
        shift[0, index] = tiny
        change = (curve.step(lam + shift, bound) - curve.step(lam - shift, bound)) / (2 * tiny)
        assert torch.allclose(curve.step_gradient(lam, s)[:, index], change, rtol=1e-5)
    first, second = lam[:, :1], lam[:, 1:2]
    by_difference = (curve.ratios(first, s) - curve.ratios(second, s)) / (first - second)
    assert torch.allclose(curve.quotient(first, second, s), by_difference, rtol=1e-10)


# -------------------------------------------------------------------------------------------- entropy


def test_entropy_bound_widens_by_one_factor_to_exactly_the_bound() -> None:
    factor = random_factor(3, 4, seed=0)
    entropies = torch.distributions.MultivariateNormal(torch.zeros(4, dtype=F64), scale_tril=factor).entropy()
    bound = entropies + torch.tensor([-1.0, 0.5, 2.0], dtype=F64)  # the first row needs nothing
    mean = torch.zeros(3, 4, dtype=F64)
    widened = project_gaussian(mean, factor, mean, factor, 0.1, 0.1, entropy_bound=bound).scale_tril
    after = torch.distributions.MultivariateNormal(torch.zeros(4, dtype=F64), scale_tril=widened).entropy()
    assert torch.equal(widened[0], factor[0])
    assert torch.allclose(after[1:], bound[1:], atol=1e-12)
    ratio = widened[1:] / factor[1:].where(factor[1:] != 0, 1.0)
    inside = ratio[:, torch.ones(4, 4).tril().bool()]
    assert torch.allclose(inside, inside[:, :1].expand_as(inside))


def test_entropy_bound_is_differentiable() -> None:
    old = random_factor(3, seed=0)
    raw = (random_mean(3, 3, seed=1)).requires_grad_()

    def project(raw: Tensor) -> Tensor:
        mean = torch.zeros(3, dtype=F64)
        return project_gaussian(mean, tril_parameter(raw), mean, old, 0.1, 0.01, entropy_bound=9.0).scale_tril

    assert gaussian_entropy(project(raw)).item() == pytest.approx(9.0)
    assert torch.autograd.gradcheck(project, (raw,), eps=1e-6, atol=1e-6, rtol=1e-4)


def test_divergence_and_entropy_agree_with_torch_distributions() -> None:
    new, old = random_factor(3, 5, seed=0), random_factor(3, 5, seed=1, spread=2)
    mean, old_mean = random_mean(3, 5, seed=2), random_mean(3, 5, seed=3)
    p = torch.distributions.MultivariateNormal(mean, scale_tril=new)
    q = torch.distributions.MultivariateNormal(old_mean, scale_tril=old)
    assert torch.allclose(sum(kl_gaussian(mean, new, old_mean, old)), torch.distributions.kl_divergence(p, q))
    assert torch.allclose(gaussian_entropy(new), p.entropy())
    scale, old_scale = (factor.diagonal(dim1=-2, dim2=-1) for factor in (new, old))
    p = torch.distributions.Independent(torch.distributions.Normal(mean, scale), 1)
    q = torch.distributions.Independent(torch.distributions.Normal(old_mean, old_scale), 1)
    diagonal = kl_diagonal_gaussian(mean, scale, old_mean, old_scale)
    assert torch.allclose(sum(diagonal), torch.distributions.kl_divergence(p, q))
    assert torch.allclose(diagonal_gaussian_entropy(scale), p.entropy())


def test_divergence_of_nearly_equal_covariances_keeps_its_digits() -> None:
    """W² / ... by hand: Σ = (1 + t)² Σ_o has divergence W/2 ((1+t)² - 1 - 2 log(1+t)) ≈ W t²."""
    old = random_factor(6, seed=0)
    mean = torch.zeros(6, dtype=F64)
    kl = kl_gaussian(mean, old * (1 + 1e-7), mean, old)[1]
    assert kl.item() == pytest.approx(6 * 1e-14, rel=1e-6)


def test_a_singular_covariance_inside_the_bound_is_left_alone() -> None:
    factor = torch.tensor([[[1.0, 0.0], [1.0, 1e-8]], [[1.0, 0.0], [0.0, 2.0]]])
    old = torch.stack((factor[0], torch.eye(2)))
    mean = torch.zeros(2, 2)
    result = project_gaussian(mean, factor, mean, old, 0.05, 0.01, method="frobenius")
    assert torch.equal(result.scale_tril[0], factor[0])
    assert result.cov_projected.tolist() == [False, True]


@pytest.mark.parametrize("exponent", [8, 10, 12])
def test_covariances_whose_digits_cannot_hold_the_bound_are_no_success(exponent: int) -> None:
    """Their entries are 1e16 and more, of which float64 rounds away more than the bound."""
    scale = torch.logspace(-exponent, exponent, 4, dtype=F64)
    old, new = scale[:, None] * random_factor(4, seed=0), scale.flip(0)[:, None] * random_factor(4, seed=1)
    leaf, mean = torch.stack((new, random_factor(4, seed=1, spread=3))).requires_grad_(), torch.zeros(2, 4)
    olds = torch.stack((old, random_factor(4, seed=0)))
    result = project_gaussian(mean.double(), leaf, mean.double(), olds, 0.05, 0.01, method="frobenius")
    assert result.cov_projected.all()
    assert result.cov_converged.tolist() == [False, True]
    assert torch.autograd.grad(result.scale_tril.sum(), leaf)[0].isfinite().all()


def test_a_mixture_that_rounding_leaves_without_a_factor_keeps_the_old_covariance() -> None:
    old = torch.tensor([[[1.0, 0.0], [3.0, 1e-9]]], dtype=F64)
    new, mean = 2 * old, torch.zeros(1, 2, dtype=F64)
    result = project_gaussian(mean, new, mean, old, 0.05, 0.01, method="frobenius")
    assert torch.equal(result.scale_tril, old)
    assert result.cov_converged.tolist() == [False]


@pytest.mark.parametrize("ratio", [1e-3, 1e-8, 1e-9, 1e-30, 1e-150])
def test_divergence_of_a_collapsed_deviation_is_finite_and_right(ratio: float) -> None:
    """(r^2 - 1)/2 - log r; r^2 is lost beside 1 below 1e-8, where only the logarithm is left."""
    mean, old = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    scale = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    expected = (ratio**2 - 1) / 2 - math.log(ratio)
    bar = 8 * torch.finfo(torch.float64).eps
    diagonal = kl_diagonal_gaussian(mean, scale, mean, old)[1]
    whole = kl_gaussian(mean, scale.diag_embed(), mean, old.diag_embed())[1]
    for kl in (diagonal, whole):
        assert kl.item() == pytest.approx(expected, rel=bar)
        (slope,) = torch.autograd.grad(kl, scale)
        assert slope.item() == pytest.approx(ratio - 1 / ratio, rel=bar)
    result = project_diagonal_gaussian(mean, scale.detach(), mean, old, 0.1, 0.01)
    assert result.cov_kl.item() == pytest.approx(expected, rel=bar)


@pytest.mark.parametrize("ratio", [-0.1, -0.9, -3.0])
def test_the_sign_of_a_factors_diagonal_says_nothing(ratio: float) -> None:
    """L and L times a diagonal of signs are factors of one covariance."""
    mean, old = torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64)
    signed, plain = (kl_gaussian(mean, value * old, mean, old)[1] for value in (ratio, -ratio))
    assert torch.equal(signed, plain)


# ------------------------------------------------------------------------------------- at the edges


@pytest.mark.parametrize("method", ["kl", "wasserstein", "frobenius"])
def test_without_a_bound_gradients_are_the_identitys(method: str) -> None:
    new = random_factor(3, seed=0, spread=50).requires_grad_()
    mean = torch.zeros(3, dtype=F64)
    result = project_gaussian(mean, new, mean, random_factor(3, seed=1), math.inf, math.inf, method=method)
    upstream = random_factor(3, seed=2)
    (result.scale_tril * upstream).sum().backward()
    assert torch.equal(new.grad, upstream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_in_the_region(dtype: torch.dtype) -> None:
    """Which returning it in half precision would round it out of, by a third of the bound."""
    old_mean, old_scale = torch.zeros(200, 8, dtype=dtype), torch.ones(200, 8, dtype=dtype)
    mean, scale = random_mean(200, 8, seed=0).to(dtype), 1.5 * old_scale
    full = project_gaussian(mean, scale.diag_embed(), old_mean, old_scale.diag_embed(), 0.005, 0.0005)
    diagonal = project_diagonal_gaussian(mean, scale, old_mean, old_scale, 0.005, 0.0005)
    rounding = 8 * torch.finfo(torch.float32).eps / math.sqrt(0.0005)
    for result, kl in (
        (full, kl_gaussian(full.mean, full.scale_tril, old_mean, old_scale.diag_embed())),
        (diagonal, kl_diagonal_gaussian(diagonal.mean, diagonal.scale_tril, old_mean, old_scale)),
    ):
        assert result.mean_projected.all()
        assert result.cov_converged.all()
        torch.testing.assert_close(kl[0], torch.full_like(kl[0], 0.005), rtol=rounding, atol=0)
        torch.testing.assert_close(kl[1], torch.full_like(kl[1], 0.0005), rtol=rounding, atol=0)
    far = project_diagonal_gaussian(300 + mean, scale, old_mean, old_scale / 2, 0.005, 0.0005)
    assert far.mean_kl.isfinite().all()


@pytest.mark.parametrize("bound", [torch.zeros(4, 1), torch.zeros(5), "3", True])
def test_an_entropy_bound_of_another_shape_or_kind_is_refused(bound: object) -> None:
    mean, factor = torch.zeros(4, 2), torch.eye(2).expand(4, 2, 2)
    with pytest.raises(InvalidInputError, match=r"entropy_bound must be a number or one a covar.*, \(4,\)"):
        project_gaussian(mean, factor, mean, factor, 0.1, 0.1, entropy_bound=bound)  # type: ignore[arg-type]
