"""Motions for a real robot: the steps of one motion, within the robot's limits, or not at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from tether.episodic.episodes import FloatArray
from tether.episodic.prodmp import MotionBasis, ProDMP
from tether.errors import ConfigError, InvalidInputError, MotionLimitError
from tether.experiments.files import atomic_write_text, csv_text

OnViolation = Literal["scale", "refuse"]

# Limits hold at this many instants a step besides, so that a peak between two steps is seen as well.
_LOOKS_PER_STEP = 16
# From rest one factor meets the limits; from a state in motion the path changes with it, and some more do.
_TRIES = 50
# A motion made just slow enough meets its limit to rounding.
_ROUNDING = 1e-9
# By so much at least a motion that sets out near its limit is slowed at a try: what it exceeds it by tells
# ever less of what is missing.
_LEAST_STEP = 1.1
# How near the least factor is found from a state in motion, relative to it.
_NEAR = 1e-3
# More steps than any motion takes, and as many as fit into memory.
_MOST_STEPS = 1_000_000


@dataclass(frozen=True)
class MotionLimits:
    """What a robot's joints may do: a number for all D degrees of freedom, or one for each."""

    position_low: float | tuple[float, ...] = -math.inf
    """Lowest position."""

    position_high: float | tuple[float, ...] = math.inf
    """Highest position."""

    velocity: float | tuple[float, ...] = math.inf
    """Largest speed, per second."""

    acceleration: float | tuple[float, ...] = math.inf
    """Largest acceleration, per second squared."""

    def __post_init__(self) -> None:
        for item in fields(self):
            values = np.atleast_1d(np.asarray(getattr(self, item.name), dtype=np.float64))
            if np.isnan(values).any():
                raise ConfigError(f"{item.name} must hold no NaN, got {getattr(self, item.name)!r}.")
            if item.name in ("velocity", "acceleration") and not (values > 0).all():
                raise ConfigError(f"{item.name} must be positive, got {getattr(self, item.name)!r}.")
        low, high = (np.atleast_1d(np.asarray(v)) for v in (self.position_low, self.position_high))
        if len(low) != len(high) and 1 not in (len(low), len(high)):
            raise ConfigError(f"position_low has {len(low)} values, but position_high has {len(high)}.")
        if not (low < high).all():
            raise ConfigError(
                f"Needed: position_low < position_high, got {self.position_low!r} and {self.position_high!r}."
            )

    def each(self, name: str, num_dof: int) -> FloatArray:
        """The limit of that name for every degree of freedom, [D].

        Raises:
            ConfigError: as many limits as the robot has no degrees of freedom.
        """
        values = np.asarray(getattr(self, name), dtype=np.float64)
        if values.ndim and values.shape != (num_dof,):
            raise ConfigError(
                f"The robot has {num_dof} degrees of freedom, but {name} has {values.size} values."
            )
        return np.broadcast_to(values, (num_dof,))

    def described(self, num_dof: int) -> dict[str, list[float | None]]:
        """Each limit by name for every degree of freedom, None where there is none; for JSON.

        >>> MotionLimits(velocity=(1.0, math.inf)).described(2)["velocity"]
        [1.0, None]

        Raises:
            ConfigError: as `each`.
        """
        return {
            item.name: [float(one) if math.isfinite(one) else None for one in self.each(item.name, num_dof)]
            for item in fields(self)
        }


@dataclass(frozen=True)
class Plan:
    """One motion, step by step, and the state it departs from."""

    times: FloatArray
    """[T] seconds after the state it departs from."""

    positions: FloatArray
    """[T, D]"""

    velocities: FloatArray
    """[T, D] per second."""

    accelerations: FloatArray
    """[T, D] per second squared."""

    slowed: float = 1.0
    """How many times longer the motion takes than as it was chosen."""

    def write_csv(self, path: str | Path) -> Path:
        """Write a row a step: the time, then position, velocity and acceleration of every joint.

        >>> import tempfile
        >>> still = Plan(np.array([0.1]), np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 2)))
        >>> still.write_csv(Path(tempfile.mkdtemp()) / "still.csv").read_text().splitlines()[0]
        'seconds,position_1,position_2,velocity_1,velocity_2,acceleration_1,acceleration_2'
        """
        kinds = ("position", "velocity", "acceleration")
        joints = range(1, self.positions.shape[1] + 1)
        header = ["seconds", *(f"{kind}_{joint}" for kind in kinds for joint in joints)]
        table = np.column_stack((self.times, self.positions, self.velocities, self.accelerations))
        rows = [[repr(float(value)) for value in row] for row in table]
        return atomic_write_text(path, csv_text([header, *rows]))


def plan_motion(
    motion: ProDMP,
    weights: Tensor,
    position: Tensor,
    velocity: Tensor,
    dt: float,
    duration: float,
    *,
    start_time: float = 0.0,
    goal_from: Tensor | None = None,
    limits: MotionLimits | None = None,
    on_violation: OnViolation = "scale",
) -> Plan:
    """The steps a robot should take from where it is, within its limits.

    A motion that is too fast is run slower by the least factor that keeps speeds and accelerations within
    the limits: its time constant and delay grow, and from rest its path stays the same. A path that leaves
    the range of positions is refused, because no speed mends it. The last step may lie up to `dt` past the
    motion's end; where that would break a limit, the motion is slowed down until it ends with the step.
    From a state in motion the path changes with the factor, which is then the least to a thousandth.

    To replan in mid-motion, pass the present position and velocity, the weights that hold from now on, and
    how far the motion is (`start_time`): it goes on from there without a jump of position or velocity.

    Args:
        motion: the movement primitive.
        weights: [W].
        position, velocity: [D], where the robot is now and how fast.
        dt: seconds between two steps.
        duration: seconds the whole motion takes, from time 0 of the primitive, before it is slowed.
        start_time: time of the primitive at which the robot is in that state.
        goal_from: [D], where the robot was at time 0, from which a relative goal is measured; needed with one
            if `start_time` is later.
        limits: of the robot; None for none.
        on_violation: ``"scale"`` or ``"refuse"`` motions that are too fast.

    Raises:
        MotionLimitError: a position out of range; a speed or acceleration above its limit with ``"refuse"``;
            an initial speed above the limit, or a limit that slowing down does not meet in a million steps.
        InvalidInputError: times in the wrong order, sizes that do not fit, numbers that are not finite, a
            missing `goal_from`, or a velocity while the primitive's delay holds the position.

    Example:
        >>> import torch
        >>> from tether.episodic.prodmp import ProDMPConfig
        >>> motion = ProDMP(ProDMPConfig(num_basis=3, tau=1.0), num_dof=1)
        >>> state = torch.zeros(1, dtype=torch.float64)
        >>> weights = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
        >>> free = plan_motion(motion, weights, state, state, 0.01, 2.0)
        >>> slow = plan_motion(motion, weights, state, state, 0.01, 2.0, limits=MotionLimits(velocity=0.5))
        >>> bool(free.velocities.max() > 1), round(float(slow.velocities.max()), 3), slow.slowed > 2
        (True, 0.5, True)
    """
    if on_violation not in get_args(OnViolation):
        raise InvalidInputError(f'on_violation is "scale" or "refuse", got {on_violation!r}.')
    if not (dt > 0 and 0 <= start_time < duration and math.isfinite(duration)):
        raise InvalidInputError(
            f"Needed: dt > 0 and 0 <= start_time < duration, got dt={dt}, start_time={start_time}, "
            f"duration={duration}."
        )
    weights = _checked("weights", weights, motion.num_weights)
    position = _checked("position", position, motion.num_dof)
    velocity = _checked("velocity", velocity, motion.num_dof)
    if start_time < motion.config.delay and velocity.any():
        raise InvalidInputError(
            f"The motion holds its position for its delay of {motion.config.delay} s, but at "
            f"start_time={start_time} the robot moves: velocity={velocity.tolist()}. Let it come to rest "
            "first, or start after the delay."
        )
    if goal_from is not None:
        motion, weights = motion.with_fixed_goal(weights, _checked("goal_from", goal_from, motion.num_dof))
    elif motion.config.relative_goal and start_time > 0:
        raise InvalidInputError(
            f"The motion's goal is relative to where the robot was at time 0, but it is planned from "
            f"start_time={start_time} on. Give that position as goal_from."
        )
    course = _Course(motion, weights, position, velocity, dt, start_time, duration - start_time)
    return course.at(course.rows(1.0), 1.0) if limits is None else _within(course, limits, on_violation)


def _checked(name: str, values: Tensor, size: int) -> Tensor:
    if values.shape != (size,):
        raise InvalidInputError(f"{name} must be [{size}], of one motion; got {list(values.shape)}.")
    if not values.isfinite().all():
        raise InvalidInputError(f"{name} must hold finite numbers, got {values.tolist()}.")
    return values.detach().to(torch.float64)


@dataclass(frozen=True)
class _Course:
    """A motion from a state on."""

    motion: ProDMP
    weights: Tensor
    position: Tensor
    velocity: Tensor
    dt: float
    begin: float
    """Time of the primitive in that state."""
    seconds: float
    """From there to the motion's end."""

    def at(self, times: FloatArray, slowed: float) -> Plan:
        """The motion, `slowed` times slower, at times after the state."""
        own_times = times / slowed
        return self._run(times, own_times, self.motion.basis(self.begin + own_times, self.begin), slowed)

    def looked_at(self, slowed: float) -> Plan:
        """The motion, `slowed` times slower, at the instants where limits are looked after."""
        instants, basis = self._looks
        return self._run(instants * slowed, instants, basis, slowed)

    def _run(self, times: FloatArray, own_times: FloatArray, basis: MotionBasis, slowed: float) -> Plan:
        """A slower motion is the same one in a slower time, in which the robot sets out faster."""
        if slowed != 1.0 and not slowed * self.seconds <= _MOST_STEPS * self.dt:
            raise MotionLimitError(
                f"To keep to its limits the motion would have to be {slowed:.3g} times slower, which is "
                f"more than {_MOST_STEPS:,} steps of {self.dt} s. Raise the limits."
            )
        positions, velocities = self.motion.trajectory(
            self.weights, self.position, self.velocity * slowed, basis
        )
        accelerations = self.motion.accelerations(
            self.weights, self.position, positions, velocities, self.begin + own_times
        )
        return Plan(
            times, positions.numpy(), velocities.numpy() / slowed, accelerations.numpy() / slowed**2, slowed
        )

    def rows(self, slowed: float) -> FloatArray:
        """When the robot is told a step: as many whole ones as it takes to see the motion's end."""
        steps = max(1, math.ceil(slowed * self.seconds / self.dt - 1e-6))  # rounding must not add one
        return self.dt * np.arange(1, steps + 1, dtype=np.float64)

    @cached_property
    def _looks(self) -> tuple[FloatArray, MotionBasis]:
        """Where limits are looked after, at the motion's own speed, and what it is made of there."""
        looks = max(2, math.ceil(self.seconds / self.dt * _LOOKS_PER_STEP) + 1)
        instants = np.linspace(0.0, self.seconds, looks)
        delay = self.motion.config.delay
        if self.begin < delay < self.begin + self.seconds:  # accelerations jump there
            instants = np.append(instants, delay - self.begin)
        return instants, self.motion.basis(self.begin + instants, self.begin)


def _within(course: _Course, limits: MotionLimits, on_violation: OnViolation) -> Plan:
    """The rows of the motion, slower by the least factor that keeps them and what lies between in limits."""
    _check_initial_speed(course.velocity, limits)
    slowed = 1.0
    for _ in range(_TRIES):
        looked = _slow_enough(course, limits, on_violation, slowed)
        _check_positions(looked, limits)
        slowed = looked.slowed
        rows = course.at(course.rows(slowed), slowed)
        end, last = slowed * course.seconds, float(rows.times[-1])
        past = course.at(np.linspace(end, max(end, last), _LOOKS_PER_STEP + 1), slowed)
        within = _excess(past, limits) <= 1 + _ROUNDING and not _out_of_range(past, limits)
        if not within and last > end * (1 + _ROUNDING):
            if on_violation == "refuse":
                raise MotionLimitError(_past_its_end(past))
            slowed *= last / end  # so slow it ends with the last row
        elif (excess := _excess(rows, limits)) > 1 + _ROUNDING:  # a row on a peak between two looks
            if on_violation == "refuse":
                raise MotionLimitError(_too_fast(rows, on_violation))
            slowed *= excess
        else:
            _check_positions(rows, limits)
            return rows
    raise MotionLimitError(_too_fast(looked, on_violation))


def _slow_enough(course: _Course, limits: MotionLimits, on_violation: OnViolation, slowed: float) -> Plan:
    """At all instants, by the least factor from `slowed` on that keeps speeds and pushes up to the end."""
    too_fast, moving = slowed, bool(course.velocity.any())
    for _ in range(_TRIES):
        plan = course.looked_at(slowed)
        excess = _excess(plan, limits)
        if excess <= 1 + _ROUNDING:
            break
        if on_violation == "refuse":
            raise MotionLimitError(_too_fast(plan, on_violation))
        too_fast, slowed = slowed, slowed * (max(excess, _LEAST_STEP) if moving else excess)
    else:
        raise MotionLimitError(_too_fast(plan, on_violation))
    # From rest the path stays, so that the factor is exact; in motion it may be some per cent too large.
    while moving and plan.slowed - too_fast > _NEAR * plan.slowed:
        middle = (too_fast + plan.slowed) / 2
        tried = course.looked_at(middle)
        if _excess(tried, limits) <= 1 + _ROUNDING:
            plan = tried
        else:
            too_fast = middle
    return plan


def _check_initial_speed(velocity: Tensor, limits: MotionLimits) -> None:
    speed = np.abs(velocity.numpy())
    allowed = limits.each("velocity", len(speed))
    joint = int((speed / allowed).argmax())
    if speed[joint] > allowed[joint] * (1 + _ROUNDING):  # a plan's own row may be on its limit
        raise MotionLimitError(
            f"Joint {joint + 1} starts at a speed of {speed[joint]:.4g}, above its limit of "
            f"{allowed[joint]:.4g}. Slow the robot down before this motion."
        )


def _excess(plan: Plan, limits: MotionLimits) -> float:
    """By how much slower the motion would meet its limits, were its path to stay: 1 or less if it does."""
    joints = plan.positions.shape[1]
    speed = np.abs(plan.velocities) / limits.each("velocity", joints)
    push = np.abs(plan.accelerations) / limits.each("acceleration", joints)
    return float(max(speed.max(), math.sqrt(push.max())))


def _out_of_range(plan: Plan, limits: MotionLimits) -> tuple[int, int] | None:
    """The row and the joint that are the farthest out of the range of positions, if any are."""
    joints = plan.positions.shape[1]
    below = limits.each("position_low", joints) - plan.positions
    above = plan.positions - limits.each("position_high", joints)
    worst = np.maximum(below, above)
    step, joint = np.unravel_index(worst.argmax(), worst.shape)
    allowed = _ROUNDING * max(1.0, abs(plan.positions[step, joint]))
    return (int(step), int(joint)) if worst[step, joint] > allowed else None


def _check_positions(plan: Plan, limits: MotionLimits) -> None:
    if found := _out_of_range(plan, limits):
        step, joint = found
        low, high = (
            limits.each(f"position_{end}", plan.positions.shape[1])[joint] for end in ("low", "high")
        )
        raise MotionLimitError(
            f"Joint {joint + 1} would be at {plan.positions[step, joint]:.4g} after {plan.times[step]:.3g} "
            f"s, out of [{low:.4g}, {high:.4g}]. Slowing down does not mend that: choose other weights, or "
            "condition them on via-points within the range."
        )


def _too_fast(plan: Plan, on_violation: OnViolation) -> str:
    found = f"{_speeds(plan)}."
    if on_violation == "refuse":
        return f'The motion is too fast for the robot: {found} on_violation="scale" would slow it down.'
    return f"The motion exceeds the robot's limits even when {plan.slowed:.3g} times slower: {found}"


def _past_its_end(plan: Plan) -> str:
    return (
        f"The motion ends after {plan.times[0]:.4g} s, within the limits, but the robot's last step is at "
        f"{plan.times[-1]:.4g} s, where it exceeds them: positions up to {np.abs(plan.positions).max():.4g}, "
        f"{_speeds(plan)}. Choose a duration of whole steps; "
        'on_violation="scale" would slow the motion down to one.'
    )


def _speeds(plan: Plan) -> str:
    fastest, hardest = np.abs(plan.velocities).max(), np.abs(plan.accelerations).max()
    return f"speeds up to {fastest:.4g}, accelerations up to {hardest:.4g}"
