"""Turn a desired position and velocity into an action.

Functions of arrays alone; clipping to the action space happens where the action is applied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tether.episodic.episodes import FloatArray
from tether.errors import InvalidInputError


class PDController:
    """Track a trajectory by torques proportional to the errors in position and velocity.

    action = position_gains (desired - position) + velocity_gains (desired velocity - velocity), each
    entry for its own joint.

    Args:
        position_gains: [D] or one number for all joints; action units per unit of position.
        velocity_gains: [D] or one number for all joints; action units per unit of velocity.

    Raises:
        InvalidInputError: gains that are negative, not finite or of another shape.

    >>> controller = PDController(position_gains=2.0, velocity_gains=[0.5, 1.0])
    >>> controller(np.array([1.0, 0.0]), np.zeros(2), np.array([0.5, 0.0]), np.array([0.0, 1.0]))
    array([ 1., -1.])
    """

    def __init__(self, position_gains: ArrayLike, velocity_gains: ArrayLike) -> None:
        self.position_gains = _checked_gains("position_gains", position_gains)
        self.velocity_gains = _checked_gains("velocity_gains", velocity_gains)

    def __call__(
        self,
        desired_position: FloatArray,
        desired_velocity: FloatArray,
        position: FloatArray,
        velocity: FloatArray,
    ) -> FloatArray:
        """The action, [D], from where the robot ought to be and where it is (all [D]).

        Raises:
            InvalidInputError: the four arrays differ in shape.
        """
        if not desired_position.shape == desired_velocity.shape == position.shape == velocity.shape:
            raise InvalidInputError(
                "Desired position and velocity and actual position and velocity need one shape [D]; got "
                f"{desired_position.shape}, {desired_velocity.shape}, {position.shape}, {velocity.shape}."
            )
        by_position = self.position_gains * (desired_position - position)
        return by_position + self.velocity_gains * (desired_velocity - velocity)


def _checked_gains(name: str, gains: ArrayLike) -> FloatArray:
    array = np.asarray(gains, dtype=np.float64)
    if array.ndim > 1 or not np.isfinite(array).all() or (array < 0).any():
        raise InvalidInputError(f"{name} are one number or [D] numbers >= 0; got {array.tolist()}.")
    return array


@dataclass(frozen=True)
class MocapController:
    """Steer a hand that moves by position differences, with its gripper commanded directly (Meta-World).

    action = [scale (desired - hand), desired gripper]. Meta-World moves its hand's target by action /
    100 metres a step, so ``scale=100`` asks for the whole remaining difference at once.

    >>> MocapController(scale=100.0)(np.array([0.1, 0.6, 0.2, -1.0]), hand=np.array([0.1, 0.595, 0.2]))
    array([ 0. ,  0.5,  0. , -1. ])
    """

    scale: float = 100.0
    """Action units per metre."""

    def __call__(self, desired_position: FloatArray, hand: FloatArray) -> FloatArray:
        """The action [4] from the desired hand position and gripper [4] and the hand's position [3].

        Raises:
            InvalidInputError: other shapes.
        """
        if desired_position.shape != (4,) or hand.shape != (3,):
            raise InvalidInputError(
                "The desired position is [x, y, z, gripper] and the hand [x, y, z]; got shapes "
                f"{desired_position.shape} and {hand.shape}."
            )
        action = desired_position.copy()
        action[:3] = self.scale * (desired_position[:3] - hand)
        return action
