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
_NEARLY_HIGH, _NEARLY_LOW = JOINT_HIGH - 0.1, JOINT_LOW + 0.1
_REGULARISATION = 1e-6 * np.eye(6)
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
    jacobian = np.empty((6, model.nv))
    step, previous_error, iteration = 1e-3, np.inf, 0
    while True:
        candidate = between(JOINT_LOW, joints + step * velocity, JOINT_HIGH)
        data.qpos[:7] = candidate
        mujoco.mj_kinematics(model, data)
        pose_error, error = _pose_error(data.xpos[hand], data.xquat[hand], position, orientation)
        if error > previous_error:
            step *= 0.7
            continue
        joints = candidate
        step *= 1.025
        if error < _TOLERANCE or iteration > _MAX_ITERATIONS:
            return joints
        previous_error = error
        mujoco.mj_comPos(model, data)  # the Jacobian needs it
        mujoco.mj_jacBody(model, data, jacobian[:3], jacobian[3:], hand)
        velocity = _joint_velocity(jacobian[:, :7], joints, pose_error)
        iteration += 1


def between(low: Any, values: FloatArray, high: Any) -> FloatArray:
    """As np.clip, which takes several times as long for a few numbers."""
    between: FloatArray = np.minimum(np.maximum(values, low), high)
    return between


def _pose_error(
    place: FloatArray, turn: FloatArray, position: FloatArray, orientation: FloatArray
) -> tuple[FloatArray, float]:
    """How far the hand is off: a feedback vector [6], clipped, and a sum of squares."""
    if turn.dot(orientation) < 0.0:  # the other name of the same turn is nearer
        turn = -turn
    feedback = np.empty(6)
    feedback[:3] = offset = between(-0.1, position - place, 0.1)
    feedback[3:] = between(-0.5, rotation_error(turn, orientation), 0.5)
    return feedback, float(np.square(offset).sum() + np.square(turn - orientation).sum())


def _joint_velocity(jacobian: FloatArray, joints: FloatArray, pose_error: FloatArray) -> FloatArray:
    posture = _HOME_GAINS * (_HOME - joints)
    posture += (joints > _NEARLY_HIGH) * _LIMIT_GAIN * (_NEARLY_HIGH - joints)
    posture += (joints < _NEARLY_LOW) * _LIMIT_GAIN * (_NEARLY_LOW - joints)
    squared = jacobian @ jacobian.T + _REGULARISATION
    along = np.linalg.solve(squared, _POSE_GAINS * pose_error - jacobian @ posture)
    velocity: FloatArray = jacobian.T @ along + posture
    return velocity
