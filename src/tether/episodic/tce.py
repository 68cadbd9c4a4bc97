"""TCE: whole motions are chosen, but credit is given to their segments."""

from __future__ import annotations

import torch

from tether.episodic.config import OnPolicyConfig
from tether.episodic.episodes import EnvSpec, Episodes
from tether.episodic.motion_policy import SampledMotions
from tether.episodic.on_policy import OnPolicyLearner
from tether.episodic.policy import WeightDistribution
from tether.episodic.segments import (
    gae_returns,
    normalised,
    rewards_at_event,
    segment_advantages,
    segment_log_probs,
    segment_points,
)
from tether.errors import ConfigError


class TCE(OnPolicyLearner):
    """Temporally-correlated episodic RL.

    Maximises mean(p(segment) / p_old(segment) A(segment)) over episodes and segments, where p is the
    likelihood of a segment's end positions under the projected policy and A what the segment earned
    beyond the critic's expectation, normalised over the batch.

    Source: TCE (arXiv 2401.11437, algorithm 1).
    """

    def __init__(self, config: OnPolicyConfig, spec: EnvSpec) -> None:
        if config.critic.state_stride > spec.horizon:
            raise ConfigError(
                f"state_stride must be at most {spec.horizon}, the steps of an episode of {spec.env_id}; got "
                f"{config.critic.state_stride}."
            )
        points = segment_points(spec.horizon, config.update.segment_points, 0)  # refuses more than steps
        last = spec.dt * (int(points[-1]) + 1)
        if config.motion.delay >= last:
            raise ConfigError(
                f"motion.delay={config.motion.delay:g} lets nothing move before {last:g} s, the last point "
                f"at which the motions of {spec.env_id} may be cut. Lower it."
            )
        super().__init__(config, spec)

    def _critic_input_size(self) -> int:
        return self.spec.observation_size + self.config.critic.time_input

    def _critic_inputs(self, episodes: Episodes) -> torch.Tensor:
        """The state before each step, [E, T, O], and the time if the critic is told.

        The policy decides at time 0, so it has no use for a clock: the weights of an input that is always 0
        get no gradient, and change no output.
        """
        observations = self._tensor(episodes.observations[:, :-1])
        if not self.config.critic.time_input:
            return observations
        passed = self.spec.dt * torch.arange(observations.shape[1], dtype=self.dtype)
        return torch.cat((observations, passed[:, None].expand(*observations.shape[:2], 1)), dim=-1)

    def _learn(self, motions: SampledMotions, episodes: Episodes, progress: float) -> dict[str, float]:
        config = self.config.update
        states = self._critic_inputs(episodes)
        rewards = self._tensor(episodes.rewards)
        if config.shift_rewards:
            rewards = rewards_at_event(rewards, torch.as_tensor(episodes.event_steps))
        self.critic.observe(states)
        with torch.no_grad():
            values = self.critic(states)
        targets = gae_returns(rewards, values, gamma=config.gamma, gae_lambda=config.gae_lambda)
        points = self._draw_points()
        advantages = normalised(
            segment_advantages(
                rewards, values, points, gamma=config.gamma, include_last_reward=config.include_last_reward
            )
        )
        chosen = self._draw_states()
        basis = self.basis.positions.to(self.dtype)
        pair_basis = torch.stack((basis[points[:-1]], basis[points[1:]]), dim=1)

        def log_probs(distribution: WeightDistribution) -> torch.Tensor:
            return segment_log_probs(
                motions.weights, distribution.mean, distribution.scale_tril, pair_basis, self.spec.num_dof
            )

        with torch.no_grad():
            old = log_probs(motions.distribution)

        def objective(projected: WeightDistribution) -> torch.Tensor:
            return ((log_probs(projected) - old).exp() * advantages).mean()

        return self._improve(
            motions, progress, objective, states[:, chosen].flatten(0, 1), targets[:, chosen].flatten()
        )

    def _draw_states(self) -> slice:
        """Which steps of every episode this iteration's critic is fitted on."""
        stride = self.config.critic.state_stride
        first = int(torch.randint(stride, (), generator=self.generator)) if stride > 1 else 0
        return slice(first, None, stride)

    def _draw_points(self) -> torch.Tensor:
        """Where this iteration cuts its motions; the offset is drawn, so that every step is one at times."""
        horizon, number = self.spec.horizon, self.config.update.segment_points
        spacing = max(horizon // number, 1)
        offset = int(torch.randint(spacing, (), generator=self.generator))
        return segment_points(horizon, number, offset)
