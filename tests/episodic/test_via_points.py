"""Conditioning on via-points, against a posterior computed another way."""

import math

import numpy as np
import pytest
import torch

from tether.episodic.policy import WeightDistribution
from tether.episodic.prodmp import ProDMP, ProDMPConfig
from tether.episodic.via_points import ViaPoint, condition_on_via_points
from tether.errors import InvalidInputError

MOTION = ProDMP(ProDMPConfig(num_basis=3, tau=1.2, relative_goal=True), 2)
POINTS = [ViaPoint(0.4, (0.2, math.nan), 0.01), ViaPoint(1.0, (-0.3, 0.5), 0.05)]


def episodes(full=True, shared=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = MOTION.num_weights
    mean, position, velocity = (
        torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (size, 2, 2)
    )
    shape = () if shared else (3,)
    if full:
        raw = torch.randn(*shape, size, size, generator=generator, dtype=torch.float64)
        scale = raw.tril(-1) + (raw.diagonal(dim1=-2, dim2=-1).abs() + 0.3).diag_embed()
    else:
        scale = torch.rand(*shape, size, generator=generator, dtype=torch.float64) + 0.2
    return WeightDistribution(mean, scale, "full" if full else "diagonal"), position, velocity


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_posterior_in_information_form(full, shared):
    prior, position, velocity = episodes(full, shared)
    found = condition_on_via_points(MOTION, prior, position, velocity, POINTS)
    # The observation matrix by differentiating the trajectory, the posterior by adding precisions.
    times = [point.time for point in POINTS]

    def positions(weights):
        return MOTION.trajectory(weights, position[0], velocity[0], times)[0]

    jacobian = torch.autograd.functional.jacobian(positions, prior.mean[0])  # [T, D, W]
    given = [(0, 0), (1, 0), (1, 1)]
    look = torch.stack([jacobian[t, d] for t, d in given])
    noise = torch.tensor([POINTS[t].std ** 2 for t, _ in given], dtype=torch.float64)
    wanted = torch.tensor([POINTS[t].position[d] for t, d in given], dtype=torch.float64)
    tril = prior.scale_tril if shared else prior.scale_tril[0]
    precision = torch.cholesky_inverse(tril)
    posterior = torch.linalg.inv(precision + look.mT @ (look / noise[:, None]))
    offset = positions(torch.zeros_like(prior.mean[0]))
    moved = torch.stack([offset[t, d] for t, d in given])
    mean = posterior @ (precision @ prior.mean[0] + look.mT @ ((wanted - moved) / noise))
    torch.testing.assert_close(found.mean[0], mean, rtol=1e-7, atol=1e-7)
    own = found.scale if shared else found.scale[0]
    torch.testing.assert_close(own @ own.mT, posterior, rtol=1e-6, atol=1e-8)


def test_samples_pass_the_points_as_closely_as_asked():
    prior, position, velocity = episodes()
    found = condition_on_via_points(MOTION, prior, position, velocity, POINTS)
    noise = torch.randn(
        3, MOTION.num_weights, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    at, _ = MOTION.trajectory(found.weights(noise), position, velocity, [0.4, 1.0])
    assert (at[:, 0, 0] - 0.2).abs().max() < 0.05
    assert (at[:, 1] - torch.tensor([-0.3, 0.5])).abs().max() < 0.25


def test_wrong_points_are_refused():
    prior, position, velocity = episodes()
    with pytest.raises(InvalidInputError, match="at least one"):
        condition_on_via_points(MOTION, prior, position, velocity, [ViaPoint(0.5, (math.nan, math.nan))])
    with pytest.raises(InvalidInputError, match="each of the 2 joints, got 1"):
        condition_on_via_points(MOTION, prior, position, velocity, [ViaPoint(0.5, (0.1,))])
    with pytest.raises(InvalidInputError, match="std"):
        ViaPoint(0.5, (0.1, 0.2), std=0.0)
    with pytest.raises(InvalidInputError, match="position"):
        ViaPoint(0.5, (math.inf, 0.2))


ONE = ProDMP(ProDMPConfig(num_basis=3), 1)


def passing(points, motion=ONE):
    """Conditioned from mean 0 and covariance 1, from rest at 0."""
    prior = WeightDistribution(torch.zeros(1, 4), torch.eye(4), "full")
    start = torch.zeros(1, 1, dtype=torch.float64)
    return condition_on_via_points(motion, prior, start, start, points)


@pytest.mark.parametrize("std", [1e-6, 1e-8, 1e-10])
def test_points_may_be_as_tight_as_wanted(std):
    """The motion of the smallest weights that pass them, which numpy finds."""
    points = [ViaPoint(0.3, (0.1,), std), ViaPoint(0.5, (0.3,), std), ViaPoint(0.9, (-0.2,), std)]
    found = passing(points)
    basis = ONE.basis([point.time for point in points]).positions.numpy()
    smallest = np.linalg.lstsq(basis, [point.position[0] for point in points], rcond=None)[0]
    assert found.mean[0].numpy() == pytest.approx(smallest, rel=1e-5)
    spread = (torch.from_numpy(basis) @ found.scale).norm(dim=-1)
    assert spread.numpy() == pytest.approx([std] * 3, rel=1e-3)
    assert (found.scale.diagonal() > 0).all()


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([ViaPoint(0.5, (0.3,), 1e-9), ViaPoint(0.5, (0.4,), 1e-9)], r"they miss it by 0\.05"),
        ([ViaPoint(t, (0.3 * t**3,), 1e-8) for t in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)], "fewer or others"),
        ([ViaPoint(1e-6, (0.3,))], "do not pass 0.3 with joint 1"),
        ([ViaPoint(0.0, (0.3,))], "before anything moves"),
        ([ViaPoint(-0.1, (0.3,))], "before anything moves"),
    ],
)
def test_points_that_cannot_be_passed_are_refused(points, message):
    with pytest.raises(InvalidInputError, match=message):
        passing(points)


def test_a_point_within_the_delay_is_refused():
    delayed = ProDMP(ProDMPConfig(num_basis=3, delay=0.3), 1)
    with pytest.raises(InvalidInputError, match=r"motions start at 0\.3 s"):
        passing([ViaPoint(0.1, (0.3,))], delayed)
    with pytest.raises(InvalidInputError, match="time must be a number"):
        ViaPoint(math.nan, (0.3,))
