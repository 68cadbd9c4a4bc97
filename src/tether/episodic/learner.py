"""What an algorithm has to be: something that chooses motions, and learns from what became of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tether.episodic.config import EpisodicConfig
from tether.episodic.episodes import EnvSpec, Episodes, FloatArray, Starts
from tether.episodic.prodmp import ProDMP
from tether.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Motions:
    """Motions chosen for a batch of E starts. A learner subclasses it to carry more to its `observe`."""

    positions: FloatArray
    """Desired positions, [E, T, D]."""

    velocities: FloatArray
    """Desired velocities, [E, T, D] per second."""


class Stateful(Protocol):
    """Something that can be saved: networks, optimisers, running statistics, a replay buffer of your own."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings, in dicts and lists."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue from what `state_dict` returned."""


ConfigT = TypeVar("ConfigT", bound=EpisodicConfig)
MotionsT = TypeVar("MotionsT", bound=Motions)


class Learner(ABC, Generic[ConfigT, MotionsT]):
    """An episodic algorithm. The training loop, evaluation, films and pictures know no more than this.

    In every iteration the loop calls `act` for the starts of some episodes, lets the motions be executed,
    hands over the result with `observe`, and calls `update`. What a learner keeps between iterations (a
    batch, a replay buffer, target networks, several critics) is its own affair, as long as `parts` names
    it: that is what checkpoints hold.

    Random numbers are drawn from `generator` alone. Checkpoints hold it, too, so that a resumed run
    repeats an uninterrupted one.

    Args:
        config: the run.
        spec: sizes of the environment.

    ``docs/own_algorithm.md`` walks through one.
    """

    config_type: ClassVar[type[EpisodicConfig]] = EpisodicConfig
    """Settings of the algorithm: `EpisodicConfig`, or a subclass with more fields."""

    def __init__(self, config: ConfigT, spec: EnvSpec) -> None:
        self.config = config
        self.spec = spec
        self.generator = torch.Generator().manual_seed(config.seed)
        self.motion = ProDMP(config.motion, spec.num_dof)
        self.basis = self.motion.basis(spec.dt * np.arange(1, spec.horizon + 1, dtype=np.float64))

    @abstractmethod
    def act(self, starts: Starts, *, explore: bool = True) -> MotionsT:
        """Choose a motion for every start.

        Args:
            starts: where the episodes begin.
            explore: whether to try something; otherwise the best motion known, without random numbers.
        """

    @abstractmethod
    def observe(self, motions: MotionsT, episodes: Episodes) -> None:
        """Remember what became of motions that `act` chose."""

    @abstractmethod
    def update(self, progress: float) -> dict[str, float]:
        """Learn from what was observed.

        Args:
            progress: fraction of the training that lies behind, in [0, 1); for schedules.

        Returns:
            Metrics by name; always the same names.
        """

    @abstractmethod
    def parts(self) -> Mapping[str, Stateful]:
        """Everything that changes in training, by name, except `generator`."""

    def seen(self, starts: Starts) -> FloatArray:
        """What the policy is given of the starts, [E, C]; for the export. Override it with `planner`."""
        return starts.observations

    @property
    def seen_size(self) -> int:
        """C, how many numbers the policy sees."""
        return self.spec.observation_size

    def planner(self) -> nn.Module:
        """A module from what the policy sees [E, C] to its best motions' weights [E, W]; for the export.

        Raises:
            ConfigError: the algorithm does not define one.
        """
        raise ConfigError(
            f"{type(self).__name__} does not say how to export its policy. Define planner() in it: a module "
            "from what the policy sees to the weights of its best motion."
        )

    def trajectories(self, weights: Tensor, starts: Starts) -> tuple[FloatArray, FloatArray]:
        """Desired positions and velocities, [E, T, D] each, of weights [E, W] of the movement primitive."""
        positions, velocities = self.motion.trajectory(
            weights.double(),
            torch.as_tensor(starts.positions),
            torch.as_tensor(starts.velocities),
            self.basis,
        )
        return positions.numpy(), velocities.numpy()

    def state(self) -> dict[str, Any]:
        """All that a checkpoint has to hold for training to go on exactly."""
        own = {"env_id": self.spec.env_id, "algo": self.config.algo, "generator": self.generator.get_state()}
        parts = {name: part.state_dict() for name, part in self.parts().items()}
        if taken := own.keys() & parts.keys():
            raise ConfigError(f"{type(self).__name__}.parts() may not use the names {sorted(taken)}.")
        return own | parts

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned.

        Raises:
            CheckpointError: the state of another environment, algorithm or network.
        """
        parts = self.parts()
        for name, own in (("env_id", self.spec.env_id), ("algo", self.config.algo)):
            if state.get(name) != own:
                raise CheckpointError(
                    f"The checkpoint is of {name} {state.get(name)!r}, but this is {own!r}. "
                    "Give the run folder it belongs to."
                )
        expected = {"env_id", "algo", "generator", *parts}
        if state.keys() != expected:
            raise CheckpointError(
                f"The checkpoint holds {sorted(state)}, but {type(self).__name__} has {sorted(expected)}."
                " Use the version of the algorithm that wrote it, or start the run again."
            )
        for name, part in parts.items():
            try:
                part.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"The checkpoint's {name!r} does not fit this run ({error})."
                ) from error
        self.generator.set_state(state["generator"])
