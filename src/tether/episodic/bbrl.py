"""BBRL: the episode as a black box, the baseline TCE opens."""

from __future__ import annotations

import time

import torch

from tether.episodic.agent import EpisodicAgent, Plan
from tether.episodic.policy import WeightDistribution
from tether.episodic.sampler import Episodes
from tether.episodic.segments import normalised


class BBRL(EpisodicAgent):
    """Deep black-box RL: one action (the weights), one reward (the return) an episode.

    Maximises mean(p(w) / p_old(w) A) with A = return - V(context), normalised over the batch. After each
    iteration a covariance that is no function of the context is replaced by its projection.

    Source: deep black-box RL (arXiv 2210.09622).
    """

    def _critic_input_size(self) -> int:
        return self.policy.context_size

    def update(self, plan: Plan, episodes: Episodes, progress: float) -> dict[str, float]:
        started = time.perf_counter()
        returns = self._tensor(episodes.returns)
        self.critic.observe(plan.inputs)
        with torch.no_grad():
            advantages = normalised(returns - self.critic(plan.inputs))
            old = plan.distribution.log_prob(plan.weights)
        self._set_learning_rates(progress)
        critic_loss = self.critic.fit(self.critic_optimizer, plan.inputs, returns)
        critic_seconds = time.perf_counter() - started

        def objective(projected: WeightDistribution) -> torch.Tensor:
            return ((projected.log_prob(plan.weights) - old).exp() * advantages).mean()

        metrics = self._improve_policy(plan, progress, objective)
        if not self.config.policy.contextual_covariance:
            self._overwrite_covariance(plan, progress)
        return metrics | {"critic_loss": critic_loss, "critic_seconds": critic_seconds}

    @torch.no_grad()
    def _overwrite_covariance(self, plan: Plan, progress: float) -> None:
        region = self.config.trust_region
        projected, _ = self.policy(plan.inputs).project(
            plan.distribution, region.mean_bound, region.cov_bound, method=region.method,
            entropy_bound=region.entropy_bound(self.initial_entropy, self.motion.num_weights, progress),
        )  # fmt: skip
        self.policy.set_scale(projected.scale)
