"""Hopper Jump: a one-legged robot jumps as high as it can and lands on a mark.

Ported from fancy_gym 0.3.0 (MIT licence, see NOTICE): same model, starts, observations and rewards.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

from tether.episodic.controllers import PDController
from tether.episodic.envs.simulation import JointAdapter, MujocoTaskEnv
from tether.episodic.episodes import FloatArray

_START_HEIGHT = 1.5
_NOT_LANDED = 5.0


class HopperJumpEnv(MujocoTaskEnv):
    """Three joints, torques in [-1, 1] times 200 Nm, 250 steps of 8 ms.

    Observation [16]: positions (x, z, angle, thigh, leg, foot), their velocities clipped to [-10, 10],
    foot minus mark (3), and the mark's x, drawn from [0.3, 1.35] m. The joints' start is drawn as well:
    thigh and leg bent by up to 0.5 and 0.2 rad, the foot by up to 0.785 rad.

    Args:
        sparse: reward height and distance at the last step alone, by the highest point of the episode.
        height_weight: reward for a metre of torso height.
        distance_weight: cost of a metre between foot and mark.
        landing_weight: cost of a metre between foot and mark at the first landing after a jump.
        healthy_reward: for a torso above 0.5 m.
        show_memory: append to the observation what the sparse reward remembers and no state shows: the
            highest point so far, and the distance at the first landing (5 before it). A critic of states
            cannot give credit for a height that the states after it do not tell.
        options: of `MujocoTaskEnv`: render_mode, width, height, camera.
    """

    metadata = MujocoTaskEnv.metadata | {"render_fps": 125}
    horizon = 250

    def __init__(
        self,
        *,
        sparse: bool = False,
        height_weight: float = 3.0,
        distance_weight: float = 3.0,
        landing_weight: float = 0.0,
        healthy_reward: float = 1.0,
        control_weight: float = 1e-3,
        show_memory: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("camera", "track")
        size = 18 if show_memory else 16
        super().__init__("hopper_jump.xml", frame_skip=4, action_size=3, observation_size=size, **options)
        self.sparse = sparse
        self.show_memory = show_memory
        self.height_weight = height_weight
        self.distance_weight = distance_weight
        self.landing_weight = landing_weight
        self.healthy_reward = healthy_reward
        self.control_weight = control_weight
        self._torso = self.model.body("torso").id
        self._foot_site = self.model.site("foot_site").id
        self._mark = self.model.body("goal_site_body").id
        self._foot_and_floor = {self.model.geom("foot_geom").id, self.model.geom("floor").id}
        self._goal = np.zeros(3)

    def _begin(self) -> None:
        self._goal = np.concatenate([self.np_random.uniform(0.3, 1.35, 1), np.zeros(2)])
        self.model.body_pos[self._mark] = self._goal
        low, high = np.zeros(6), np.zeros(6)
        low[3], low[4], high[5] = -0.5, -0.2, 0.785
        start = self.model.qpos0 + self.np_random.uniform(low=low, high=high, size=6)
        start[1] += _START_HEIGHT - self.model.qpos0[1]
        self.data.qpos[:] = start
        mujoco.mj_forward(self.model, self.data)
        self._max_height = 0.0
        self._touched = self._jumped = self._landed = False
        self._landing_distance = _NOT_LANDED

    def _advance(self, action: FloatArray) -> tuple[float, dict[str, Any]]:
        self._simulate(action, self.frame_skip)
        height = float(self.data.xpos[self._torso, 2])
        self._max_height = max(height, self._max_height)
        distance = float(np.linalg.norm(self.data.site_xpos[self._foot_site] - self._goal))
        self._watch_landing(distance)
        healthy = bool(
            self.data.qpos[1] > 0.5
            and (np.abs(self.data.qpos[2:]) < 100).all()
            and (np.abs(self.data.qvel) < 100).all()
        )
        reward = -self.control_weight * float(np.square(action).sum())
        if not self.sparse or self._steps >= self.horizon:
            reward += self.height_weight * (self._max_height if self.sparse else height)
            reward -= self.distance_weight * distance
            reward -= self.landing_weight * self._landing_distance
            reward += self.healthy_reward * healthy
        return reward, {
            "height": height,
            "max_height": self._max_height,
            "goal_distance": distance,
            "landing_distance": self._landing_distance,
            "healthy": healthy,
            "took_off": self._jumped,
        }

    def _watch_landing(self, distance: float) -> None:
        """The first floor contact after the foot has touched the floor and left it again."""
        if self._landed:
            return
        pairs = self.data.contact.geom
        contact = any({int(first), int(second)} == self._foot_and_floor for first, second in pairs)
        if not self._touched:
            self._touched = contact
        elif not self._jumped:
            self._jumped = not contact
        elif contact:
            self._landed = True
            self._landing_distance = distance

    def _observation(self) -> FloatArray:
        foot_to_mark = self.data.site_xpos[self._foot_site] - self._goal
        velocities = np.clip(self.data.qvel, -10.0, 10.0)
        memory = [self._max_height, self._landing_distance] if self.show_memory else []
        return np.concatenate([self.data.qpos, velocities, foot_to_mark, self._goal[:1], memory])


class HopperJumpAdapter(JointAdapter):
    """The three joints follow the trajectory; context: their start angles and the mark."""

    joints = slice(3, 6)
    num_dof = 3
    position_units = ("rad",) * 3
    horizon = HopperJumpEnv.horizon
    dt = 0.008
    context_indices = (3, 4, 5, 15)
    headline = "max_height"
    event_key = "took_off"
    extra_names = ("max_height", "goal_distance", "landing_distance")
    controller = PDController(position_gains=1.0, velocity_gains=0.1)
