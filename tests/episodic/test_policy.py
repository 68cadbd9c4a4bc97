"""The policy against torch.distributions and its promises about scale and context."""

from __future__ import annotations

import math

import pytest
import torch

from tether.episodic.policy import Covariance, GaussianPolicy, PolicyConfig, WeightDistribution
from tether.errors import ConfigError, InvalidInputError

F64 = torch.float64


def make(covariance: Covariance = "full", contextual: bool = False, **settings: float) -> GaussianPolicy:
    config = PolicyConfig((16,), covariance=covariance, contextual_covariance=contextual, **settings)  # type: ignore[arg-type]
    policy = GaussianPolicy(config, 3, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    with torch.no_grad():  # away from the symmetric start
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
            parameter.add_(0.2 * noise)
    return policy


def contexts(number: int) -> torch.Tensor:
    return torch.randn(number, 3, generator=torch.Generator().manual_seed(2), dtype=F64)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("contextual", [False, True])
def test_density_and_entropy_are_those_of_torch_distributions(
    covariance: Covariance, contextual: bool
) -> None:
    distribution = make(covariance, contextual)(contexts(4))
    reference = torch.distributions.MultivariateNormal(distribution.mean, scale_tril=distribution.scale_tril)
    weights = contexts(4) @ torch.ones(3, 5, dtype=F64)
    assert torch.allclose(distribution.log_prob(weights), reference.log_prob(weights))
    assert torch.allclose(distribution.entropy().expand(4), reference.entropy())


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_samples_have_the_distributions_moments(covariance: Covariance) -> None:
    distribution = make(covariance)(contexts(1))
    noise = torch.randn(100_000, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    many = WeightDistribution(distribution.mean.expand(100_000, 5), distribution.scale, covariance)
    weights = many.weights(noise)
    expected = distribution.scale_tril @ distribution.scale_tril.mT
    assert (weights.mean(0) - distribution.mean[0]).abs().max() < 0.02
    assert (torch.cov(weights.mT) - expected).abs().max() < 0.03
    assert torch.equal(distribution.weights(torch.zeros(1, 5, dtype=F64)), distribution.mean)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("contextual", [False, True])
def test_initial_covariance_is_init_std_squared_times_the_identity(
    covariance: Covariance, contextual: bool
) -> None:
    config = PolicyConfig((16,), covariance=covariance, contextual_covariance=contextual, init_std=0.7)
    policy = GaussianPolicy(config, 3, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    factor = policy(torch.zeros(2, 3, dtype=F64)).scale_tril
    assert torch.allclose(factor, 0.7 * torch.eye(5, dtype=F64).expand_as(factor), atol=1e-12)


def test_the_covariance_ignores_the_context_unless_asked() -> None:
    assert make()(contexts(4)).scale.shape == (5, 5)
    scales = make(contextual=True)(contexts(4)).scale
    assert scales.shape == (4, 5, 5)
    assert not torch.allclose(scales[0], scales[1])


def test_exploration_cannot_fall_below_min_std() -> None:
    policy = make(min_std=0.01)
    with torch.no_grad():
        policy.scale_parameters.fill_(-100.0)
    assert torch.allclose(policy(contexts(1)).scale.diagonal(), torch.full((5,), 0.01, dtype=F64))


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_set_scale_is_read_back(covariance: Covariance) -> None:
    policy, other = make(covariance), make(covariance, init_std=0.3)
    wanted = other(contexts(1)).scale.detach()
    policy.set_scale(wanted)
    assert torch.allclose(policy(contexts(1)).scale, wanted, atol=1e-12)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_projection_meets_both_bounds_and_reports_what_it_did(covariance: Covariance) -> None:
    old = make(covariance)(contexts(6)).detach()
    new = WeightDistribution(old.mean + 1.0, old.scale * 1.5, covariance)
    projected, report = new.project(old, 0.05, 0.001)
    mean_part, cov_part = projected.kl(old)
    assert report.mean_projected.all()
    assert torch.allclose(mean_part, torch.full((6,), 0.05, dtype=F64))
    assert cov_part.item() == pytest.approx(0.001)


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="covariance is one of full, diagonal; got"):
        PolicyConfig(covariance="banded")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"min_std=2\.0 and init_std=1\.0"):
        PolicyConfig(min_std=2.0)
    with pytest.raises(ConfigError, match=r"init_std is at most 500, got 800\.0.*weights_scale"):
        PolicyConfig(init_std=800.0)
    for gain in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"mean_gain must be a finite number, got {gain}"):
            PolicyConfig(mean_gain=gain)
    with pytest.raises(ConfigError, match="activation is one of"):
        GaussianPolicy(PolicyConfig(activation="sine"), 3, 5, generator=torch.Generator())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sizes of at least 1"):
        GaussianPolicy(PolicyConfig(), 0, 5, generator=torch.Generator())
    with pytest.raises(InvalidInputError, match=r"contexts must be \[episodes, 3\], got \(2, 4\)"):
        make()(torch.zeros(2, 4, dtype=F64))
    with pytest.raises(ConfigError, match="cannot be set"):
        make(contextual=True).set_scale(torch.eye(5, dtype=F64))
    with pytest.raises(InvalidInputError, match=r"\(4, 4\)"):
        make().set_scale(torch.eye(4, dtype=F64))
