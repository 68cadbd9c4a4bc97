"""How a desired trajectory drives an environment: the one thing a new robot has to tell Tether.

An episodic policy chooses a whole trajectory, an environment takes one action at a time. A
`PositionControlledEnv` stands between them: it knows which entries of the first observation describe
the task, where the robot's joints are, which controller turns a desired position and velocity into an
action, how long an episode lasts and what counts as success. ``docs/episodic_envs.md`` walks through
writing one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import gymnasium
import numpy as np

from tether.episodic.episodes import EnvSpec, Episode, FloatArray, Start
from tether.errors import ConfigError, InvalidInputError, SimulationError

_TAKEN_NAMES = frozenset((
    *("success", "success_any", "return", "return_mean", "jerk"),
    *("step", "env_steps", "time_s", "sampling_seconds"),
))  # fmt: skip
"""Numbers that every run has, which no extra may hide."""

_REMEMBERED_STARTS = 1000
# Starts that belong to one seed may differ by rounding, which contacts enlarge.
_SAME_START = 1e-3


class PositionControlledEnv(ABC):
    """Runs whole desired trajectories in a gymnasium environment whose robot can track positions.

    Subclass it for a new robot: set the class attributes, implement `joint_positions`,
    `joint_velocities` and `action`, and register the class with `register_adapter`.

    Args:
        env: an environment with flat (one-dimensional) `Box` observation and action spaces.
        env_id: the name used in messages and in `EnvSpec`.

    Raises:
        ConfigError: spaces of another kind, or class attributes that contradict each other.
    """

    num_dof: ClassVar[int]
    """D, degrees of freedom of the desired trajectory."""

    horizon: ClassVar[int]
    """T, steps of an episode."""

    dt: ClassVar[float]
    """Seconds between two steps."""

    position_units: ClassVar[tuple[str, ...]] = ()
    """The unit of each degree of freedom, such as "rad" or "m"; empty if nobody said."""

    context_indices: tuple[int, ...] | None = None
    """Entries of the first observation that describe the task; None takes all of them."""

    headline: ClassVar[str] = "success"
    """The number the task is judged by: "success", or one of `extra_names`."""

    extra_names: ClassVar[tuple[str, ...]] = ()
    """Entries of the last step's ``info`` kept as numbers of the episode; not names that every run has."""

    event_key: ClassVar[str | None] = None
    """The entry of ``info`` that turns true, and stays true, with the event after which rewards no longer
    depend on what the robot does (a ball is hit, the robot has taken off)."""

    refused_extras: ClassVar[Mapping[str, float]] = {}
    """The extras of an episode that was refused."""

    standing: ClassVar[int] = 1
    """How many environments a sampler keeps in a process at most, each at the start of an episode until that
    is run: more than one where a reset takes long, and memory is there for them."""

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        for name, space in (("observation", env.observation_space), ("action", env.action_space)):
            if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
                raise ConfigError(
                    f"{env_id}: the {name} space is {space}, but trajectories need a one-dimensional Box. "
                    "Wrap the environment, e.g. in gymnasium.wrappers.FlattenObservation."
                )
        self.env = env
        self.env_id = env_id
        self._check_names()
        self._check_indices()
        self._action_low = np.asarray(env.action_space.low, dtype=np.float64)  # type: ignore[attr-defined]
        self._action_high = np.asarray(env.action_space.high, dtype=np.float64)  # type: ignore[attr-defined]
        self._ready_seed: int | None = None
        self._begun: dict[int, Start] = {}

    def _check_names(self) -> None:
        if taken := _TAKEN_NAMES.intersection(self.extra_names):
            raise ConfigError(
                f"{self.env_id}: extra_names has {', '.join(sorted(taken))}, which every run measures "
                "itself. Use other names."
            )
        if self.headline != "success" and self.headline not in self.extra_names:
            raise ConfigError(
                f"{self.env_id}: headline is {self.headline!r}, which is neither 'success' nor in "
                f"extra_names ({', '.join(self.extra_names) or 'none'}). Add it there."
            )

    def _check_indices(self) -> None:
        """Also before a spec is given away: a class may choose its indices when it knows the environment."""
        size = int(self.env.observation_space.shape[0])  # type: ignore[index]
        if any(not -size <= index < size for index in self.context_indices or ()):
            raise ConfigError(
                f"{self.env_id}: context_indices {self.context_indices} name entries that an observation of "
                f"{size} numbers does not have."
            )

    # What a new robot defines.

    @abstractmethod
    def joint_positions(self) -> FloatArray:
        """Where the tracked degrees of freedom are now, [D]; may be a view of the simulator's memory."""

    @abstractmethod
    def joint_velocities(self) -> FloatArray:
        """How fast they move, [D] per second; may be a view as well."""

    @abstractmethod
    def action(self, desired_position: FloatArray, desired_velocity: FloatArray) -> FloatArray:
        """The action steering towards the desired position [D] and velocity [D] from where the robot is.

        Entries outside of the action space are clipped to it by the caller.
        """

    def step_success(self, info: Mapping[str, Any]) -> bool:
        """Whether one step counts as success: ``info["success"]``, absent means no."""
        return bool(info.get("success", False))

    def refusal(self, desired_positions: FloatArray, desired_velocities: FloatArray) -> float | None:
        """The return of a trajectory that the robot must not run, None if it may (the default: always).

        A refused episode takes no step, and its start is its absorbing state. Its return is spread evenly
        over the steps, so that every segment of the motion is blamed for its part.
        """
        return None

    def motion_rewards(self, rewards: FloatArray, desired_positions: FloatArray) -> FloatArray:
        """An executed episode's rewards [T], where the desired motion [T, D] itself has a price."""
        return rewards

    # What every robot shares.

    @property
    def spec(self) -> EnvSpec:
        """The sizes a policy needs.

        Raises:
            ConfigError: `context_indices` out of range.
        """
        self._check_indices()
        observation_size = int(self.env.observation_space.shape[0])  # type: ignore[index]
        return EnvSpec(
            env_id=self.env_id,
            num_dof=self.num_dof,
            horizon=self.horizon,
            dt=self.dt,
            context_size=observation_size if self.context_indices is None else len(self.context_indices),
            observation_size=observation_size,
            headline=self.headline,
            extra_names=self.extra_names,
        )

    def reset(self, seed: int) -> Start:
        """Begin the episode that belongs to a seed: the same seed always gives the same start.

        Raises:
            SimulationError: it did not, or the first observation is not finite.
        """
        self._ready_seed = None  # where a reset fails the environment stands nowhere
        observation, _ = self.env.reset(seed=seed)
        observation = np.array(observation, dtype=np.float64)
        if not np.isfinite(observation).all():
            raise SimulationError(f"{self.env_id}: the first observation of seed {seed} is not finite.")
        self._ready_seed = seed
        self._first_observation = observation
        context = observation if self.context_indices is None else observation[list(self.context_indices)]
        start = Start(
            seed, context.copy(), observation, self.joint_positions().copy(), self.joint_velocities().copy()
        )
        self._check_repeats(start)
        return start

    def _check_repeats(self, start: Start) -> None:
        """Motions are planned at one reset and run after another, from what has to be the same start."""
        if len(self._begun) >= _REMEMBERED_STARTS:
            self._begun.clear()
        before = self._begun.setdefault(start.seed, start)
        for name in ("context", "position"):
            first, again = getattr(before, name), getattr(start, name)
            same = np.array_equal(first, again) or np.allclose(first, again, _SAME_START, _SAME_START)
            if not same:
                self._ready_seed = None
                raise SimulationError(
                    f"{self.env_id}: two resets with seed {start.seed} gave different starts: the {name} was "
                    f"{first.tolist()}, then {again.tolist()}. Let reset(seed=...) decide every start: draw "
                    "it from the environment's np_random."
                )

    def execute(self, seed: int, desired_positions: FloatArray, desired_velocities: FloatArray) -> Episode:
        """Run the episode of a seed along a desired trajectory.

        Row t of the trajectory is what the controller aims at during step t, so it is where the robot
        ought to be at time (t + 1) dt.

        Args:
            seed: which start; the environment is reset to it unless it stands there already.
            desired_positions: [T, D].
            desired_velocities: [T, D] per second.

        Raises:
            InvalidInputError: a trajectory of another shape, or not finite.
            SimulationError: the simulator returned something that is not finite.
            ConfigError: ``info`` lacks what `event_key` or `extra_names` say it has.
        """
        check_trajectory(self.spec, desired_positions, desired_velocities)
        if self._ready_seed != seed:
            self.reset(seed)
        penalty = self.refusal(desired_positions, desired_velocities)
        if penalty is not None:
            return self._refused(penalty)
        self._ready_seed = None
        observations = np.empty((self.horizon + 1, self._first_observation.size))
        positions = np.empty((self.horizon + 1, self.num_dof))
        rewards = np.zeros(self.horizon)
        observations[0], positions[0] = self._first_observation, self.joint_positions()
        success = success_any = False
        length, event_step = self.horizon, -1
        info: dict[str, Any] = {}
        for t in range(self.horizon):
            action = self.action(desired_positions[t], desired_velocities[t])
            action = np.minimum(np.maximum(action, self._action_low), self._action_high)
            observation, reward, terminated, truncated, info = self.env.step(action)
            observations[t + 1], rewards[t], positions[t + 1] = observation, reward, self.joint_positions()
            success = self.step_success(info)
            success_any |= success
            if event_step < 0 and self.event_key is not None and self._told(info, self.event_key):
                event_step = t
            if terminated or truncated:
                length = t + 1
                observations[length + 1 :], positions[length + 1 :] = observations[length], positions[length]
                break
        self._check_finite(seed, observations, rewards)
        extras = {name: float(self._told(info, name)) for name in self.extra_names}
        rewards = self.motion_rewards(rewards, desired_positions)
        return Episode(observations, rewards, positions, length, success, success_any, extras, event_step)

    def _refused(self, penalty: float) -> Episode:
        # All at the first step it would be in no segment whose first point lies behind it.
        rewards = np.full(self.horizon, penalty / self.horizon)
        return Episode(
            observations=np.tile(self._first_observation, (self.horizon + 1, 1)),
            rewards=rewards,
            positions=np.tile(self.joint_positions(), (self.horizon + 1, 1)),
            length=0,
            success=False,
            success_any=False,
            extras={
                name: self._told(self.refused_extras, name, "refused_extras") for name in self.extra_names
            },
        )

    def _told(self, source: Mapping[str, Any], name: str, where: str = "a step's info") -> Any:
        """What the environment says of a name that the class declares."""
        if name not in source:
            raise ConfigError(
                f"{self.env_id}: {where} has no {name!r}, which {type(self).__name__} declares; it has "
                f"{', '.join(map(str, source)) or 'nothing'}. Mend one of the two."
            )
        return source[name]

    def _check_finite(self, seed: int, observations: FloatArray, rewards: FloatArray) -> None:
        finite = np.isfinite(observations[1:]).all(axis=1) & np.isfinite(rewards)
        if not finite.all():
            raise SimulationError(
                f"{self.env_id}: observation or reward is not finite at step {int(np.argmin(finite))} of the "
                f"episode with seed {seed}. The desired trajectory may ask for more than the simulator "
                "bears: check its scale."
            )

    def close(self) -> None:
        """Release the environment."""
        self.env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_trajectory(
    spec: EnvSpec, positions: FloatArray, velocities: FloatArray, batch: tuple[int, ...] = ()
) -> None:
    """Refuse a desired trajectory an environment cannot run, before anything is stepped.

    Raises:
        InvalidInputError: shapes other than [*batch, T, D], or entries that are not finite.
    """
    wanted = (*batch, spec.horizon, spec.num_dof)
    for name, array in (("positions", positions), ("velocities", velocities)):
        if np.shape(array) != wanted:
            raise InvalidInputError(
                f"{spec.env_id}: desired {name} have shape {np.shape(array)}, expected {wanted} "
                f"({'episodes, ' if batch else ''}horizon {spec.horizon}, degrees of freedom {spec.num_dof})."
            )
        if not np.isfinite(array).all():
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            raise InvalidInputError(f"{spec.env_id}: desired {name} are not finite, first at index {where}.")


ADAPTERS: dict[str, str | type[PositionControlledEnv]] = {}
"""Environments from outside of Tether; `register_adapter` adds to them."""


def register_adapter(env_id: str, adapter: str | type[PositionControlledEnv]) -> None:
    """Make an environment of your own known to the sampler, the training commands and the renderer.

    Args:
        env_id: an id that ``gymnasium.make`` knows.
        adapter: a `PositionControlledEnv` subclass, or where to import it from: "package.module:Class".

    Raises:
        ConfigError: the id belongs to another adapter already, or begins with "tether/".
    """
    if env_id.startswith("tether/"):
        raise ConfigError(f"{env_id}: ids that begin with 'tether/' are Tether's own. Choose another id.")
    if ADAPTERS.get(env_id, adapter) != adapter:
        raise ConfigError(f"{env_id} is registered already, with {ADAPTERS[env_id]}. Choose another id.")
    ADAPTERS[env_id] = adapter
