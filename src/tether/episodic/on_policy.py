"""What TCE and BBRL share: one batch of motions, one critic, and a policy moved within a trust region."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tether.episodic.config import OnPolicyConfig
from tether.episodic.critic import Critic
from tether.episodic.episodes import EnvSpec, Episodes, FloatArray, Starts
from tether.episodic.learner import Learner, Motions, Stateful
from tether.episodic.policy import GaussianPolicy, WeightDistribution
from tether.errors import ConfigError, InvalidInputError
from tether.projection import GaussianProjection


@dataclass(frozen=True)
class SampledMotions(Motions):
    """Motions, and the distribution they were drawn from."""

    inputs: Tensor
    """What the policy saw, [E, C]."""

    distribution: WeightDistribution
    """What it answered; no gradient."""

    weights: Tensor
    """What was drawn from it, [E, W]."""


class OnPolicyLearner(Learner[OnPolicyConfig, SampledMotions]):
    """A Gaussian policy over motions that learns from the episodes of its last batch alone.

    Raises:
        ConfigError: settings that do not fit the environment.
    """

    config_type = OnPolicyConfig

    def __init__(self, config: OnPolicyConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.dtype = torch.float32 if config.precision == "float32" else torch.float64
        size = self.seen_size
        if size < 1:
            raise ConfigError(f'{spec.env_id} has no task context. Use policy_input="observation" with it.')
        self.policy = GaussianPolicy(
            config.policy, size, self.motion.num_weights, generator=self.generator, dtype=self.dtype
        )
        self.critic = Critic(
            config.critic, self._critic_input_size(), generator=self.generator, dtype=self.dtype
        )
        self.policy_optimizer: torch.optim.Optimizer = torch.optim.Adam(
            self.policy.parameters(), config.update.learning_rate, weight_decay=config.update.weight_decay
        )
        self.critic_optimizer = torch.optim.Adam(
            self.critic.network.parameters(),
            config.critic.learning_rate,
            weight_decay=config.critic.weight_decay,
        )
        with torch.no_grad():
            zeros = torch.zeros(1, size, dtype=self.dtype)
            self.initial_entropy = float(self.policy(zeros).entropy().mean())
        self._batch: tuple[SampledMotions, Episodes] | None = None

    @abstractmethod
    def _critic_input_size(self) -> int:
        """Number of features the critic sees."""

    @abstractmethod
    def _learn(self, motions: SampledMotions, episodes: Episodes, progress: float) -> dict[str, float]:
        """Improve policy and critic by one batch; metrics of the update."""

    @torch.no_grad()
    def act(self, starts: Starts, *, explore: bool = True) -> SampledMotions:
        """Draw a motion for every start from the policy, or take its mean."""
        inputs = torch.as_tensor(self.seen(starts)).to(self.dtype)
        distribution = self.policy(inputs).detach()
        noise = torch.zeros_like(distribution.mean)
        if explore:
            noise.normal_(generator=self.generator)
        weights = distribution.weights(noise)
        return SampledMotions(*self.trajectories(weights, starts), inputs, distribution, weights)

    def seen(self, starts: Starts) -> FloatArray:
        return starts.observations if self.config.policy_input == "observation" else starts.contexts

    @property
    def seen_size(self) -> int:
        of = self.spec
        return of.observation_size if self.config.policy_input == "observation" else of.context_size

    def planner(self) -> nn.Module:
        return _MeanWeights(self.policy, self.dtype)

    def observe(self, motions: SampledMotions, episodes: Episodes) -> None:
        self._batch = motions, episodes

    def update(self, progress: float) -> dict[str, float]:
        """One iteration of learning from the observed batch, which is forgotten afterwards."""
        if self._batch is None:
            raise InvalidInputError("update learns from the episodes of observe; call that first.")
        (motions, episodes), self._batch = self._batch, None
        return self._learn(motions, episodes, progress)

    def parts(self) -> Mapping[str, Stateful]:
        return {
            "policy": self.policy,
            "critic": self.critic,
            "policy_optimizer": self.policy_optimizer,
            "critic_optimizer": self.critic_optimizer,
        }

    def _project(
        self, motions: SampledMotions, progress: float
    ) -> tuple[WeightDistribution, WeightDistribution, GaussianProjection]:
        """What the policy's network says now, its projection, and the projection's report."""
        region = self.config.trust_region
        network: WeightDistribution = self.policy(motions.inputs)
        projected, report = network.project(
            motions.distribution, region.mean_bound, region.cov_bound, method=region.method,
            entropy_bound=region.entropy_bound(self.initial_entropy, self.motion.num_weights, progress),
        )  # fmt: skip
        return network, projected, report

    def _improve_policy(
        self, motions: SampledMotions, progress: float, objective: Callable[[WeightDistribution], Tensor]
    ) -> dict[str, float]:
        """Maximise the objective of the projected policy, and pull the network towards its projection."""
        started = time.perf_counter()
        self._set_learning_rates(progress)
        unconverged = 0
        for _ in range(self.config.update.epochs):
            network, projected, report = self._project(motions, progress)
            unconverged += not bool(report.cov_converged.all())
            gain = objective(projected)
            regression = torch.stack([part.mean() for part in network.kl(projected.detach())]).sum()
            loss = -gain + self.config.trust_region.regression_weight * regression
            self.policy_optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.policy_optimizer.step()
        return {
            "kl_mean_part": report.mean_kl.mean().item(),
            "kl_cov_part": report.cov_kl.mean().item(),
            "projected": report.mean_projected.double().mean().item(),
            "projected_cov": report.cov_projected.double().mean().item(),
            "unconverged_projections": float(unconverged),
            "regression": regression.item(),
            "policy_loss": loss.item(),
            "entropy": motions.distribution.entropy().mean().item(),
            "learning_rate": self.policy_optimizer.param_groups[0]["lr"],
            "policy_seconds": time.perf_counter() - started,
        }

    def _set_learning_rates(self, progress: float) -> None:
        factor = self.config.update.learning_rate_factor(progress)
        for optimizer, base in (
            (self.policy_optimizer, self.config.update.learning_rate),
            (self.critic_optimizer, self.config.critic.learning_rate),
        ):
            for group in optimizer.param_groups:
                group["lr"] = base * factor

    def _tensor(self, values: FloatArray) -> Tensor:
        return torch.as_tensor(values).to(self.dtype)


class _MeanWeights(nn.Module):
    """The weights of a policy's mean motion."""

    def __init__(self, policy: GaussianPolicy, dtype: torch.dtype) -> None:
        super().__init__()
        self.policy = policy
        self.dtype = dtype

    def forward(self, seen: Tensor) -> Tensor:
        mean: Tensor = self.policy(seen.to(self.dtype)).mean
        return mean
