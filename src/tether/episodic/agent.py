"""What TCE and BBRL share: plan whole motions, keep a critic, move the policy within a trust region."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tether.episodic.adapters import EnvSpec, FloatArray
from tether.episodic.config import EpisodicConfig
from tether.episodic.critic import Critic
from tether.episodic.policy import GaussianPolicy, WeightDistribution
from tether.episodic.prodmp import ProDMP
from tether.episodic.sampler import Episodes, Starts
from tether.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Plan:
    """Motions chosen for a batch of E starts."""

    inputs: Tensor
    """What the policy saw, [E, C]."""

    distribution: WeightDistribution
    """What it answered; no gradient."""

    weights: Tensor
    """What was drawn from it, [E, W]."""

    positions: FloatArray
    """Desired positions, [E, T, D]."""

    velocities: FloatArray
    """Desired velocities, [E, T, D] per second."""


class EpisodicAgent(ABC):
    """A policy over motions that learns from the episodes in which they were tried.

    Args:
        config: the run.
        spec: sizes of the environment.

    Raises:
        ConfigError: settings that do not fit the environment.
    """

    def __init__(self, config: EpisodicConfig, spec: EnvSpec) -> None:
        self.config = config
        self.spec = spec
        self.dtype = torch.float32 if config.precision == "float32" else torch.float64
        self.generator = torch.Generator().manual_seed(config.seed)
        self.motion = ProDMP(config.motion, spec.num_dof)
        self.basis = self.motion.basis(spec.dt * np.arange(1, spec.horizon + 1, dtype=np.float64))
        size = spec.observation_size if config.policy_input == "observation" else spec.context_size
        if size < 1:
            raise ConfigError(f'{spec.env_id} has no task context. Use policy_input="observation" with it.')
        self.policy = GaussianPolicy(
            config.policy, size, self.motion.num_weights, generator=self.generator, dtype=self.dtype
        )
        self.critic = Critic(
            config.critic, self._critic_input_size(), generator=self.generator, dtype=self.dtype
        )
        self.policy_optimizer = torch.optim.Adam(
            self.policy.parameters(),
            lr=config.update.learning_rate,
            weight_decay=config.update.weight_decay,
        )
        self.critic_optimizer = torch.optim.Adam(
            self.critic.network.parameters(),
            lr=config.critic.learning_rate,
            weight_decay=config.critic.weight_decay,
        )
        with torch.no_grad():
            zeros = torch.zeros(1, size, dtype=self.dtype)
            self.initial_entropy = float(self.policy(zeros).entropy().mean())

    @abstractmethod
    def _critic_input_size(self) -> int:
        """Features the critic sees."""

    @abstractmethod
    def update(self, plan: Plan, episodes: Episodes, progress: float) -> dict[str, float]:
        """Improve policy and critic by the episodes of a plan.

        Args:
            plan: what `plan` chose.
            episodes: what became of it.
            progress: fraction of the training that lies behind, in [0, 1]; drives the schedules.

        Returns:
            Metrics of the update.
        """

    @torch.no_grad()
    def plan(self, starts: Starts, *, deterministic: bool = False) -> Plan:
        """Choose a motion for every start: drawn from the policy, or its mean."""
        seen = starts.observations if self.config.policy_input == "observation" else starts.contexts
        inputs = torch.as_tensor(seen).to(self.dtype)
        distribution = self.policy(inputs).detach()
        noise = torch.zeros_like(distribution.mean)
        if not deterministic:
            noise.normal_(generator=self.generator)
        weights = distribution.weights(noise)
        positions, velocities = self.motion.trajectory(
            weights.double(),
            torch.as_tensor(starts.positions),
            torch.as_tensor(starts.velocities),
            self.basis,
        )
        return Plan(inputs, distribution, weights, positions.numpy(), velocities.numpy())

    def _improve_policy(
        self,
        plan: Plan,
        progress: float,
        objective: Callable[[WeightDistribution], Tensor],
    ) -> dict[str, float]:
        """Maximise the objective of the projected policy and pull the network after the projection."""
        started = time.perf_counter()
        region = self.config.trust_region
        bound = region.entropy_bound(self.initial_entropy, self.motion.num_weights, progress)
        self._set_learning_rates(progress)
        metrics: dict[str, float] = {}
        for epoch in range(self.config.update.epochs):
            network = self.policy(plan.inputs)
            projected, report = network.project(
                plan.distribution, region.mean_bound, region.cov_bound,
                method=region.method, entropy_bound=bound,
            )  # fmt: skip
            gain = objective(projected)
            regression = torch.stack([part.mean() for part in network.kl(projected.detach())]).sum()
            loss = -gain + region.regression_weight * regression
            self.policy_optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.policy_optimizer.step()
            if epoch == self.config.update.epochs - 1:
                metrics = {
                    "kl_mean_part": report.mean_kl.mean().item(),
                    "kl_cov_part": report.cov_kl.mean().item(),
                    "projected": report.mean_projected.double().mean().item(),
                    "projected_cov": report.cov_projected.double().mean().item(),
                    "regression": regression.item(),
                    "policy_loss": loss.item(),
                }
        metrics["entropy"] = plan.distribution.entropy().mean().item()
        metrics["learning_rate"] = self.policy_optimizer.param_groups[0]["lr"]
        metrics["policy_seconds"] = time.perf_counter() - started
        return metrics

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

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes in training: networks, statistics, optimisers, random generator."""
        return {
            "env_id": self.spec.env_id,
            "algo": self.config.algo,
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "policy_optimizer": self.policy_optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            CheckpointError: the state of another environment, algorithm or network.
        """
        own = self.state_dict()
        if state.keys() != own.keys():
            raise CheckpointError(f"Not an episodic agent's state: it holds {sorted(state)[:8]}.")
        for name in ("env_id", "algo"):
            if state[name] != own[name]:
                raise CheckpointError(
                    f"The checkpoint is of {name} {state[name]!r}, but this is {own[name]!r}. "
                    "Give the run folder it belongs to."
                )
        try:
            self.policy.load_state_dict(state["policy"])
            self.critic.load_state_dict(state["critic"])
            self.policy_optimizer.load_state_dict(state["policy_optimizer"])
            self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"The checkpoint is of networks of other sizes than configured ({error})."
            ) from error
        self.generator.set_state(state["generator"])
