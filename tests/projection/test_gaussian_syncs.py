"""What the host waits for when Gaussians are projected on a GPU, place by place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from device_steps import Put, Waits, assert_step
from gaussians import random_factor, random_mean
from pretend_gpu import FROM_HOST, ROWS, VALUE
from tether.projection import gaussian_entropy, kl_gaussian, project_diagonal_gaussian, project_gaussian

B, W = 3, 5

# The projection of policies of motions is made for a CPU: it looks at what it is given, and at each row's
# progress. A change that makes it wait more often on a GPU shows all the same.
OF_SHAPE = {
    "full": {("projection/gaussian.py:_check_scale", VALUE): 4},
    "diagonal": {("projection/gaussian.py:_check_scale", VALUE): 2},
}
ALWAYS: Waits = {
    ("projection/gaussian.py:_check", VALUE): 2,
    ("projection/gaussian.py:_widen", FROM_HOST): 1,
    ("projection/gaussian.py:_widen", VALUE): 1,
}
COVARIANCE = "projection/gaussian_covariance.py:"
OF_CURVE: dict[tuple[str, str], Waits] = {
    ("full", "kl"): {
        (COVARIANCE + "_ProjectFactorKL.forward", ROWS): 1,
        (COVARIANCE + "_step_on_geodesic", VALUE): 1,
        # A Cholesky factorisation says whether it succeeded; the solver makes 20 steps on a GPU.
        (COVARIANCE + "_step_on_geodesic.<locals>.inverse_at", VALUE): 23,
    },
    ("full", "wasserstein"): {
        (COVARIANCE + "_ProjectFactorByCurve.forward", ROWS): 1,
        (COVARIANCE + "_ProjectFactorByCurve.forward", VALUE): 1,
    },
    ("full", "frobenius"): {},
    ("diagonal", "kl"): {(COVARIANCE + "_ProjectScale.forward", ROWS): 1},
    ("diagonal", "wasserstein"): {(COVARIANCE + "_ProjectScale.forward", ROWS): 1},
    ("diagonal", "frobenius"): {},
}


@pytest.mark.parametrize("method", ["kl", "wasserstein", "frobenius"])
@pytest.mark.parametrize("shape", ["full", "diagonal"])
def test_the_gaussian_projection(shape: str, method: Any) -> None:
    new, old = random_factor(B, W, seed=1, spread=2.0), random_factor(B, W, seed=2)
    if shape == "diagonal":
        new, old = (factor.diagonal(dim1=-2, dim2=-1).clone() for factor in (new, old))
    means = random_mean(B, W, seed=3), random_mean(B, W, seed=4)
    project = project_gaussian if shape == "full" else project_diagonal_gaussian

    def step(put: Put) -> list[Tensor]:
        leaves = [put(means[0].requires_grad_()), put(new.requires_grad_())]
        found = project(*leaves, put(means[1]), put(old), 0.1, 0.01, method=method, entropy_bound=-9.0)
        scale = found.scale_tril
        gradients = torch.autograd.grad(found.mean.sum() + scale.sum(), leaves)
        return [found.mean, scale, found.cov_projected, found.cov_converged, *gradients]

    assert_step(step, {**OF_SHAPE[shape], **ALWAYS, **OF_CURVE[shape, method]}, terms=10_000)


def test_divergence_and_entropy_never_wait() -> None:
    new, old = random_factor(B, W, seed=1), random_factor(B, W, seed=2)
    means = random_mean(B, W, seed=3), random_mean(B, W, seed=4)

    def step(put: Put) -> list[Tensor]:
        leaf = put(new.requires_grad_())
        parts = kl_gaussian(put(means[0]), leaf, put(means[1]), put(old))
        return [*parts, gaussian_entropy(leaf), *torch.autograd.grad(sum(part.sum() for part in parts), leaf)]

    assert_step(step, {}, terms=1000)
