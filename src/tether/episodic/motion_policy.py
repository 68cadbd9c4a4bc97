"""What learners with a Gaussian policy over motions share: acting with it, and its trust region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from tether.episodic.config import GaussianConfig
from tether.episodic.episodes import EnvSpec, FloatArray, Starts
from tether.episodic.learner import Learner, Motions
from tether.episodic.policy import GaussianPolicy, WeightDistribution
from tether.errors import ConfigError
from tether.projection import GaussianProjection

GaussianConfigT = TypeVar("GaussianConfigT", bound=GaussianConfig)


@dataclass(frozen=True)
class SampledMotions(Motions):
    """Motions, and the distribution they were drawn from."""

    inputs: Tensor
    """What the policy saw, [E, C]."""

    distribution: WeightDistribution
    """What it answered; no gradient."""

    weights: Tensor
    """What was drawn from it, [E, W]."""

    starts: Starts
    """Where the motions begin."""


class MotionPolicyLearner(Learner[GaussianConfigT, SampledMotions]):
    """Draws the weights of whole motions from a Gaussian that depends on what is seen of the start.

    Raises:
        ConfigError: the policy would see nothing of the environment, or the bound on its entropy would rise.
    """

    sets_covariance: ClassVar[bool] = False
    """Whether `update` sets a covariance that all contexts share to its projection; it needs no pull."""

    def __init__(self, config: GaussianConfigT, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.dtype = torch.float32 if config.precision == "float32" else torch.float64
        size = self.seen_size
        if size < 1:
            raise ConfigError(f'{spec.env_id} has no task context. Use policy_input="observation" with it.')
        self.policy = GaussianPolicy(
            config.policy, size, self.motion.num_weights, generator=self.generator, dtype=self.dtype
        )
        with torch.no_grad():
            zeros = torch.zeros(1, size, dtype=self.dtype)
            self.initial_entropy = float(self.policy(zeros).entropy().mean())
        self._check_entropy_falls()

    def _check_entropy_falls(self) -> None:
        target, weights = self.config.trust_region.target_entropy, self.motion.num_weights
        at_first = self.initial_entropy / weights
        rounding = weights * torch.finfo(self.dtype).eps  # to stay where the policy begins is no rise
        if target is not None and target > at_first + rounding:
            raise ConfigError(
                f"target_entropy is {target:g} nats a weight, but the policy begins with {at_first:.3g}, "
                "from which its bound is to fall. Give a lower target_entropy, or a larger policy.init_std."
            )

    @torch.no_grad()
    def act(self, starts: Starts, *, explore: bool = True) -> SampledMotions:
        """Draw a motion for every start from the policy, or take its mean."""
        inputs = torch.as_tensor(self.seen(starts)).to(self.dtype)
        distribution = self.policy(inputs).detach()
        weights = distribution.weights(self._noise(distribution)) if explore else distribution.mean
        return SampledMotions(*self.trajectories(weights, starts), inputs, distribution, weights, starts)

    def _noise(self, distribution: WeightDistribution) -> Tensor:
        """Standard normal, for the weights of each motion."""
        return torch.empty_like(distribution.mean).normal_(generator=self.generator)

    def seen(self, starts: Starts) -> FloatArray:
        return starts.observations if self.config.policy_input == "observation" else starts.contexts

    @property
    def seen_size(self) -> int:
        of = self.spec
        return of.observation_size if self.config.policy_input == "observation" else of.context_size

    def planner(self) -> nn.Module:
        return _MeanWeights(self.policy, self.dtype)

    def _project(
        self, inputs: Tensor, old: WeightDistribution, progress: float
    ) -> tuple[WeightDistribution, WeightDistribution, GaussianProjection]:
        """What the policy's network says now, its projection around `old`, and the projection's report."""
        region = self.config.trust_region
        network: WeightDistribution = self.policy(inputs)
        projected, report = network.project(
            old, region.mean_bound, region.cov_bound, method=region.method,
            entropy_bound=region.entropy_bound(self.initial_entropy, self.motion.num_weights, progress),
        )  # fmt: skip
        return network, projected, report

    def _pulled(
        self, gain: Tensor, network: WeightDistribution, projected: WeightDistribution
    ) -> tuple[Tensor, Tensor]:
        """The loss of a gain and of KL(network || projected), as far as it is pulled, and that divergence."""
        of_mean, of_covariance = (part.mean() for part in network.kl(projected.detach()))
        set_later = self.sets_covariance and not self.config.policy.contextual_covariance
        mean_alone = set_later and not self.config.trust_region.pull_covariance
        regression = of_mean if mean_alone else of_mean + of_covariance
        return -gain + self.config.trust_region.regression_weight * regression, regression

    def _tensor(self, values: FloatArray) -> Tensor:
        return torch.as_tensor(values).to(self.dtype)


def region_metrics(report: GaussianProjection, regression: Tensor, loss: Tensor) -> dict[str, float]:
    """What a gradient step of the policy says of its trust region; divergences before the projection."""
    return {
        "kl_mean_part": report.mean_kl.mean().item(),
        "kl_cov_part": report.cov_kl.mean().item(),
        "projected": report.mean_projected.double().mean().item(),
        "projected_cov": report.cov_projected.double().mean().item(),
        "regression": regression.item(),
        "policy_loss": loss.item(),
    }


class _MeanWeights(nn.Module):
    """The weights of a policy's mean motion."""

    def __init__(self, policy: GaussianPolicy, dtype: torch.dtype) -> None:
        super().__init__()
        self.policy = policy
        self.dtype = dtype

    def forward(self, seen: Tensor) -> Tensor:
        mean: Tensor = self.policy(seen.to(self.dtype)).mean
        return mean
