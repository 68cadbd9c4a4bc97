"""Inverse kinematics of the Franka arm that pushes the box: where its joints are for a given hand pose.

Ported from fancy_gym 0.3.0 (MIT licence, see NOTICE); the gains are the original's, so that starts agree.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

from tether.episodic.envs.rotations import rotation_error
from tether.episodic.episodes import FloatArray

JOINT_HIGH = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])
JOINT_LOW = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])

_HOME = np.array([3.57795216e-09, 0.174532920, 3.30500960e-08, -0.872664630,
                  -1.14096181e-07, 1.22173047, 0.785398126])  # fmt: skip
_POSE_GAINS = np.array([33.9403713446798, 30.9403713446798, 33.9403713446798,
                        27.69370238555632, 33.98706171459314, 30.9185531893281])  # fmt: skip
_HOME_GAINS = 5.0 * np.array([7.675519770796831, 2.676935478437176, 8.539040163444975, 1.270446361314313,
                              8.87752182480855, 2.186782233762969, 4.414432577659688])  # fmt: skip
_LIMIT_GAIN = 20.0
_LIMIT_MARGIN = 0.1
_REGULARISATION = 1e-6
_TOLERANCE = 1e-5
_MAX_ITERATIONS = 1000


def solve_inverse_kinematics(
    model: Any, data: Any, position: FloatArray, orientation: FloatArray
) -> FloatArray:
    """Joint angles [7] that bring the hand's ``tcp`` to a position [3] and orientation [4].

    Follows the regularised pseudo-inverse of the hand's Jacobian with an adaptive step, drawn towards a
    home posture and away from joint limits in the directions that do not move the hand. Starts from the
    joints in ``data`` and uses it as scratch space.
    """
    hand = model.body("tcp").id
    joints = data.qpos[:7].copy()
    velocity = np.zeros(7)
    step, previous_error, iteration = 1e-3, np.inf, 0
    while True:
        candidate = np.clip(joints + step * velocity, JOINT_LOW, JOINT_HIGH)
        pose_error, error = _pose_error(model, data, hand, candidate, position, orientation)
        if error > previous_error:
            step *= 0.7
            continue
        joints = candidate
        step *= 1.025
        if error < _TOLERANCE or iteration > _MAX_ITERATIONS:
            return joints
        previous_error = error
        velocity = _joint_velocity(model, data, hand, joints, pose_error)
        iteration += 1


def _pose_error(
    model: Any, data: Any, hand: int, joints: FloatArray, position: FloatArray, orientation: FloatArray
) -> tuple[FloatArray, float]:
    """How far the hand is off: a feedback vector [6], clipped, and a sum of squares."""
    data.qpos[:7] = joints
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)  # the Jacobian below needs it
    current = data.xquat[hand]
    if np.linalg.norm(current - orientation) > np.linalg.norm(current + orientation):
        current = -current
    offset = np.clip(position - data.xpos[hand], -0.1, 0.1)
    turn = np.clip(rotation_error(current, orientation), -0.5, 0.5)
    error = float(np.square(offset).sum() + np.square(current - orientation).sum())
    return np.concatenate([offset, turn]), error


def _joint_velocity(
    model: Any, data: Any, hand: int, joints: FloatArray, pose_error: FloatArray
) -> FloatArray:
    linear, angular = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    mujoco.mj_jacBody(model, data, linear, angular, hand)
    jacobian = np.concatenate([linear, angular])[:, :7]
    posture = _HOME_GAINS * (_HOME - joints)
    too_high, too_low = joints > JOINT_HIGH - _LIMIT_MARGIN, joints < JOINT_LOW + _LIMIT_MARGIN
    posture += too_high * _LIMIT_GAIN * (JOINT_HIGH - _LIMIT_MARGIN - joints)
    posture += too_low * _LIMIT_GAIN * (JOINT_LOW + _LIMIT_MARGIN - joints)
    squared = jacobian @ jacobian.T + _REGULARISATION * np.eye(6)
    velocity: FloatArray = (
        jacobian.T @ np.linalg.solve(squared, _POSE_GAINS * pose_error - jacobian @ posture) + posture
    )
    return velocity
