"""What a policy and an environment tell each other: sizes, starts and episodes, single and in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class EnvSpec:
    """What a policy and its training loop need to know about an environment."""

    env_id: str

    num_dof: int
    """D, degrees of freedom that follow the desired trajectory."""

    horizon: int
    """T, steps of every episode."""

    dt: float
    """Seconds between two steps."""

    context_size: int
    """C, entries of the first observation that describe the task."""

    observation_size: int
    """O, entries of every observation."""

    headline: str
    """The number the task is judged by: "success", or the name of an extra such as "max_height"."""

    extra_names: tuple[str, ...]
    """The keys of every episode's extras."""

    @property
    def duration(self) -> float:
        """Seconds of an episode."""
        return self.horizon * self.dt


@dataclass(frozen=True)
class Start:
    """One episode about to begin."""

    seed: int

    context: FloatArray
    """[C]"""

    observation: FloatArray
    """[O]"""

    position: FloatArray
    """[D]"""

    velocity: FloatArray
    """[D] per second."""


@dataclass(frozen=True)
class Episode:
    """One episode as it went; T is the horizon."""

    observations: FloatArray
    """[T + 1, O], from the first observation to the one after the last step."""

    rewards: FloatArray
    """[T]"""

    positions: FloatArray
    """[T + 1, D], where the joints really were."""

    length: int
    """Steps taken: T, fewer if the environment terminated, 0 if the robot refused the trajectory. The rows
    after are an absorbing state: the last observation and position repeated, rewards zero (of a refused
    trajectory: its return, spread evenly)."""

    success: bool
    """At the last step taken."""

    success_any: bool
    """At any step."""

    extras: dict[str, float]
    """Numbers of the episode, e.g. "max_height"; the keys are the adapter's `extra_names`."""

    event_step: int = -1
    """The first step after which the adapter's `event_key` held; -1 if it never did."""


@dataclass(frozen=True)
class Starts:
    """Where a batch of E episodes begins: what a policy sees and a movement primitive departs from."""

    contexts: FloatArray
    """[E, C], the entries of the first observation that describe the task."""

    observations: FloatArray
    """[E, O], the whole first observation."""

    positions: FloatArray
    """[E, D], joint positions."""

    velocities: FloatArray
    """[E, D], joint velocities per second."""

    seeds: tuple[int, ...]
    """What each episode's environment was reset with; it alone determines the start."""


@dataclass(frozen=True)
class Episodes:
    """A batch of E finished episodes of T steps."""

    observations: FloatArray
    """[E, T + 1, O], from the first observation to the one after the last step."""

    rewards: FloatArray
    """[E, T]"""

    success: NDArray[np.bool_]
    """At the last step taken, [E]."""

    success_any: NDArray[np.bool_]
    """At any step, [E]."""

    event_steps: NDArray[np.int64]
    """The step of each episode's event (`PositionControlledEnv.event_key`), [E]; -1 where there was none."""

    positions: FloatArray
    """[E, T + 1, D], where the joints really were (the desired trajectory is what they were asked)."""

    lengths: NDArray[np.int64]
    """[E], steps taken: T, fewer where the environment terminated. The rows after that are an absorbing
    state: the last observation repeated, rewards zero."""

    extras: dict[str, FloatArray]
    """Numbers of each episode by name, [E] each: e.g. "max_height"."""

    @property
    def returns(self) -> FloatArray:
        """The sum of each episode's rewards, [E]."""
        total: FloatArray = self.rewards.sum(axis=1)
        return total

    @property
    def env_steps(self) -> int:
        """Environment steps these episodes took together."""
        return int(self.lengths.sum())


def stack_episodes(episodes: Sequence[Episode]) -> Episodes:
    """Single episodes as one batch."""
    return Episodes(
        observations=np.stack([episode.observations for episode in episodes]),
        rewards=np.stack([episode.rewards for episode in episodes]),
        success=np.array([episode.success for episode in episodes], dtype=np.bool_),
        success_any=np.array([episode.success_any for episode in episodes], dtype=np.bool_),
        event_steps=np.array([episode.event_step for episode in episodes], dtype=np.int64),
        positions=np.stack([episode.positions for episode in episodes]),
        lengths=np.array([episode.length for episode in episodes], dtype=np.int64),
        extras={name: np.array([e.extras[name] for e in episodes]) for name in episodes[0].extras},
    )


def concatenate_episodes(parts: Sequence[Episodes]) -> Episodes:
    """Batches as one, in order."""
    arrays = ("observations", "rewards", "success", "success_any", "event_steps", "positions", "lengths")
    return Episodes(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays},
        extras={name: np.concatenate([part.extras[name] for part in parts]) for name in parts[0].extras},
    )
