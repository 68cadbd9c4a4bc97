"""The smallest task there is: a point in the plane reaches a goal. For tests and first steps."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from tether.episodic.adapters import PositionControlledEnv
from tether.episodic.controllers import PDController
from tether.episodic.envs.actions import checked_action
from tether.episodic.episodes import FloatArray


class PointReachEnv(gymnasium.Env[FloatArray, FloatArray]):
    """A unit mass in the plane is pushed by forces; reward is minus the distance to the goal.

    Observation: goal (2), position (2), velocity (2). Action: force in [-1, 1]^2 times 20 N. Success:
    within 5 cm of the goal. Needs numpy alone, so that it runs in a millisecond.
    """

    metadata: dict[str, Any] = {"render_modes": [], "render_fps": 50}  # noqa: RUF012 - as gymnasium declares it
    dt = 0.02
    horizon = 50
    force_scale = 20.0

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), dtype=np.float64)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,), dtype=np.float64)
        self.position = np.zeros(2)
        self.velocity = np.zeros(2)
        self._goal = np.zeros(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        self._goal = self.np_random.uniform(-1.0, 1.0, 2)
        self.position = self.np_random.uniform(-0.1, 0.1, 2)
        self.velocity = np.zeros(2)
        return self._observation(), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        force = self.force_scale * checked_action(self, action)
        self.velocity = self.velocity + self.dt * force
        self.position = self.position + self.dt * self.velocity
        distance = float(np.linalg.norm(self.position - self._goal))
        report = {"success": distance < 0.05, "distance": distance}
        return self._observation(), -distance, False, False, report

    def _observation(self) -> FloatArray:
        return np.concatenate([self._goal, self.position, self.velocity])


class PointReachAdapter(PositionControlledEnv):
    """The point follows a desired path by a PD controller; the goal is the context."""

    num_dof = 2
    position_units = ("m", "m")
    horizon = PointReachEnv.horizon
    dt = PointReachEnv.dt
    context_indices = (0, 1)
    extra_names = ("distance",)
    controller = PDController(position_gains=5.0, velocity_gains=1.0)

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        super().__init__(env, env_id)
        assert isinstance(env.unwrapped, PointReachEnv)
        self._point = env.unwrapped

    def joint_positions(self) -> FloatArray:
        return self._point.position

    def joint_velocities(self) -> FloatArray:
        return self._point.velocity

    def action(self, desired_position: FloatArray, desired_velocity: FloatArray) -> FloatArray:
        point = self._point
        return self.controller(desired_position, desired_velocity, point.position, point.velocity)
