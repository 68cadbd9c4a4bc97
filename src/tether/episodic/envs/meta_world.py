"""Meta-World's fifty tasks with seeds that work, and the adapter that steers its hand along a trajectory.

Meta-World itself ignores ``reset(seed=...)`` and freezes the first start it draws; here every episode's
object and goal are drawn anew from the environment's own generator. Needs the metaworld package.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
from numpy.typing import NDArray

from tether.episodic.adapters import PositionControlledEnv
from tether.episodic.controllers import MocapController
from tether.episodic.envs.actions import checked_action
from tether.episodic.envs.meta_world_quick import spare_time, without_looks
from tether.episodic.envs.meta_world_tasks import META_WORLD_TASKS
from tether.episodic.envs.simulation import Camera, raise_on_warnings
from tether.episodic.episodes import FloatArray
from tether.errors import ConfigError


class MetaWorldEnv(gymnasium.Env[FloatArray, FloatArray]):
    """One Meta-World task with the goal in sight, 500 steps of 12.5 ms.

    Observation [39] as in Meta-World: hand, gripper and objects now and one step ago, goal. Action [4] in
    [-1, 1]: hand displacement in centimetres, gripper effort. ``info["success"]`` says whether the present
    step meets the task's criterion.

    Args:
        task: e.g. "button-press-v3".
        render_mode: "rgb_array" or None, for which the model is left without geoms that are only seen.
        width, height: of pictures, in pixels.
        camera: one of the model's cameras.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012 - as gymnasium declares it

    horizon = 500

    def __init__(
        self,
        task: str,
        *,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 360,
        camera: str = "corner2",
    ) -> None:
        if task not in META_WORLD_TASKS:
            raise ConfigError(f"Unknown Meta-World task {task!r}. Known: {', '.join(META_WORLD_TASKS)}.")
        self.task = task
        self.render_mode = render_mode
        kind = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"]
        self.simulation = (kind if render_mode else without_looks(kind))(seed=0)
        self.simulation._freeze_rand_vec = False
        self.simulation.seeded_rand_vec = True
        spare_time(self.simulation)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), dtype=np.float64)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (39,), dtype=np.float64)
        self._warnings = self.simulation.data.warning.number  # a view
        self._camera = Camera(self.simulation.model, render_mode, width, height, camera)
        self._mounted_upside_down = camera.startswith("corner")
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        self.simulation.np_random = self.np_random
        observation, _ = self.simulation.reset()
        self._steps = 0
        return np.asarray(observation, dtype=np.float64), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Advance by one step; the episode is over after 500.

        Raises:
            InvalidInputError: an action of another shape, not finite or outside of [-1, 1].
            SimulationError: the simulator's state became unusable.
        """
        observation, reward, _, _, info = self.simulation.step(checked_action(self, action))
        self._steps += 1
        raise_on_warnings(self._warnings, self.simulation.data.time, f"Meta-World {self.task}", self._steps)
        report = {"success": bool(info["success"]), "object_to_target": float(info["obj_to_target"])}
        state = np.asarray(observation, dtype=np.float64)
        return state, float(reward), False, self._steps >= self.horizon, report

    def render(self) -> NDArray[np.uint8]:
        """A picture [height, width, 3], with the table downside down."""
        picture = self._camera.picture(self.simulation.data)
        return picture[::-1, ::-1] if self._mounted_upside_down else picture

    def close(self) -> None:
        """Release simulator and picture buffers."""
        self._camera.close()
        self.simulation.close()


class MetaWorldAdapter(PositionControlledEnv):
    """The hand's mocap body and the gripper follow the trajectory; context: the whole first observation."""

    num_dof = 4
    position_units = ("m", "m", "m", "1")
    horizon = MetaWorldEnv.horizon
    dt = 0.0125
    extra_names = ("object_to_target",)
    standing = 16  # a reset is fifty steps, a tenth of an episode; an environment is 10 MB
    controller = MocapController(scale=100.0)

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        super().__init__(env, env_id)
        task = env.unwrapped
        assert isinstance(task, MetaWorldEnv)
        model, data = task.simulation.model, task.simulation.data
        self._hand = data.mocap_pos[0]  # a view, like the next
        self._gripper = data.qpos[model.jnt_qposadr[model.joint("r_close").id] :][:1]

    def joint_positions(self) -> FloatArray:
        return np.concatenate([self._hand, self._gripper])

    def joint_velocities(self) -> FloatArray:
        return np.zeros(4)

    def action(self, desired_position: FloatArray, desired_velocity: FloatArray) -> FloatArray:
        return self.controller(desired_position, self._hand)
