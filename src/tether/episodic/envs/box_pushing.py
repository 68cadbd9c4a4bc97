"""Box Pushing: a seven-joint arm pushes a box to a target position and orientation with a rod.

Ported from fancy_gym 0.3.0 (MIT licence, see NOTICE): same model, starts, observations and rewards.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import gymnasium
import mujoco
import numpy as np

from tether.episodic.controllers import PDController
from tether.episodic.envs.panda_kinematics import JOINT_HIGH, JOINT_LOW, between, solve_inverse_kinematics
from tether.episodic.envs.rotations import rotation_distance
from tether.episodic.envs.simulation import JointAdapter, MujocoTaskEnv
from tether.episodic.episodes import FloatArray
from tether.errors import check_option

BoxReward = Literal["dense", "sparse", "spatially_sparse"]
BoxTurns = Literal["quaternion", "direction"]

_SPEED_LIMIT = np.array([2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61])
_TORQUE_LIMIT = np.array([90.0, 90.0, 90.0, 90.0, 12.0, 12.0, 12.0])
_TORQUE_SCALE = 10.0
_ROD_DOWN = np.array([0.0, 1.0, 0.0, 0.0])
_START_JOINTS = np.array([0.0, 0.0, 0.0, -1.5, 0.0, 1.5, 0.0])
_FIXED_BOX = np.array([0.4, 0.3, -0.01, 0.0, 0.0, 0.0, 1.0])
_BOX_LOW, _BOX_HIGH = np.array([0.3, -0.45, -0.01]), np.array([0.6, 0.45, -0.01])
_NEAREST_TARGET = 0.3
_SUCCESS_DISTANCE, _SUCCESS_ANGLE = 0.05, 0.5
_REMEMBERED_STARTS = 1000
_POSE_SIZE: dict[BoxTurns, int] = {"quaternion": 7, "direction": 6}


class BoxPushingEnv(MujocoTaskEnv):
    """Seven joints, torques in [-1, 1] times 10 Nm on top of gravity compensation, 100 steps of 20 ms.

    Observation [28]: joint positions (7) and velocities (7), box position (3) and orientation (4), target
    position (3) and orientation (4). The target is drawn anew, at least 0.3 m from the box; the box
    starts at a fixed place unless ``random_init``. ``info["success"]`` says whether the box is within 5 cm
    and 0.5 rad of it at present; the original says so at the last step alone.

    A quaternion tells a turn by half its angle: boxes turned by 179 degrees to the left and to the right are
    two degrees apart and look opposite. What a policy has learned of one it does not know of the other.

    Args:
        reward: "dense" tells the distance to the target at every step; "sparse" at the last step alone
            (and punishes joint velocity there); "spatially_sparse" at the last step and only within
            10 cm of the target.
        random_init: draw where the box starts, too.
        turns: how the observation tells how box and target are turned: "quaternion" as published, or
            "direction", where the x axis of each points (3 each; the observation has 26 entries), which has
            no such seam.
        options: of `MujocoTaskEnv`: render_mode, width, height, camera.
    """

    metadata = MujocoTaskEnv.metadata | {"render_fps": 50}
    horizon = 100

    def __init__(
        self,
        *,
        reward: BoxReward = "dense",
        random_init: bool = False,
        turns: BoxTurns = "quaternion",
        **options: Any,
    ) -> None:
        check_option("reward", reward, get_args(BoxReward))
        check_option("turns", turns, get_args(BoxTurns))
        options.setdefault("camera", "overview")
        size = 14 + 2 * _POSE_SIZE[turns]
        super().__init__("box_pushing.xml", frame_skip=10, action_size=7, observation_size=size, **options)
        self.reward = reward
        self.random_init = random_init
        self.turns = turns
        self._box = self.model.body("box_0").id
        self._target = self.model.body("replan_target_pos").id
        self._target_twin = self.model.body("target_pos").id
        self._joints_above: dict[bytes, FloatArray] = {}
        self._beyond = np.empty((3, 7))
        self._watch(self.data)

    def _watch(self, data: Any) -> None:
        """Views of the simulator's state: to look them up takes as long as what is done with them."""
        box, target = self._box, self._target
        self._joints, self._speeds, self._gravity = data.qpos[:7], data.qvel[:7], data.qfrc_bias[:7]
        self._box_place, self._box_turn = data.xpos[box], data.xquat[box]
        self._target_place, self._target_turn = data.xpos[target], data.xquat[target]
        self._rod_turn = data.xquat[self.model.body("push_rod").id]
        self._tip_place = data.site_xpos[self.model.site("rod_tip").id]
        turns = data.xquat if self.turns == "quaternion" else data.xmat[:, ::3]  # the first columns: x axes
        poses = self._box_place, turns[box], self._target_place, turns[target]
        self._observed = (self._joints, self._speeds, *poses)

    def _begin(self) -> None:
        box = self._draw_place() if self.random_init else _FIXED_BOX
        target = self._draw_place()
        while np.linalg.norm(target[:2] - box[:2]) < _NEAREST_TARGET:
            target = self._draw_place()
        for body in (self._target, self._target_twin):
            self.model.body_pos[body], self.model.body_quat[body] = target[:3], target[3:]
        self.data.qpos[7:9] = 0.0
        self.data.qpos[9:] = box
        self.data.qpos[:7] = self._start_joints(box)
        mujoco.mj_forward(self.model, self.data)
        self._energy = 0.0

    def _draw_place(self) -> FloatArray:
        position = self.np_random.uniform(low=_BOX_LOW, high=_BOX_HIGH)
        angle = self.np_random.uniform(low=0.0, high=2.0 * np.pi)
        # The original puts sine first: every angle is as likely, so only the numbering of draws is odd.
        return np.concatenate([position, [math.sin(angle / 2), 0.0, 0.0, math.cos(angle / 2)]])

    def _start_joints(self, box: FloatArray) -> FloatArray:
        """Joint angles that put the rod into the box; an episode is reset to twice, and solved once."""
        key = box.tobytes()
        if key not in self._joints_above:
            if len(self._joints_above) >= _REMEMBERED_STARTS:
                self._joints_above.clear()
            self.data.qpos[:7] = _START_JOINTS
            above = box[:3] + np.array([0.0, 0.0, 0.15])
            self._joints_above[key] = solve_inverse_kinematics(self.model, self.data, above, _ROD_DOWN)
        return self._joints_above[key]

    def _advance(self, action: FloatArray) -> tuple[float, dict[str, Any]]:
        torque = _TORQUE_SCALE * action
        at_motors = between(-_TORQUE_LIMIT, torque + self._gravity, _TORQUE_LIMIT)
        self._simulate(at_motors, self.frame_skip)
        effort = float(np.square(torque).sum())
        self._energy += effort
        last = self._steps >= self.horizon
        distance = _length(self._box_place - self._target_place)
        angle = rotation_distance(self._box_turn, self._target_turn)
        return self._reward(last, effort, distance, angle), {
            "success": distance < _SUCCESS_DISTANCE and angle < _SUCCESS_ANGLE,
            "goal_distance": distance,
            "goal_angle": angle,
            "energy": self._energy,
        }

    def _reward(self, last: bool, effort: float, distance: float, angle: float) -> float:
        turn = angle / np.pi
        to_box = _length(self._box_place - self._tip_place)
        reward = self._limit_penalty() - 2.0 * min(max(to_box, 0.05), 100.0)
        tilt = rotation_distance(self._rod_turn, _ROD_DOWN)
        if tilt > np.pi / 4:
            reward -= tilt / np.pi
        if self.reward == "dense":
            return reward - 3.5 * distance - turn - 0.0005 * effort
        reward -= 0.02 * effort
        if last and self.reward == "sparse":
            reward -= 350.0 * distance + 100.0 * turn + 50.0 * _length(self._speeds)
        elif last and distance < 0.1:
            reward += 300.0 - min(1050.0 * distance, 100.0) - min(150.0 * turn, 100.0)
        return reward

    def _limit_penalty(self) -> float:
        """Minus how far the joints are outside of their range and speed limits, in rad and rad/s."""
        above, below, fast = self._beyond
        np.subtract(self._joints, JOINT_HIGH, out=above)
        np.subtract(JOINT_LOW, self._joints, out=below)
        np.subtract(np.abs(self._speeds), _SPEED_LIMIT, out=fast)
        high, low, speed = np.maximum(self._beyond, 0.0, out=self._beyond).sum(axis=1).tolist()
        return -(high + low + speed)

    def _observation(self) -> FloatArray:
        return np.concatenate(self._observed)


def _length(vector: FloatArray) -> float:
    """As np.linalg.norm, which takes twice as long for a few numbers."""
    return math.sqrt(vector.dot(vector))


class BoxPushingAdapter(JointAdapter):
    """The seven joints follow the trajectory; context: the target's pose, and what else is random."""

    joints = slice(7)
    num_dof = 7
    position_units = ("rad",) * 7
    horizon = BoxPushingEnv.horizon
    dt = 0.02
    extra_names = ("goal_distance", "goal_angle", "energy")
    controller = PDController(
        position_gains=[1.2, 1.2, 1.2, 1.2, 0.5, 0.3, 0.1],
        velocity_gains=[0.1, 0.1, 0.1, 0.1, 0.06, 0.05, 0.03],
    )

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        super().__init__(env, env_id)
        task = env.unwrapped
        assert isinstance(task, BoxPushingEnv)
        pose = _POSE_SIZE[task.turns]
        target = tuple(range(14 + pose, 14 + 2 * pose))
        self.context_indices = (*range(7), *range(14, 14 + pose), *target) if task.random_init else target
