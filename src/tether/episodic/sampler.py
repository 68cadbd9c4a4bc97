"""Collects whole episodes from many copies of an environment at once.

A policy needs the starts of a batch before it can plan, and the plans before anything moves, so sampling
has two halves: `EpisodeSampler.reset` gives the starts, `EpisodeSampler.execute` runs one desired
trajectory an episode to the end. Between the two an episode is nothing but its seed: a worker resets its
environment to that seed again when it executes, unless it stands there already (in some tasks several
environments wait at their starts), which is exact and needs no copies of simulator states.

Every episode draws from its own seed, derived from the sampler's seed and the episode's number, so the
results do not depend on how many workers there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from tether.episodic.adapters import check_trajectory
from tether.episodic.episodes import EnvSpec, Episodes, Starts
from tether.episodic.workers import InProcess, WorkerPool
from tether.errors import InvalidInputError

__all__ = ["EnvSpec", "EpisodeSampler", "Episodes", "Starts"]


class EpisodeSampler:
    """Runs batches of episodes in a pool of processes, reproducibly.

    Args:
        env_id: a name `make_position_controlled` knows.
        num_workers: processes; 0 runs in this one.
        seed: of the stream of episodes, in [0, 2^63).
        env_options: keywords of `make_position_controlled`.

    Raises:
        ConfigError: an unknown environment; the message lists the known ones.
        InvalidInputError: a negative number of workers or seed.

    >>> with EpisodeSampler("tether/PointReach-v0", num_workers=0, seed=1) as sampler:
    ...     starts = sampler.reset(4)
    ...     goal = np.repeat(starts.contexts[:, None, :2], sampler.spec.horizon, axis=1)
    ...     episodes = sampler.execute(goal, np.zeros_like(goal))
    >>> starts.positions.shape, episodes.rewards.shape, bool(episodes.success.all()), episodes.env_steps
    ((4, 2), (4, 50), True, 200)
    """

    spec: EnvSpec

    def __init__(
        self, env_id: str, num_workers: int = 0, seed: int = 0, env_options: Mapping[str, Any] | None = None
    ) -> None:
        if num_workers < 0:
            raise InvalidInputError(f"num_workers is 0 (this process) or more; got {num_workers}.")
        if not 0 <= seed < 2**63:
            raise InvalidInputError(f"A seed lies in [0, 2^63); got {seed}.")
        self._seed = seed
        self._drawn = 0
        self._pending: tuple[int, ...] | None = None
        options = dict(env_options or {})
        self._backend: InProcess | WorkerPool = (
            WorkerPool(env_id, num_workers, options) if num_workers else InProcess(env_id, options)
        )
        self.spec = self._backend.spec

    def reset(self, num_episodes: int | None = None, *, seeds: Sequence[int] | None = None) -> Starts:
        """Begin a batch of episodes and say where each starts.

        Args:
            num_episodes: E, how many of the sampler's stream of episodes to draw.
            seeds: run the episodes of these seeds instead (evaluation on a fixed set); the stream does
                not move.

        Raises:
            InvalidInputError: not exactly one of the two, or none to run.
            SimulationError: a worker died or a simulator failed.
        """
        if (num_episodes is None) == (seeds is None):
            raise InvalidInputError("Give reset either num_episodes or seeds.")
        if num_episodes is not None:
            if num_episodes < 1:
                raise InvalidInputError(f"num_episodes is at least 1; got {num_episodes}.")
            numbers = range(self._drawn, self._drawn + num_episodes)
            streams = [np.random.SeedSequence(self._seed, spawn_key=(number,)) for number in numbers]
            chosen = tuple(int(stream.generate_state(1)[0]) for stream in streams)
        else:
            assert seeds is not None
            chosen = tuple(int(seed) for seed in seeds)
            if not chosen or min(chosen) < 0:
                raise InvalidInputError(f"seeds are one or more integers >= 0; got {chosen}.")
        self._pending = None  # what fails now must not leave an earlier batch to be executed
        starts = self._backend.reset(chosen)
        self._drawn += num_episodes or 0
        self._pending = chosen
        return Starts(
            contexts=np.stack([start.context for start in starts]),
            observations=np.stack([start.observation for start in starts]),
            positions=np.stack([start.position for start in starts]),
            velocities=np.stack([start.velocity for start in starts]),
            seeds=chosen,
        )

    def execute(self, desired_positions: ArrayLike, desired_velocities: ArrayLike) -> Episodes:
        """Run the episodes of the last `reset`, each along its own desired trajectory.

        May be called again, to run the same starts along other trajectories.

        Args:
            desired_positions: [E, T, D]; row t is what the robot ought to have reached at time (t + 1) dt.
            desired_velocities: [E, T, D] per second.

        Raises:
            InvalidInputError: nothing was reset, or shapes and values that cannot be run; checked before
                anything is stepped.
            SimulationError: a worker died or a simulator failed; the message names environment, worker and
                exit code or episode.
        """
        if self._pending is None:
            raise InvalidInputError("execute runs the starts of the last reset; call reset first.")
        positions = np.ascontiguousarray(desired_positions, dtype=np.float64)
        velocities = np.ascontiguousarray(desired_velocities, dtype=np.float64)
        check_trajectory(self.spec, positions, velocities, batch=(len(self._pending),))
        return self._backend.execute(self._pending, positions, velocities)

    def random_state(self) -> dict[str, int]:
        """Where the stream of episodes stands: all an exact resume needs, in plain integers."""
        return {"seed": self._seed, "episodes_drawn": self._drawn}

    def set_random_state(self, state: Mapping[str, int]) -> None:
        """Continue a stream of episodes where `random_state` left it.

        Raises:
            InvalidInputError: not what `random_state` returned.
        """
        if set(state) != {"seed", "episodes_drawn"} or min(state.values()) < 0:
            raise InvalidInputError(f"A sampler's random state has 'seed' and 'episodes_drawn'; got {state}.")
        self._seed, self._drawn = int(state["seed"]), int(state["episodes_drawn"])
        self._pending = None

    def close(self) -> None:
        """Stop the workers. Closing twice is fine."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
