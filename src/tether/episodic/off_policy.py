"""TOPERL: motions learned from a replay of episodes, through a critic of their segments. Experimental."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tether.episodic.config import OffPolicyConfig
from tether.episodic.episodes import EnvSpec, Episodes, FloatArray
from tether.episodic.learner import Stateful
from tether.episodic.motion_policy import MotionPolicyLearner, SampledMotions, region_metrics
from tether.episodic.networks import follow
from tether.episodic.policy import WeightDistribution
from tether.episodic.prodmp import ProDMP
from tether.episodic.replay import Replay
from tether.episodic.segment_critic import SegmentCritic
from tether.episodic.segments import rewards_at_event
from tether.episodic.statistics import RunningStatistics


class TOPERL(MotionPolicyLearner[OffPolicyConfig]):
    """Off-policy episodic RL: a transformer values segments of motions, and the policy follows it.

    An episode is read in pieces of `stride` steps: the state s_k before each, the desired position a_k at
    its end, what it earned. Every gradient step cuts its episodes into segments of one length, from a random
    offset on. With V' and Q' of slowly following copies, and a' what the projected policy would ask of the
    robot from the desired position and velocity at s_k on, the critic learns

        V(s_k)              <-  Q'(s_k, a'_1 .. a'_L)
        Q(s_k, a_1 .. a_i)  <-  sum_{j<i} gamma^j r_{k+j} + gamma^i V'(s_{k+i}),   V' = 0 past the end

    and the policy maximises the mean of Q(s_k, a_1 .. a_i) over the segments and i, where a is the motion
    from the episode's start, drawn from the projection of the network around its slowly following copy. The
    network is drawn to its projection as in TCE.

    Rewards are centred and scaled by the returns in the replay, so that values are of order 1.

    Source: TOP-ERL (arXiv 2410.09536). Other than there: the critic reads every `stride`-th step; of two
    critics the lower counts; the mean of Q over i, not the sum, so that gradients do not grow with segments.
    """

    config_type = OffPolicyConfig

    def __init__(self, config: OffPolicyConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        of = config.replay
        #: Steps at which the critic looks: before each piece, and the end.
        self.steps = torch.tensor([*range(0, spec.horizon, of.stride), spec.horizon])
        self.pieces = len(self.steps) - 1
        self._restarts = Restarts(self.motion, spec.dt * self.steps.numpy(), self.dtype)
        self._uncut = Cut(torch.tensor([0]), self.pieces)
        self.critic = SegmentCritic(
            config.critic, spec.observation_size + 1, spec.num_dof, self.pieces,
            generator=self.generator, dtype=self.dtype,
        )  # fmt: skip
        self.slow_policy, self.slow_critic = copy.deepcopy((self.policy, self.critic))
        self.state_statistics = RunningStatistics(spec.observation_size + 1)
        self.action_statistics = RunningStatistics(spec.num_dof)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), config.learning_rate)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), config.critic.learning_rate)
        self.replay = Replay(of.capacity)

    def parts(self) -> Mapping[str, Stateful]:
        names = ("policy", "slow_policy", "critic", "slow_critic", "state_statistics", "action_statistics",
                 "policy_optimizer", "critic_optimizer", "replay")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def observe(self, motions: SampledMotions, episodes: Episodes) -> None:
        seen = self.steps.numpy()
        states = self._tensor(episodes.observations[:, seen])
        passed = (self.spec.dt * self.steps).to(self.dtype)[:, None].expand(*states.shape[:2], 1)
        starts = motions.starts
        row = {
            "inputs": motions.inputs,
            "states": torch.cat((states, passed), dim=-1),
            "rewards": self._earned(episodes),
            "positions": self._asked(starts.positions, motions.positions),
            "velocities": self._asked(starts.velocities, motions.velocities),
        }
        self.state_statistics.update(row["states"])
        self.action_statistics.update(row["positions"][:, 1:])
        self.replay.add(row)

    def update(self, progress: float) -> dict[str, float]:
        """One iteration: the critic's gradient steps, then the policy's."""
        started = time.perf_counter()
        for _ in range(self.config.critic.epochs):
            critic = self._fit_critic(progress)
            follow(self.slow_critic, self.critic, self.config.polyak)
        critic_seconds = time.perf_counter() - started
        self.critic.requires_grad_(False)
        for _ in range(self.config.epochs):
            policy = self._improve_policy(progress)
            follow(self.slow_policy, self.policy, self.config.polyak)
        self.critic.requires_grad_(True)
        return {
            **critic,
            **policy,
            "replay": float(len(self.replay)),
            "critic_seconds": critic_seconds,
            "policy_seconds": time.perf_counter() - started - critic_seconds,
        }

    def _fit_critic(self, progress: float) -> dict[str, float]:
        drawn, cut = self._draw(), self._cut()
        states = self.state_statistics(drawn["states"])
        actions = self.action_statistics(drawn["positions"][:, 1:])
        with torch.no_grad():
            values_wanted, returns_wanted = self._targets(drawn, states, cut, progress)
        values, returns = self.critic(
            states[:, cut.starts].flatten(0, 1), actions[:, cut.steps].flatten(0, 1)
        )
        loss = (values - values_wanted).square().mean() + (returns - returns_wanted).square().mean()
        self.critic_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.critic_optimizer.step()
        return {"critic_loss": loss.item(), "value_mean": values.mean().item()}

    def _targets(
        self, drawn: dict[str, Tensor], states: Tensor, cut: Cut, progress: float
    ) -> tuple[Tensor, Tensor]:
        """Of the values [N] and of the returns [N, L], N being all segments of all episodes drawn."""
        values = self.slow_critic.values(states).amin(0)
        values[:, -1] = 0.0
        rewards = self._scaled(drawn["rewards"])
        returns = n_step_returns(rewards, values, self.steps, self.config.replay.gamma, cut)
        _, projected, _ = self._project(drawn["inputs"], self._old(drawn["inputs"]), progress)
        positions = self._restarts.positions(
            self._drawn_weights(projected), drawn["positions"], drawn["velocities"], cut
        )
        begun = states[:, cut.starts].flatten(0, 1)
        _, expected = self.slow_critic(begun, self.action_statistics(positions).flatten(0, 1))
        return expected.amin(0)[:, -1], returns.flatten(0, 1)

    def _improve_policy(self, progress: float) -> dict[str, float]:
        drawn, cut = self._draw(), self._cut()
        network, projected, report = self._project(drawn["inputs"], self._old(drawn["inputs"]), progress)
        weights = self._drawn_weights(projected)
        whole = self._restarts.positions(weights, drawn["positions"], drawn["velocities"], self._uncut)
        actions = self.action_statistics(whole[:, 0])[:, cut.steps]
        states = self.state_statistics(drawn["states"])[:, cut.starts]
        _, returns = self.critic(states.flatten(0, 1), actions.flatten(0, 1))
        gain = returns.amin(0).mean()
        loss, regression = self._pulled(gain, network, projected)
        self.policy_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.policy_optimizer.step()
        return {
            **region_metrics(report, regression, loss),
            "gain": gain.item(),
            "entropy": network.entropy().mean().item(),
        }

    @torch.no_grad()
    def _old(self, inputs: Tensor) -> WeightDistribution:
        old: WeightDistribution = self.slow_policy(inputs)
        return old

    def _drawn_weights(self, distribution: WeightDistribution) -> Tensor:
        noise = torch.empty_like(distribution.mean).normal_(generator=self.generator)
        return distribution.weights(noise)

    def _draw(self) -> dict[str, Tensor]:
        return self.replay.draw(self.config.replay.batch, self.generator)

    def _cut(self) -> Cut:
        most = min(self.config.replay.segments, self.pieces)
        number = int(torch.randint(1, most + 1, (), generator=self.generator))
        length = self.pieces // number
        offset = int(torch.randint(length, (), generator=self.generator)) if number > 1 else 0
        return Cut(torch.arange(offset, self.pieces - length + 1, length), length)

    def _asked(self, first: FloatArray, later: FloatArray) -> Tensor:
        """What the robot is asked for at each of `steps`, [E, P + 1, D], from the start and all steps."""
        # Row t of a motion is where the robot is asked to be after step t.
        return self._tensor(np.concatenate((first[:, None], later[:, self.steps[1:].numpy() - 1]), axis=1))

    def _earned(self, episodes: Episodes) -> Tensor:
        """In each piece, [E, P], discounted to its beginning."""
        rewards = self._tensor(episodes.rewards)
        if self.config.replay.shift_rewards:
            rewards = rewards_at_event(rewards, torch.as_tensor(episodes.event_steps))
        step = torch.arange(self.spec.horizon)
        piece = torch.bucketize(step, self.steps, right=True) - 1
        discounted = rewards * self.config.replay.gamma ** (step - self.steps[piece]).to(self.dtype)
        return rewards.new_zeros(len(rewards), self.pieces).index_add(1, piece, discounted)

    def _scaled(self, rewards: Tensor) -> Tensor:
        """Rewards of which whole episodes of the replay sum to 0 in the mean, with a deviation of 1."""
        returns = self.replay["rewards"].sum(-1)
        deviation = returns.std(correction=0)
        mean = returns.mean()
        varies = deviation > 1e-6 * (1 + mean.abs())
        return (rewards - mean / self.pieces) / torch.where(varies, deviation, torch.ones_like(deviation))


@dataclass(frozen=True)
class Cut:
    """Segments of one length."""

    starts: Tensor
    """The piece that each begins with, [S]."""

    length: int
    """L, pieces of each."""

    @property
    def steps(self) -> Tensor:
        """The pieces of each, [S, L]."""
        return self.starts[:, None] + torch.arange(self.length)


def n_step_returns(rewards: Tensor, values: Tensor, steps: Tensor, gamma: float, cut: Cut) -> Tensor:
    """What the first i pieces of each segment earn, and what the state after them is worth, [E, S, L].

    Args:
        rewards: of each piece, discounted to its beginning, [E, P].
        values: of the states between them and after the last, [E, P + 1].
        steps: when those states are, [P + 1].
        gamma: discount per step.
        cut: the segments.

    Source: n-step returns, TOP-ERL (arXiv 2410.09536, equation 7).

    Example:
        >>> rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.0, 10.0, 20.0, 0.0]])
        >>> n_step_returns(rewards, values, torch.arange(4), 1.0, Cut(torch.tensor([1]), 2)).tolist()
        [[[22.0, 6.0]]]
    """
    ahead = cut.steps + 1
    begun = steps[cut.starts, None]
    # From each segment's own start: discounts from the episode's vanish in float32 where gamma is small.
    before, after = (gamma ** (steps[at] - begun).to(rewards.dtype) for at in (cut.steps, ahead))
    return (rewards[:, cut.steps] * before).cumsum(-1) + after * values[:, ahead]


class Restarts:
    """A motion's positions at fixed times, taken up at any of them from what was asked of the robot then.

    The goal of a relative motion stays measured from where the whole motion began.

    Args:
        motion: the movement primitive.
        times: P + 1 of them, in seconds, rising from 0.
        dtype: of the coefficients.
    """

    def __init__(self, motion: ProDMP, times: FloatArray, dtype: torch.dtype) -> None:
        absolute = ProDMP(replace(motion.config, relative_goal=False), motion.num_dof)
        self._shape = (motion.num_dof, motion.config.num_basis + 1)
        weights, position, velocity, goal = [], [], [], []
        for begin in times[:-1]:
            # Times before are never asked for; they are filled with the first one that may be.
            at = np.maximum(times[1:], begin)
            own, whole = absolute.basis(at, begin), motion.basis(at, begin)
            weights.append(own.positions)
            position.append(own.position_from_position)
            velocity.append(own.position_from_velocity)
            goal.append(whole.position_from_position - own.position_from_position)
        self._weights, self._position, self._velocity, self._goal = (
            torch.stack(rows).to(dtype) for rows in (weights, position, velocity, goal)
        )

    def positions(self, weights: Tensor, asked: Tensor, velocities: Tensor, cut: Cut) -> Tensor:
        """Positions at the end of each piece of each segment, [E, S, L, D].

        Args:
            weights: of the motions, [E, W].
            asked: positions asked of the robot at all times, [E, P + 1, D], from which segments begin.
            velocities: and velocities.
            cut: the segments.
        """
        at = (cut.starts[:, None], cut.steps)
        return (
            torch.einsum("slk,edk->esld", self._weights[at], weights.unflatten(-1, self._shape))
            + self._position[at][..., None] * asked[:, cut.starts, None]
            + self._velocity[at][..., None] * velocities[:, cut.starts, None]
            + self._goal[at][..., None] * asked[:, :1, None]
        )
