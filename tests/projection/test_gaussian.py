"""The Gaussian projection against scipy, finite differences, published closed forms and hand numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

from gaussians import F64, divergence_by_slogdet, random_factor, random_mean, tril_parameter
from rounding import SUMMED_ANOTHER_WAY, error_of, unit_of
from tether.errors import InvalidInputError
from tether.projection import (
    kl_diagonal_gaussian,
    kl_gaussian,
    project_diagonal_gaussian,
    project_gaussian,
)
from tether.projection.gaussian_covariance import _ProjectFactorByCurve, _ProjectFactorKL
from tether.projection.gaussian_curves import KullbackLeiblerCurve

# ------------------------------------------------------------------------------------------ the bound


@pytest.mark.parametrize("size", [1, 2, 5, 36, 63, 128])
@pytest.mark.parametrize("bound", [2.5e-4, 0.02, 1.0])
def test_covariance_meets_the_bound_in_float64_from_tiny_to_huge_divergences(size: int, bound: float) -> None:
    for spread, least in ((3.0, 0.0), (500.0, 1e4)):
        old = random_factor(3, size, seed=size)
        new = old @ random_factor(3, size, seed=size + 1, spread=spread)
        mean = torch.zeros(3, size, dtype=F64)
        result = project_gaussian(mean, new, mean, old, 0.1, bound)
        kl = kl_gaussian(mean, result.scale_tril, mean, old)[1]
        active = result.cov_projected
        assert torch.equal(active, result.cov_kl > bound)
        assert result.cov_kl.mean() > least
        assert active.any() or bound == size == 1
        assert ((kl[active] / bound - 1).abs() <= 1e-9).all()


@pytest.mark.parametrize("size", [1, 12, 63, 128])
@pytest.mark.parametrize("target", [1e-3, 1.0, 1e2, 1e4])
def test_covariance_meets_the_bound_in_float32_up_to_a_divergence_of_1e4(size: int, target: float) -> None:
    old = random_factor(4, size, seed=3)
    # Eigenvalue ratios spread around one factor whose divergence is `target`.
    factor = optimize.brentq(lambda a: 0.5 * size * (a - 1 - math.log(a)) - target, 1.0, 1e7)
    new = old @ random_factor(4, size, seed=4, spread=0.3) * math.sqrt(factor)
    old, new = old.float(), new.float()
    mean = torch.zeros(4, size)
    result = project_gaussian(mean, new, mean, old, 0.1, 5e-4)
    assert result.scale_tril.dtype == torch.float32
    assert result.cov_projected.all()
    kl = kl_gaussian(mean.double(), result.scale_tril.double(), mean.double(), old.double())[1]
    # Entries of the factor that round by half of e, relatively, change a divergence D by about e sqrt(W D).
    within = 2 * unit_of(1.0) * math.sqrt(size / 5e-4)
    assert ((kl / 5e-4 - 1).abs() <= within).all()


def test_random_extremes_all_end_on_the_bound() -> None:
    """Policies that ran far away in any direction, old covariances of any size, bounds of any size."""
    generator = torch.Generator().manual_seed(0)

    def power(low: float, high: float) -> float:
        return float(10 ** (low + (high - low) * torch.rand((), generator=generator)))

    projected = 0
    for seed in range(150):
        size = int(torch.randint(1, 20, (), generator=generator))
        old = random_factor(2, size, seed=seed, spread=power(-2, 1)) * power(-4, 2)
        new = old @ random_factor(2, size, seed=seed + 1000, spread=power(-2, 2)) * power(-3, 3)
        mean, bound = torch.zeros(2, size, dtype=F64), power(-6, 2)
        result = project_gaussian(mean, new.requires_grad_(), mean, old, 0.1, bound)
        kl = kl_gaussian(mean, result.scale_tril, mean, old)[1]
        active = result.cov_projected
        projected += int(active.sum())
        assert ((kl[active] / bound - 1).abs() <= 1e-9).all()
        assert (kl <= bound * (1 + 1e-9)).all()
        result.scale_tril.sum().backward()
        assert torch.isfinite(new.grad).all()
    assert projected > 200


def test_shrinking_covariances_meet_the_bound_too() -> None:
    """Variance ratios of 1e-8 instead of 1e4: the divergence is in the logarithm."""
    old = random_factor(5, 8, seed=0)
    for factor in (0.5, 1e-2, 1e-4):
        new = factor * old @ random_factor(5, 8, seed=1)
        mean = torch.zeros(5, 8, dtype=F64)
        result = project_gaussian(mean, new, mean, old, 0.1, 0.01)
        kl = divergence_by_slogdet(result.scale_tril, old)
        assert torch.allclose(kl, torch.full_like(kl, 0.01), rtol=1e-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_mean_lands_on_the_ellipsoid_of_the_old_covariance(dtype: torch.dtype) -> None:
    old_mean, new_mean = random_mean(6, 4, seed=0, dtype=dtype), random_mean(6, 4, seed=1, dtype=dtype)
    old = random_factor(6, 4, seed=2, dtype=dtype)
    result = project_gaussian(new_mean, old, old_mean, old, 0.05, 0.1)
    gap = (result.mean - old_mean).double()
    precision = torch.linalg.inv(old.double() @ old.double().mT)
    reached = 0.5 * torch.einsum("bi,bij,bj->b", gap, precision, gap)
    assert result.mean_projected.all()
    within = 1e-12 if dtype == F64 else SUMMED_ANOTHER_WAY * unit_of(1.0, terms=4)
    assert torch.allclose(reached, torch.full_like(reached, 0.05), rtol=within)
    # On the straight line between the means.
    whole = (new_mean - old_mean).double()
    cosine = torch.nn.functional.cosine_similarity(gap, whole, dim=-1)
    assert error_of(cosine, torch.ones_like(cosine)) <= SUMMED_ANOTHER_WAY * unit_of(1.0, dtype)


def test_inside_the_bounds_everything_is_returned_to_the_bit_with_the_identity_gradient() -> None:
    old = random_factor(3, 5, seed=0, dtype=torch.float32)
    new = (old * 1.001).requires_grad_()
    old_mean = random_mean(3, 5, seed=1, dtype=torch.float32)
    mean = (old_mean + 1e-3).requires_grad_()
    result = project_gaussian(mean, new, old_mean, old, 0.1, 0.1)
    assert torch.equal(result.mean, mean)
    assert torch.equal(result.scale_tril, new)
    assert not result.mean_projected.any()
    assert not result.cov_projected.any()
    upstream = random_factor(3, 5, seed=2, dtype=torch.float32)
    (result.scale_tril * upstream).sum().backward()
    assert torch.equal(new.grad, upstream)


def test_infinite_bounds_switch_the_projection_off() -> None:
    old, new = random_factor(4, seed=0), random_factor(4, seed=1, spread=50)
    mean = random_mean(4, seed=2)
    result = project_gaussian(mean, new, mean * 0, old, math.inf, math.inf)
    assert torch.equal(result.scale_tril, new)
    assert torch.equal(result.mean, mean)


# ----------------------------------------------------------------------------------------- optimality


@pytest.mark.parametrize("size", [1, 2, 3])
def test_covariance_is_the_minimiser_a_constrained_optimiser_finds(size: int) -> None:
    """SLSQP over the entries of the Cholesky factor, knowing nothing of geodesics."""
    old, new = random_factor(size, seed=10), random_factor(size, seed=11, spread=3.0)
    bound = 0.02
    mean = torch.zeros(size, dtype=F64)
    ours = project_gaussian(mean, new, mean, old, 0.1, bound)
    assert bool(ours.cov_projected)
    lower = np.tril_indices(size)

    def factor(entries: np.ndarray) -> Tensor:
        matrix = np.zeros((size, size))
        matrix[lower] = entries
        return torch.from_numpy(matrix)

    found = optimize.minimize(
        lambda entries: float(divergence_by_slogdet(factor(entries), new)),
        old.numpy()[lower] * 1.01,
        constraints={"type": "ineq", "fun": lambda x: bound - float(divergence_by_slogdet(factor(x), old))},
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )
    assert float(divergence_by_slogdet(factor(found.x), old)) <= bound * (1 + 1e-6)
    assert float(divergence_by_slogdet(ours.scale_tril, new)) <= found.fun + 1e-6
    reached = factor(found.x)
    assert torch.allclose(ours.scale_tril @ ours.scale_tril.mT, reached @ reached.mT, atol=2e-4)


def test_covariance_equals_the_dual_solution_in_natural_parameters() -> None:
    """Precisions mixed with the multiplier that scipy's brentq finds."""
    old, new = random_factor(6, 5, seed=0), random_factor(6, 5, seed=1, spread=3.0)
    mean = torch.zeros(6, 5, dtype=F64)
    ours = project_gaussian(mean, new, mean, old, 0.1, 0.01)
    for index in range(6):
        old_precision = torch.linalg.inv(old[index] @ old[index].mT)
        new_precision = torch.linalg.inv(new[index] @ new[index].mT)

        def mixed(eta: float, a: Tensor = old_precision, b: Tensor = new_precision) -> Tensor:
            return torch.linalg.cholesky(torch.linalg.inv((eta * a + b) / (1 + eta)))

        def excess(eta: float, q: Tensor = old[index], mixed=mixed) -> float:  # type: ignore[no-untyped-def]
            return float(divergence_by_slogdet(mixed(eta), q)) - 0.01

        eta = optimize.brentq(excess, 0, 1e8, xtol=1e-13, rtol=1e-14)
        assert torch.allclose(ours.scale_tril[index], mixed(eta), atol=1e-9)


# ------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("method", ["kl", "wasserstein", "frobenius"])
def test_gradient_of_active_inactive_and_degenerate_rows_is_that_of_finite_differences(method: str) -> None:
    old = random_factor(5, 4, seed=0)
    raw = random_mean(5, 4, 4, seed=1) * 0.6
    raw[1:3] = 0.0
    old[1] = tril_parameter(raw)[1] * 1.02  # all eigenvalues equal, inside the bound
    old[2] = tril_parameter(raw)[2] / 1.7  # all eigenvalues equal, outside
    bound = {"kl": 0.02, "wasserstein": 0.02, "frobenius": 0.05}[method]
    mean, old_mean = random_mean(5, 4, seed=2), random_mean(5, 4, seed=3)
    old_mean[0] = mean[0] + 1e-3

    def project(raw: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        result = project_gaussian(mean, tril_parameter(raw), old_mean, old, 0.1, bound, method=method)  # type: ignore[arg-type]
        return result.mean, result.scale_tril

    result = project_gaussian(mean, tril_parameter(raw), old_mean, old, 0.1, bound, method=method)  # type: ignore[arg-type]
    assert not result.cov_projected[1]
    assert result.cov_projected[[0, 2, 3, 4]].all()
    assert result.mean_projected.tolist() == [False, True, True, True, True]
    inputs = raw.requires_grad_(), mean.requires_grad_()
    assert torch.autograd.gradcheck(project, inputs, eps=1e-6, atol=1e-6, rtol=1e-4)


def test_gradient_where_the_spectrum_is_almost_degenerate() -> None:
    """Eigenvalues 1e-9 apart: a formula that divides by their gaps would return noise."""
    old = random_factor(3, seed=0)
    gap = torch.tensor([1.5, 1.5 + 1e-9, 1.5 - 1e-9], dtype=F64).diag_embed()
    factor = (old @ gap).requires_grad_()

    def project(lower: Tensor) -> Tensor:
        mean = torch.zeros(3, dtype=F64)
        return project_gaussian(mean, lower.tril(), mean, old, 0.1, 0.02).scale_tril

    assert torch.autograd.gradcheck(project, (factor,), eps=1e-6, atol=1e-6, rtol=1e-5)


def test_gradient_does_not_move_the_divergence() -> None:
    """The projected divergence is constant, so its gradient with respect to the input vanishes."""
    old, raw = random_factor(4, seed=0), (random_mean(4, 4, seed=1)).requires_grad_()
    mean = torch.zeros(4, dtype=F64)
    factor = tril_parameter(raw)
    assert kl_gaussian(mean, factor, mean, old)[1].item() > 0.05
    result = project_gaussian(mean, factor, mean, old, 0.1, 0.05)
    kl_gaussian(mean, result.scale_tril, mean, old)[1].backward()
    assert raw.grad.abs().max() < 1e-12


def test_old_policy_is_data() -> None:
    old = random_factor(3, seed=0).requires_grad_()
    old_mean = random_mean(3, seed=1).requires_grad_()
    new = random_factor(3, seed=2, spread=3).requires_grad_()
    result = project_gaussian(old_mean.detach() + 1, new, old_mean, old, 0.1, 0.01)
    (result.mean.sum() + result.scale_tril.sum()).backward()
    assert old.grad is None
    assert old_mean.grad is None
    assert new.grad is not None


@pytest.mark.parametrize("size", [1, 7, 128])
def test_float32_gradient_agrees_with_float64(size: int) -> None:
    old = random_factor(2, size, seed=0)
    upstream = random_factor(2, size, seed=5)
    gradients = []
    for dtype in (torch.float32, F64):
        new = (old @ random_factor(2, size, seed=1, spread=0.5)).to(dtype).requires_grad_()
        mean = torch.zeros(2, size, dtype=dtype)
        result = project_gaussian(mean, new, mean, old.to(dtype), 0.1, 1e-3)
        (result.scale_tril * upstream.to(dtype)).sum().backward()
        gradients.append(new.grad.double())
    # Two factors are factorised and multiplied, all of them with rounded entries.
    assert (gradients[0] - gradients[1]).norm() <= 4 * SUMMED_ANOTHER_WAY * unit_of(gradients[1].norm())


@pytest.mark.parametrize("spread", [0.1, 3.0, 100.0])
def test_the_factorisation_path_equals_the_eigenbasis_path(spread: float) -> None:
    """Two derivations of one projection, forward and backward."""
    old = random_factor(3, 9, seed=0)
    weight = random_factor(3, 9, seed=2)
    results = []
    for project in (
        _ProjectFactorKL.apply,
        lambda *a: _ProjectFactorByCurve.apply(*a[:2], KullbackLeiblerCurve(), a[2]),
    ):
        new = (old @ random_factor(3, 9, seed=1, spread=spread)).requires_grad_()
        projected, kl, converged = project(new, old, 5e-4)
        assert bool(converged.all())
        (projected * weight).sum().backward()
        results.append((projected, kl, new.grad))
    for first, second in zip(*results, strict=True):
        assert torch.allclose(first, second, rtol=1e-8, atol=1e-11)


# ------------------------------------------------------------------------------------- convergence


@pytest.mark.parametrize("method", ["kl", "wasserstein", "frobenius"])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_a_projection_that_converged_lies_on_its_bound(method: str, spread: float) -> None:
    old = random_factor(4, 6, seed=0)
    new = old @ random_factor(4, 6, seed=1, spread=spread)
    mean = torch.zeros(4, 6, dtype=F64)
    result = project_gaussian(mean, new, mean, old, 0.1, 1e-4, method=method)
    assert bool(result.cov_converged.all())
    again = project_gaussian(mean, result.scale_tril, mean, old, 0.1, 1.0, method=method)
    outside = result.cov_projected
    assert torch.allclose(again.cov_kl[outside], torch.full_like(again.cov_kl[outside], 1e-4), rtol=1e-8)


@pytest.mark.parametrize("matrix", [True, False])
def test_a_projection_that_ran_out_of_steps_says_so_and_stays_inside_the_bound(
    matrix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three covariances the first is inside its bound, so nothing had to be found for it."""
    monkeypatch.setattr("tether.projection.solve._MAX_ITERATIONS", 0)
    old = torch.ones(3, 2, dtype=F64)
    new = torch.tensor([[1.0, 1.0], [1e4, 1e-3], [1e6, 1.0]], dtype=F64)
    mean = torch.zeros(3, 2, dtype=F64)
    if matrix:
        result = project_gaussian(mean, new.diag_embed(), mean, old.diag_embed(), 0.1, 0.1)
        reached = kl_gaussian(mean, result.scale_tril, mean, old.diag_embed())[1]
    else:
        result = project_diagonal_gaussian(mean, new, mean, old, 0.1, 0.1)
        reached = kl_diagonal_gaussian(mean, result.scale_tril, mean, old)[1]
    assert result.cov_converged.tolist() == [True, False, False]
    assert bool((reached <= 0.1).all())


# ----------------------------------------------------------------------- broadcasting and the diagonal


def test_one_covariance_serves_many_means() -> None:
    """[W, W] against [B, W] equals the covariance repeated B times, gradients summed."""
    old_mean, mean = random_mean(7, 4, seed=0), random_mean(7, 4, seed=1)
    old = random_factor(4, seed=2)
    shared = random_factor(4, seed=3, spread=3).requires_grad_()
    repeated = shared.detach().expand(7, 4, 4).clone().requires_grad_()
    one = project_gaussian(mean, shared, old_mean, old, 0.05, 0.01)
    many = project_gaussian(mean, repeated, old_mean, old.expand(7, 4, 4), 0.05, 0.01)
    assert one.scale_tril.shape == (4, 4)
    assert one.cov_kl.shape == ()
    assert torch.allclose(one.mean, many.mean, atol=1e-14)
    assert torch.allclose(one.scale_tril.expand(7, 4, 4), many.scale_tril, atol=1e-13)
    weight = random_factor(4, seed=4)
    (one.scale_tril * weight).sum().backward()
    (many.scale_tril * weight).sum().backward()
    assert torch.allclose(7 * shared.grad, repeated.grad.sum(0), atol=1e-12)


@pytest.mark.parametrize("method", ["kl", "wasserstein", "frobenius"])
def test_diagonal_path_equals_the_full_one(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.rand(5, 6, generator=generator, dtype=F64) + 0.5
    scale = (old * torch.exp(torch.randn(5, 6, generator=generator, dtype=F64))).requires_grad_()
    full = scale.detach().diag_embed().requires_grad_()
    mean, old_mean = random_mean(5, 6, seed=1), random_mean(5, 6, seed=2)
    kwargs = {"method": method, "entropy_bound": 5.0}
    short = project_diagonal_gaussian(mean, scale, old_mean, old, 0.1, 0.05, **kwargs)  # type: ignore[arg-type]
    long = project_gaussian(mean, full, old_mean, old.diag_embed(), 0.1, 0.05, **kwargs)  # type: ignore[arg-type]
    assert torch.allclose(short.scale_tril.diag_embed(), long.scale_tril, atol=1e-12)
    assert torch.allclose(short.mean, long.mean, atol=1e-12)
    assert torch.allclose(short.cov_kl, long.cov_kl, rtol=1e-10)
    weight = torch.rand(5, 6, generator=generator, dtype=F64)
    (short.scale_tril * weight).sum().backward()
    (long.scale_tril * weight.diag_embed()).sum().backward()
    assert torch.allclose(scale.grad, full.grad.diagonal(dim1=-2, dim2=-1), atol=1e-11)


def test_diagonal_gradient_is_that_of_finite_differences() -> None:
    old = torch.tensor([[1.0, 0.5, 2.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=F64)
    scale = torch.tensor([[2.0, 0.1, 2.0], [1.5, 1.5, 1.5], [1.001, 1.0, 1.0]], dtype=F64, requires_grad=True)
    for method in ("kl", "wasserstein", "frobenius"):

        def project(scale: Tensor, method: str = method) -> Tensor:
            mean = torch.zeros(3, 3, dtype=F64)
            return project_diagonal_gaussian(mean, scale, mean, old, 0.1, 0.02, method=method).scale_tril  # type: ignore[arg-type]

        assert torch.autograd.gradcheck(project, (scale,), eps=1e-6, atol=1e-6, rtol=1e-4)


# --------------------------------------------------------------------------------------------- errors


def test_refuses_what_it_cannot_project() -> None:
    mean, factor = torch.zeros(2, 3), torch.eye(3)
    good = (mean, factor, mean, factor, 0.1, 0.1)

    def wrong(index: int, value: object) -> tuple[object, ...]:
        return (*good[:index], value, *good[index + 1 :])

    for arguments, cause in (
        (wrong(4, 0.0), "mean_bound must be a positive number, got 0.0"),
        (wrong(5, math.nan), "cov_bound must be a positive number, got nan"),
        (wrong(2, torch.zeros(3, 3)), r"\(2, 3\) and \(3, 3\)"),
        (wrong(1, torch.eye(4)), r"scale_tril must be \[..., W, W\].*\(4, 4\)"),
        (wrong(3, torch.eye(3).expand(5, 3, 3)), r"old_scale_tril must be .*\(5, 3, 3\)"),
        (wrong(1, -torch.eye(3)), "positive diagonal; its smallest is -1"),
        (wrong(1, torch.full((3, 3), math.nan)), "scale_tril must be finite"),
        (wrong(3, torch.ones(3, 3)), "old_scale_tril has entries above its diagonal"),
        (wrong(0, torch.full((2, 3), math.inf)), "mean holds NaN or infinity"),
        (wrong(0, torch.zeros(2, 3, dtype=torch.long)), r"mean must be floating point, got torch.int64"),
        (wrong(3, torch.eye(3).long()), r"old_scale_tril must be floating point, got torch.int64"),
    ):
        with pytest.raises(InvalidInputError, match=cause):
            project_gaussian(*arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="got 'euclid'"):
        project_gaussian(*good, method="euclid")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="entropy_bound must be finite"):
        project_gaussian(*good, entropy_bound=math.nan)
    with pytest.raises(InvalidInputError, match="scale must be finite with a positive value everywhere"):
        project_diagonal_gaussian(mean, torch.zeros(3), mean, torch.ones(3), 0.1, 0.1)


def test_many_half_precision_scales_are_as_finite_as_one() -> None:
    mean, scale = torch.zeros(4096, 32, dtype=torch.float16), torch.ones(4096, 32, dtype=torch.float16)
    assert not project_diagonal_gaussian(mean, scale, mean, scale, 0.1, 0.1).cov_projected.any()
