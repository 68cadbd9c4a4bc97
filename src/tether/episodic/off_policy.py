"""TOPERL: motions learned from a replay of episodes, through a critic of their segments. Experimental."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tether.episodic.config import OffPolicyConfig
from tether.episodic.episodes import EnvSpec, Episodes, FloatArray
from tether.episodic.learner import Stateful
from tether.episodic.motion_policy import MotionPolicyLearner, SampledMotions, region_metrics
from tether.episodic.networks import adam
from tether.episodic.policy import GaussianPolicy, WeightDistribution
from tether.episodic.replay import Replay
from tether.episodic.segment_critic import SegmentCritic
from tether.episodic.statistics import RunningStatistics


class TOPERL(MotionPolicyLearner[OffPolicyConfig]):
    """Off-policy episodic RL: a transformer says what a motion earns, and the policy follows it.

    An episode is read in P pieces: the state s_k before each, the desired position a_k at its end, and what
    it earned, r_k. Every gradient step of the critic cuts its episodes into segments of one length, from a
    random offset on. From where a segment begins, the critic learns what each beginning of it earned,

        Q(s_k, a_1 .. a_i)  <-  r_k + .. + r_{k+i-1}

    and the policy maximises Q(s_0, a_1 .. a_P), where a is a motion drawn from the projection of its network
    around the policy that gathered the latest episodes. The network is drawn to its projection as in TCE.
    A share of what each gradient step reads (`replay.best`) is of the tenth of the episodes that earned most:
    what luck finds once in a hundred episodes would be averaged away.
    Each motion, tried or imagined, deviates from the mean by a share of the policy's deviation between
    `least_noise` and 1.

    Rewards are centred and scaled by the returns in the replay, so that what is learned is of order 1.

    Source: TOP-ERL (arXiv 2410.09536): replay of whole episodes, transformer over segments, trust region.
    Other than there, no target holds an estimate. A motion is decided at its start, so that what comes of it
    can be seen to the end; with the value of the state at a segment's end as there, a few hundred episodes
    taught the critic nothing (docs/log.md).
    """

    config_type = OffPolicyConfig

    def __init__(self, config: OffPolicyConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.pieces = min(config.replay.pieces, spec.horizon)
        #: Steps between which the pieces lie, [P + 1].
        self.steps = np.arange(self.pieces + 1) * spec.horizon // self.pieces
        self._times: FloatArray = (spec.dt * self.steps).astype(np.float64)
        self._ends = self.motion.basis(self._times[1:])
        self.critic = SegmentCritic(
            config.critic, spec.observation_size + 1, spec.num_dof, self.pieces,
            generator=self.generator, dtype=self.dtype,
        )  # fmt: skip
        self.state_statistics = RunningStatistics(spec.observation_size + 1)
        self.action_statistics = RunningStatistics(spec.num_dof)
        self.policy_optimizer = adam(self.policy.parameters(), config.learning_rate)
        self.critic_optimizer = adam(self.critic.parameters(), config.critic.learning_rate)
        self.replay = Replay(config.replay.capacity)

    def parts(self) -> Mapping[str, Stateful]:
        names = ("policy", "critic", "state_statistics", "action_statistics", "policy_optimizer",
                 "critic_optimizer", "replay")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def observe(self, motions: SampledMotions, episodes: Episodes) -> None:
        begun = self.steps[:-1]
        states = self._tensor(episodes.observations[:, begun])
        passed = self._tensor(self._times[:-1])[:, None].expand(*states.shape[:2], 1)
        row = {
            "inputs": motions.inputs,
            "states": torch.cat((states, passed), dim=-1),
            # Row t of a motion is where the robot is asked to be after step t.
            "actions": self._tensor(motions.positions[:, self.steps[1:] - 1]),
            "rewards": self._earned(episodes),
            "position": self._tensor(motions.starts.positions),
            "velocity": self._tensor(motions.starts.velocities),
        }
        self.state_statistics.update(row["states"])
        self.action_statistics.update(row["actions"])
        self.replay.add(row)

    def update(self, progress: float) -> dict[str, float]:
        """One iteration: the critic's gradient steps, then the policy's."""
        started = time.perf_counter()
        old = copy.deepcopy(self.policy)
        for _ in range(self.config.critic.epochs):
            critic = self._fit_critic()
        critic_seconds = time.perf_counter() - started
        self.critic.requires_grad_(False)
        for _ in range(self.config.epochs):
            policy = self._improve_policy(old, progress)
        self.critic.requires_grad_(True)
        return {
            **critic,
            **policy,
            "replay": float(len(self.replay)),
            "critic_seconds": critic_seconds,
            "policy_seconds": time.perf_counter() - started - critic_seconds,
        }

    def _fit_critic(self) -> dict[str, float]:
        drawn, segments = self._draw(), self._cut()
        states = self.state_statistics(drawn["states"])[:, segments[:, 0]]
        actions = self.action_statistics(drawn["actions"])[:, segments]
        earned = self._scaled(drawn["rewards"])[:, segments].cumsum(-1)
        found = self.critic(states.flatten(0, 1), actions.flatten(0, 1))
        loss = (found - earned.flatten(0, 1)).square().mean()
        self.critic_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.critic_optimizer.step()
        return {"critic_loss": loss.item()}

    def _improve_policy(self, old: GaussianPolicy, progress: float) -> dict[str, float]:
        drawn = self._draw()
        with torch.no_grad():
            before: WeightDistribution = old(drawn["inputs"])
        network, projected, report = self._project(drawn["inputs"], before, progress)
        actions, _ = self.motion.trajectory(
            projected.weights(self._noise(projected)), drawn["position"], drawn["velocity"], self._ends
        )
        starts = self.state_statistics(drawn["states"][:, 0])
        gain = self.critic(starts, self.action_statistics(actions))[:, -1].mean()
        loss, regression = self._pulled(gain, network, projected)
        self.policy_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.policy_optimizer.step()
        return {
            **region_metrics(report, regression, loss),
            "gain": gain.item(),
            "entropy": network.entropy().mean().item(),
        }

    def _noise(self, distribution: WeightDistribution) -> Tensor:
        noise, least = super()._noise(distribution), self.config.least_noise
        return noise * (least + (1 - least) * torch.rand(len(noise), 1, generator=self.generator))

    def _draw(self) -> dict[str, Tensor]:
        """Episodes for a gradient step: of all that are kept, then of the best tenth."""
        config, replay = self.config.replay, self.replay
        of_best = round(config.best * config.batch)
        alike = replay.draw(config.batch - of_best, self.generator)
        if not of_best:
            return alike
        best = replay["rewards"].sum(-1).topk(math.ceil(0.1 * len(replay))).indices
        favoured = replay.draw(of_best, self.generator, best)
        return {name: torch.cat((rows, favoured[name])) for name, rows in alike.items()}

    def _cut(self) -> Tensor:
        """The pieces of each segment, [S, L]."""
        most = min(self.config.replay.segments, self.pieces)
        number = int(torch.randint(1, most + 1, (), generator=self.generator))
        length = self.pieces // number
        offset = int(torch.randint(length, (), generator=self.generator)) if number > 1 else 0
        starts = torch.arange(offset, self.pieces - length + 1, length)
        return starts[:, None] + torch.arange(length)

    def _earned(self, episodes: Episodes) -> Tensor:
        """In each piece, [E, P]."""
        pieces = self._tensor(episodes.rewards).split(np.diff(self.steps).tolist(), -1)
        return torch.stack([piece.sum(-1) for piece in pieces], -1)

    def _scaled(self, rewards: Tensor) -> Tensor:
        """Rewards of which whole episodes of the replay sum to 0 in the mean, with a deviation of 1."""
        returns = self.replay["rewards"].sum(-1)
        deviation = returns.std(correction=0)
        mean = returns.mean()
        varies = deviation > 1e-6 * (1 + mean.abs())
        return (rewards - mean / self.pieces) / torch.where(varies, deviation, torch.ones_like(deviation))
