"""Environments that go wrong in one way each, for the sampler's tests: "misbehaving_envs:test/<Way>-v0"."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np

from tether.episodic.adapters import PositionControlledEnv, register_adapter
from tether.episodic.episodes import FloatArray

HORIZON = 5
TROUBLE_STEP = 3


class CountingEnv(gymnasium.Env[FloatArray, FloatArray]):
    """Observation: the seed's first draw and the number of steps; `way` says what happens at step 3."""

    def __init__(self, way: str = "well") -> None:
        self.way = way
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), dtype=np.float64)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), dtype=np.float64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=None if self.way == "unseeded" else seed)
        self.draw, self.steps = self.np_random.uniform(), 0
        return np.array([self.draw, 0.0]), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        value = self.draw
        over = False
        if self.steps == TROUBLE_STEP:
            if self.way == "exits":
                os._exit(7)
            elif self.way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.way == "nan-for-half" and self.draw > 0.5:
                value = np.nan
            elif self.way == "raises":
                raise RuntimeError("the simulator's own words")
            elif self.way == "ends":
                over = True
            elif self.way == "sleeps":
                time.sleep(600.0)
        info = {
            "success": self.steps == TROUBLE_STEP,
            "threads": float(os.environ.get("OMP_NUM_THREADS", "0")),
            "worker": float(os.getpid()),
            "action": float(action[0]),
        }
        return np.array([value, self.steps]), 1.0, over, False, info


class CountingAdapter(PositionControlledEnv):
    """The desired position is the action."""

    num_dof = 1
    horizon = HORIZON
    dt = 0.1
    context_indices = (0,)
    extra_names = ("threads", "worker", "action")

    def joint_positions(self) -> FloatArray:
        return np.array([float(self.env.unwrapped.steps)])  # type: ignore[attr-defined]

    def joint_velocities(self) -> FloatArray:
        return np.zeros(1)

    def action(self, desired_position: FloatArray, desired_velocity: FloatArray) -> FloatArray:
        return desired_position


for _way in ("well", "exits", "killed", "nan-for-half", "raises", "ends", "sleeps", "unseeded"):
    _env_id = f"test/{_way}-v0"
    if _env_id not in gymnasium.registry:
        gymnasium.register(_env_id, entry_point=CountingEnv, kwargs={"way": _way})
    register_adapter(_env_id, f"{__name__}:CountingAdapter")
