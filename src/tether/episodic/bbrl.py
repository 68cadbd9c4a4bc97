"""BBRL: credit for whole episodes, the baseline of TCE."""

from __future__ import annotations

import torch

from tether.episodic.episodes import Episodes
from tether.episodic.motion_policy import SampledMotions
from tether.episodic.on_policy import OnPolicyLearner
from tether.episodic.policy import WeightDistribution
from tether.episodic.segments import normalised


class BBRL(OnPolicyLearner):
    """Deep black-box RL: one action (the weights), one reward (the return) an episode.

    Maximises mean(p(w) / p_old(w) A) with A = return - V(context), normalised over the batch. After each
    iteration a covariance that is no function of the context is replaced by its projection; as published the
    network is pulled towards the mean's projection alone (``pull_covariance=False``, in the presets).

    Source: deep black-box RL (arXiv 2210.09622).
    """

    sets_covariance = True

    def _critic_input_size(self) -> int:
        return self.policy.context_size

    def _learn(self, motions: SampledMotions, episodes: Episodes, progress: float) -> dict[str, float]:
        returns = self._tensor(episodes.returns)
        self.critic.observe(motions.inputs)
        with torch.no_grad():
            advantages = normalised(returns - self.critic(motions.inputs))
            old = motions.distribution.log_prob(motions.weights)

        def objective(projected: WeightDistribution) -> torch.Tensor:
            return ((projected.log_prob(motions.weights) - old).exp() * advantages).mean()

        metrics = self._improve(motions, progress, objective, motions.inputs, returns)
        if not self.config.policy.contextual_covariance:
            with torch.no_grad():
                _, projected, _ = self._project(motions.inputs, motions.distribution, progress)
            self.policy.set_scale(projected.scale)
        return metrics
