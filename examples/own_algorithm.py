"""An algorithm of your own, with nothing changed in Tether: off-policy, from a replay of whole episodes.

Several critics learn the return of a motion from its weights and the task's context, on every episode tried
so far. The policy maximises the lowest of slowly following copies of them ("targets"), inside a trust region
around a slowly following copy of itself. All it takes is a `Learner`; checkpoints, exact resuming,
evaluation, comparison and reports come with it.

    python examples/own_algorithm.py        # trains for some seconds, prints the return
    PYTHONPATH=examples tether episodic train --preset own_algorithm:via_point --critics 3 --no-film
"""

import copy
import tempfile
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.episodic.config import EpisodicConfig, TrustRegionConfig
from tether.episodic.episodes import EnvSpec, Episodes, Starts
from tether.episodic.learner import Learner, Motions, Stateful
from tether.episodic.networks import build_mlp, follow
from tether.episodic.policy import GaussianPolicy, PolicyConfig
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.replay import Replay
from tether.episodic.train import train


@dataclass(frozen=True)
class OffPolicyConfig(EpisodicConfig):
    """Besides what every run has; each field is an option of the command line, with this text as help."""

    algo: str = "own_algorithm:OffPolicy"
    """Where the learner is: "module:Class"."""

    critics: int = 2
    """Number of critics; the lowest estimate counts."""

    capacity: int = 1000
    """Episodes the replay buffer holds."""

    batch: int = 128
    """Episodes drawn from it for a gradient step."""

    steps: int = 30
    """Gradient steps after each batch of episodes."""

    learning_rate: float = 3e-3
    """Adam's learning rate, for policy and critics."""

    polyak: float = 0.05
    """Share by which the targets follow in each step."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig((32,), "tanh", init_std=0.5))
    """Network and exploration."""

    trust_region: TrustRegionConfig = field(default_factory=lambda: TrustRegionConfig(0.1, 0.02))
    """How far the policy may be from its target."""


@dataclass(frozen=True)
class TriedMotions(Motions):
    """What `act` chose, and `observe` wants to remember."""

    contexts: Tensor
    weights: Tensor


class OffPolicy(Learner[OffPolicyConfig, TriedMotions]):
    config_type = OffPolicyConfig

    def __init__(self, config: OffPolicyConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        contexts, weights = spec.context_size, self.motion.num_weights
        self.policy = GaussianPolicy(config.policy, contexts, weights, generator=self.generator)
        self.critics = torch.nn.ModuleList(
            build_mlp(
                contexts + weights, (64, 64), 1, activation="relu", output_gain=1.0, generator=self.generator
            )
            for _ in range(config.critics)
        )
        self.policy_target, self.critic_targets = copy.deepcopy((self.policy, self.critics))
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), config.learning_rate)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), config.learning_rate)
        self.replay = Replay(config.capacity)

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint has to hold."""
        names = ("policy", "critics", "policy_target", "critic_targets", "policy_optimizer",
                 "critic_optimizer", "replay")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @torch.no_grad()
    def act(self, starts: Starts, *, explore: bool = True) -> TriedMotions:
        contexts = torch.as_tensor(starts.contexts).float()
        distribution = self.policy_target(contexts)
        noise = torch.zeros_like(distribution.mean)
        weights = distribution.weights(noise.normal_(generator=self.generator) if explore else noise)
        return TriedMotions(*self.trajectories(weights, starts), contexts, weights)

    def observe(self, motions: TriedMotions, episodes: Episodes) -> None:
        returns = torch.as_tensor(episodes.returns).float()[:, None]
        self.replay.add({"tried": torch.cat((motions.contexts, motions.weights, returns), -1)})

    def update(self, progress: float) -> dict[str, float]:
        for _ in range(self.config.steps):
            rows = self.replay.draw(self.config.batch, self.generator)["tried"]
            critic_loss = self.fit_critics(rows[:, :-1], rows[:, -1:])
            policy_loss = self.improve_policy(rows[:, : self.spec.context_size])
            follow(self.critic_targets, self.critics, self.config.polyak)
            follow(self.policy_target, self.policy, self.config.polyak)
        return {"critic_loss": critic_loss, "policy_loss": policy_loss, "replay": len(self.replay)}

    def fit_critics(self, inputs: Tensor, returns: Tensor) -> float:
        loss = torch.stack([(critic(inputs) - returns).square().mean() for critic in self.critics]).sum()
        return step(self.critic_optimizer, loss)

    def improve_policy(self, contexts: Tensor) -> float:
        network, region = self.policy(contexts), self.config.trust_region
        old = self.policy_target(contexts).detach()
        projected, _ = network.project(old, region.mean_bound, region.cov_bound, method=region.method)
        noise = torch.empty_like(old.mean).normal_(generator=self.generator)
        inputs = torch.cat((contexts, projected.weights(noise)), -1)
        lowest = torch.cat([critic(inputs) for critic in self.critic_targets], -1).amin(-1).mean()
        pull = torch.stack([part.mean() for part in network.kl(projected.detach())]).sum()
        return step(self.policy_optimizer, region.regression_weight * pull - lowest)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def via_point() -> OffPolicyConfig:
    """A preset of your own: "own_algorithm:via_point" on the command line."""
    motion = ProDMPConfig(3, tau=1.0, weights_scale=0.5, relative_goal=True)
    return OffPolicyConfig(
        "own_environment:ViaPoint-v0", iterations=20, num_workers=0, motion=motion, evaluate_every=4
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for line in train(via_point(), f"{folder}/run").evals():
            print(f"{line['env_steps']:6.0f} steps  return {line['return_greedy']:.3f}")
