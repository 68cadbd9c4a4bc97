"""Meta-World's fifty tasks with seeds that work, and the adapter that steers its hand along a trajectory.

Meta-World itself ignores ``reset(seed=...)`` and freezes the first start it draws; here every episode's
object and goal are drawn anew from the environment's own generator. Needs the metaworld package.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any, Self

import gymnasium
import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
from numpy.typing import NDArray

from tether.episodic.adapters import PositionControlledEnv
from tether.episodic.controllers import MocapController
from tether.episodic.envs.actions import checked_action
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
        render_mode: "rgb_array" or None.
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
        self.simulation = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"](seed=0)
        self.simulation._freeze_rand_vec = False
        self.simulation.seeded_rand_vec = True
        self._spare_time()
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), dtype=np.float64)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (39,), dtype=np.float64)
        self._warnings = self.simulation.data.warning.number  # a view
        self._camera = Camera(self.simulation.model, render_mode, width, height, camera)
        self._mounted_upside_down = camera.startswith("corner")
        self._steps = 0
        self._cleared = True

    def _spare_time(self) -> None:
        """Replace five of the task's methods by quicker ones that change no bit of what it tells.

        After each step gymnasium computes forces on bodies, which no task reads, and Meta-World puts its
        observation together from a dozen small arrays, and clips what is within its range. Its objects'
        turns are rotation matrices that SciPy tests for being one, and whether a pad touches the object it
        asks each contact of the scene, twice: in some tasks that takes three times as long as the physics.
        It also begins each episode twice, each time with fifty steps that bring the hand to its place, and
        clears the simulator in between: the first fifty come to nothing.
        """
        simulation, model, data = self.simulation, self.simulation.model, self.simulation.data
        # Views, which go with the simulation.
        hand, right, left = (data.xpos[model.body(name).id] for name in ("hand", "rightclaw", "leftclaw"))
        pads = [model.geom(name).id for name in ("leftpad_geom", "rightpad_geom")]
        as_written = type(simulation)._get_quat_objects
        turns_of_objects = FunctionType(as_written.__code__, as_written.__globals__ | {"Rotation": _Turn})

        def hand_and_objects() -> FloatArray:
            found = np.zeros(4 + simulation._obs_obj_max_len)
            found[:3] = hand
            gap = right - left
            found[3] = min(math.sqrt(gap.dot(gap)) / 0.1, 1.0)
            places = simulation._get_pos_objects().reshape(-1, 3)
            turns = turns_of_objects(simulation).reshape(-1, 4)
            objects = found[4 : 4 + 7 * len(places)].reshape(-1, 7)
            objects[:, :3], objects[:, 3:] = places, turns
            return found

        def observation() -> FloatArray:
            now = hand_and_objects()
            found = np.concatenate((now, simulation._prev_obs, simulation._target_pos))
            simulation._prev_obs = now
            return found

        def move_hand(action: FloatArray) -> None:  # of entries in [-1, 1], which `step` has checked
            wanted = data.mocap_pos[0] + action * simulation.action_scale
            data.mocap_pos[0] = np.minimum(np.maximum(wanted, simulation.mocap_low), simulation.mocap_high)
            data.mocap_quat[0] = (1.0, 0.0, 1.0, 0.0)

        def simulate(control: Any, n_frames: int) -> None:
            self._cleared |= data.time == 0.0
            if self._cleared:
                data.ctrl[:] = control
                mujoco.mj_step(model, data, n_frames)

        def touching(thing: int) -> bool:
            pairs, rows = data.contact.geom, data.contact.efc_address
            things = (pairs == thing).any(axis=1)
            touched = (things & (pairs == pad).any(axis=1) for pad in pads)
            return all(sum(data.efc_force[rows[contacts]]) > 0 for contacts in touched)

        simulation._get_obs = observation
        simulation.touching_object = touching
        simulation.set_xyz_action = move_hand
        simulation.do_simulation = simulate

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        self.simulation.np_random = self.np_random
        self._cleared = False
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


class _Turn:
    """What the tasks ask of SciPy's `Rotation`, for one matrix of the simulator, which is a rotation."""

    def __init__(self, quaternion: FloatArray) -> None:
        self._quaternion = quaternion

    @classmethod
    def from_matrix(cls, matrix: FloatArray) -> Self:
        """The quaternion's largest entry first, from the diagonal, then the others (Markley, 2008)."""
        m = matrix.tolist()
        trace = m[0][0] + m[1][1] + m[2][2]
        largest = max((0, 1, 2), key=lambda i: m[i][i])
        i, j, k = largest, (largest + 1) % 3, (largest + 2) % 3
        q = [0.0] * 4
        if trace > m[i][i]:
            q = [m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1], 1.0 + trace]
        else:
            q[i] = 1.0 - trace + 2.0 * m[i][i]
            q[j], q[k] = m[j][i] + m[i][j], m[k][i] + m[i][k]
            q[3] = m[k][j] - m[j][k]
        length = math.sqrt(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3])
        return cls(np.array([entry / length for entry in q]))

    def as_quat(self) -> FloatArray:
        """[x, y, z, w]"""
        return self._quaternion


class MetaWorldAdapter(PositionControlledEnv):
    """The hand's mocap body and the gripper follow the trajectory; context: the whole first observation."""

    num_dof = 4
    position_units = ("m", "m", "m", "1")
    horizon = MetaWorldEnv.horizon
    dt = 0.0125
    extra_names = ("object_to_target",)
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
