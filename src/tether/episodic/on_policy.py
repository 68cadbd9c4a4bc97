"""What TCE and BBRL share: one batch of motions, one critic, and a policy moved within a trust region."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tether.episodic.config import OnPolicyConfig
from tether.episodic.critic import Critic
from tether.episodic.episodes import EnvSpec, Episodes
from tether.episodic.learner import Stateful
from tether.episodic.motion_policy import MotionPolicyLearner, SampledMotions, region_metrics
from tether.episodic.networks import adam
from tether.episodic.policy import WeightDistribution
from tether.errors import InvalidInputError


class OnPolicyLearner(MotionPolicyLearner[OnPolicyConfig]):
    """A Gaussian policy over motions that learns from the episodes of its last batch alone.

    The critic's fit to a batch goes on after `update`, while the next episodes are run: motions are chosen
    without it. Whoever asks for `critic` waits for it, and so does a checkpoint.

    Raises:
        ConfigError: settings that do not fit the environment.
    """

    config_type = OnPolicyConfig

    def __init__(self, config: OnPolicyConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self._critic = Critic(
            config.critic, self._critic_input_size(), generator=self.generator, dtype=self.dtype
        )
        self.policy_optimizer = adam(
            self.policy.parameters(), config.update.learning_rate, config.update.weight_decay
        )
        self.critic_optimizer = adam(
            self._critic.network.parameters(), config.critic.learning_rate, config.critic.weight_decay
        )
        self._batch: tuple[SampledMotions, Episodes] | None = None
        self._beside = ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._fit: Future[None] | None = None

    @property
    def critic(self) -> Critic:
        """The critic, as soon as it has learned what it was given."""
        if self._fit is not None:
            self._fit.result()
            self._fit = None
        return self._critic

    @abstractmethod
    def _critic_input_size(self) -> int:
        """Number of features the critic sees."""

    @abstractmethod
    def _learn(self, motions: SampledMotions, episodes: Episodes, progress: float) -> dict[str, float]:
        """Improve policy and critic by one batch; metrics of the update."""

    def observe(self, motions: SampledMotions, episodes: Episodes) -> None:
        self._batch = motions, episodes

    def update(self, progress: float) -> dict[str, float]:
        """One iteration of learning from the observed batch, which is forgotten afterwards.

        `critic_seconds` is what the critic's last fit took longer than the episodes beside it, and
        `critic_error` its mean squared error on this batch before it learns from it.
        """
        if self._batch is None:
            raise InvalidInputError("update learns from the episodes of observe; call that first.")
        (motions, episodes), self._batch = self._batch, None
        started = time.perf_counter()
        _ = self.critic  # waits
        waited = time.perf_counter() - started
        return self._learn(motions, episodes, progress) | {"critic_seconds": waited}

    def parts(self) -> Mapping[str, Stateful]:
        return {
            "policy": self.policy,
            "critic": self.critic,
            "policy_optimizer": self.policy_optimizer,
            "critic_optimizer": self.critic_optimizer,
        }

    def _improve(
        self,
        motions: SampledMotions,
        progress: float,
        objective: Callable[[WeightDistribution], Tensor],
        critic_inputs: Tensor,
        targets: Tensor,
    ) -> dict[str, float]:
        """Maximise the objective of the projected policy, and let the critic learn targets [N] of its inputs.

        The objective stands on what the critic said before, so that the policy does not wait for it.
        """
        self._set_learning_rates(progress)
        lesson = self.critic.prepared(critic_inputs, targets)
        with torch.no_grad():
            error = self.critic.loss(*lesson).item()
        self._fit = self._beside.submit(self.critic.fit, self.critic_optimizer, *lesson)
        return self._improve_policy(motions, progress, objective) | {"critic_error": error}

    def _improve_policy(
        self, motions: SampledMotions, progress: float, objective: Callable[[WeightDistribution], Tensor]
    ) -> dict[str, float]:
        """Maximise the objective of the projected policy, and pull the network towards its projection."""
        started = time.perf_counter()
        unconverged = 0
        for _ in range(self.config.update.epochs):
            network, projected, report = self._project(motions.inputs, motions.distribution, progress)
            unconverged += not bool(report.cov_converged.all())
            gain = objective(projected)
            loss, regression = self._pulled(gain, network, projected)
            self.policy_optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.policy_optimizer.step()
        return {
            **region_metrics(report, regression, loss),
            "unconverged_projections": float(unconverged),
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
