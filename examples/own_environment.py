"""An environment of your own, with nothing changed in Tether.

A point in the plane is to pass through one place in the middle of a movement and to stop at another: what
counts is the motion as a whole. The module needs three things: a gymnasium environment, an adapter that says
how a desired trajectory becomes actions, and two lines that register them.

    PYTHONPATH=examples tether episodic train --env own_environment:ViaPoint-v0 --iterations 50 --no-film
"""

from typing import Any

import gymnasium
import numpy as np

from tether.episodic.adapters import PositionControlledEnv, register_adapter
from tether.episodic.controllers import PDController
from tether.episodic.episodes import FloatArray


class ViaPointEnv(gymnasium.Env[FloatArray, FloatArray]):
    """A unit mass, pushed by a force of up to 20 N. Observation: where to pass, position, velocity.

    The reward is minus the distance to the via point at the half of the episode, and minus the distance to
    (1, 0) at its end; otherwise it is zero.
    """

    horizon, dt, force = 50, 0.02, 20.0
    goal = np.array([1.0, 0.0])

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), dtype=np.float64)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,), dtype=np.float64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        self.via = np.array([0.5, self.np_random.uniform(-0.5, 0.5)])
        self.position, self.velocity, self.steps = np.zeros(2), np.zeros(2), 0
        return self.observation(), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        self.velocity = self.velocity + self.dt * self.force * action
        self.position = self.position + self.dt * self.velocity
        self.steps += 1
        distance = 0.0
        if self.steps in (self.horizon // 2, self.horizon):
            aim = self.goal if self.steps == self.horizon else self.via
            distance = float(np.linalg.norm(self.position - aim))
        return self.observation(), -distance, False, False, {"miss": distance}

    def observation(self) -> FloatArray:
        return np.concatenate([self.via, self.position, self.velocity])


class ViaPointAdapter(PositionControlledEnv):
    """The point follows the desired positions by a PD controller; the task's context is the via point."""

    num_dof = 2
    horizon = ViaPointEnv.horizon
    dt = ViaPointEnv.dt
    context_indices = (0, 1)
    headline = "miss"  # the task is judged by the last step's info["miss"]
    extra_names = ("miss",)
    controller = PDController(position_gains=5.0, velocity_gains=1.0)

    def joint_positions(self) -> FloatArray:
        return self.env.unwrapped.position

    def joint_velocities(self) -> FloatArray:
        return self.env.unwrapped.velocity

    def action(self, desired_position: FloatArray, desired_velocity: FloatArray) -> FloatArray:
        return self.controller(
            desired_position, desired_velocity, self.joint_positions(), self.joint_velocities()
        )


gymnasium.register("ViaPoint-v0", entry_point=f"{__name__}:ViaPointEnv")
register_adapter("ViaPoint-v0", f"{__name__}:ViaPointAdapter")
