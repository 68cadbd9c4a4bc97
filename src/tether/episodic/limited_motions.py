"""Motions as a robot with limits would run them, for a simulation that has none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tether.episodic.episodes import FloatArray, Starts
from tether.episodic.learner import Learner, Motions
from tether.episodic.plans import MotionLimits, OnViolation, plan_motion
from tether.errors import ConfigError, MotionLimitError


@dataclass(frozen=True)
class LimitedMotions(Motions):
    """Motions within limits: slower ones end with the episode, refused ones stay where they begin."""

    slowed: FloatArray
    """How many times slower each is than as it was chosen, [E]; NaN where it is refused."""

    refused: NDArray[np.bool_]
    """[E]"""


def within_limits(
    learner: Learner, motions: Motions, starts: Starts, limits: MotionLimits, on_violation: OnViolation
) -> LimitedMotions:
    """What a robot would make of motions, by `tether.episodic.plans.plan_motion`.

    Args:
        learner: that chose them.
        motions: with `weights` [E, W], as those of every algorithm here have.
        starts: where they begin.
        limits: of the robot.
        on_violation: whether motions that are too fast are run slower or refused.

    Raises:
        ConfigError: motions without weights, or limits that do not fit the robot.
    """
    weights = getattr(motions, "weights", None)
    if weights is None:
        raise ConfigError(
            f"{type(learner).__name__}.act returns motions without their weights, which limits need. Let its "
            "class of motions have them as `weights`, [E, W]."
        )
    spec = learner.spec
    positions = np.repeat(starts.positions[:, None], spec.horizon, axis=1)
    velocities, slowed = np.zeros_like(positions), np.full(len(positions), np.nan)
    states = torch.from_numpy(starts.positions), torch.from_numpy(starts.velocities)
    for index, state in enumerate(zip(weights.double(), *states, strict=True)):
        try:
            plan = plan_motion(
                learner.motion, *state, spec.dt, spec.duration, limits=limits, on_violation=on_violation
            )
        except MotionLimitError:  # which counts, in `refused`
            continue
        positions[index], velocities[index] = (of[: spec.horizon] for of in (plan.positions, plan.velocities))
        slowed[index] = plan.slowed
    return LimitedMotions(positions, velocities, slowed, np.isnan(slowed))
