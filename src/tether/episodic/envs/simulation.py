"""What the MuJoCo environments share: loading, seeding, stepping, pictures, noticing a broken simulation."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from tether.episodic.adapters import PositionControlledEnv
from tether.episodic.controllers import PDController
from tether.episodic.envs.actions import checked_action
from tether.episodic.episodes import FloatArray
from tether.errors import ConfigError, SimulationError

ASSETS = Path(__file__).parent / "assets"

# When a state is unusable MuJoCo warns, resets it and goes on; an episode must not go on like that.
_FATAL_WARNINGS = {
    mujoco.mjtWarning.mjWARN_BADQPOS: "positions",
    mujoco.mjtWarning.mjWARN_BADQVEL: "velocities",
    mujoco.mjtWarning.mjWARN_BADQACC: "accelerations",
    mujoco.mjtWarning.mjWARN_BADCTRL: "controls",
}


def raise_on_warnings(counts: NDArray[np.int32], time: float, where: str, step: int) -> None:
    """Fail if MuJoCo has met a state it could not use since the last reset.

    Args:
        counts: MjData's ``warning.number``.
        time: MjData's.
        where: the environment, for the message.
        step: of the episode, for the message.

    Raises:
        SimulationError: naming the environment, the step and what was unusable.
    """
    if counts.tobytes() == bytes(counts.nbytes):  # a sixth of the time of any()
        return
    for warning, what in _FATAL_WARNINGS.items():
        if counts[int(warning)]:
            raise SimulationError(
                f"{where}: MuJoCo met unusable {what} at step {step} of the episode (t = {time:.3f} s). "
                "The motion asked for is too violent: lower its scale."
            )


def keep_no_marks(model: Any) -> None:
    """Spare each step of the simulator the marks of what it tested for contacts, a byte for each triangle of
    every mesh, which only MuJoCo's own viewer shows: a sixth of the time with Meta-World's arm."""
    model.vis.global_.bvactive = 0


class Camera:
    """Takes pictures of a simulation; opens its buffers at the first one.

    Raises:
        ConfigError: a render mode other than None and "rgb_array", or a camera the model does not have.
    """

    def __init__(
        self, model: Any, render_mode: str | None, width: int, height: int, name: str | None
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"render_mode is None or 'rgb_array'; got {render_mode!r}.")
        known = [model.camera(i).name for i in range(model.ncam)]
        if name is not None and name not in known:
            raise ConfigError(f"The model has no camera {name!r}; it has {known}.")
        self._model = model
        self._enabled = render_mode is not None
        self._size = (height, width)
        self._name = name
        self._renderer: Any = None

    def picture(self, data: Any) -> NDArray[np.uint8]:
        """A picture [height, width, 3].

        Raises:
            ConfigError: the environment was not made with ``render_mode="rgb_array"``.
        """
        if not self._enabled:
            raise ConfigError("To render, make the environment with render_mode='rgb_array'.")
        if self._renderer is None:
            size = self._model.vis.global_
            size.offheight = max(size.offheight, self._size[0])
            size.offwidth = max(size.offwidth, self._size[1])
            self._renderer = mujoco.Renderer(self._model, *self._size)
            for effect in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._renderer.scene.flags[effect] = 0  # most of the time without a graphics card
        self._renderer.update_scene(data, -1 if self._name is None else self._name)
        pixels: NDArray[np.uint8] = self._renderer.render()
        return pixels

    def close(self) -> None:
        """Release the buffers."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class MujocoTaskEnv(gymnasium.Env[FloatArray, FloatArray]):
    """A gymnasium environment of fixed length around one MuJoCo model.

    Args:
        model_file: path below the assets folder.
        frame_skip: simulator steps in a step of the environment.
        action_size: entries of the action, each in [-1, 1].
        observation_size: entries of the observation.
        render_mode: "rgb_array" or None.
        width, height: of pictures, in pixels.
        camera: name of a camera of the model; None takes a free one that looks at the middle.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium declares it

    horizon: ClassVar[int]
    """Steps of an episode."""

    def __init__(
        self,
        model_file: str,
        *,
        frame_skip: int,
        action_size: int,
        observation_size: int,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 360,
        camera: str | None = None,
    ) -> None:
        self.render_mode = render_mode
        self.model = mujoco.MjModel.from_xml_path(str(ASSETS / model_file))
        keep_no_marks(self.model)
        self.data = mujoco.MjData(self.model)
        self.frame_skip = frame_skip
        self._warnings = self.data.warning.number  # a view
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (action_size,), dtype=np.float64)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (observation_size,), dtype=np.float64)
        self._camera = Camera(self.model, render_mode, width, height, camera)
        self._steps = 0

    @property
    def dt(self) -> float:
        """Seconds of one step."""
        return float(self.model.opt.timestep * self.frame_skip)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self._steps = 0
        self._begin()
        return self._observation(), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Advance by one step; the episode is over after `horizon` of them, never before.

        Raises:
            InvalidInputError: an action of another shape, not finite or outside of [-1, 1].
            SimulationError: the simulator's state became unusable.
        """
        checked = checked_action(self, action)
        self._steps += 1
        reward, info = self._advance(checked)
        return self._observation(), reward, False, self._steps >= self.horizon, info

    @abstractmethod
    def _begin(self) -> None:
        """Draw a start from `np_random` and put the simulator there."""

    @abstractmethod
    def _advance(self, action: FloatArray) -> tuple[float, dict[str, Any]]:
        """Simulate one step; returns its reward and info."""

    @abstractmethod
    def _observation(self) -> FloatArray:
        """The present observation, a fresh array."""

    def _simulate(self, control: FloatArray, steps: int) -> None:
        """Run the simulator under a constant control."""
        self.data.ctrl[:] = control
        self._simulate_on(steps)

    def _simulate_on(self, steps: int) -> None:
        """Run the simulator under the control it has."""
        mujoco.mj_step(self.model, self.data, steps)
        raise_on_warnings(self._warnings, self.data.time, type(self).__name__, self._steps)

    def render(self) -> NDArray[np.uint8]:
        """A picture [height, width, 3].

        Raises:
            ConfigError: the environment was not made with ``render_mode="rgb_array"``.
        """
        return self._camera.picture(self.data)

    def close(self) -> None:
        """Release the picture buffers."""
        self._camera.close()


class JointAdapter(PositionControlledEnv):
    """Some joints of a MuJoCo robot follow the trajectory by a PD controller."""

    joints: ClassVar[slice]
    """Where they stand in the simulator's positions and velocities."""

    controller: ClassVar[PDController]
    """Turns desired positions and velocities into actions."""

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        super().__init__(env, env_id)
        assert isinstance(env.unwrapped, MujocoTaskEnv)
        data = env.unwrapped.data
        self._positions, self._velocities = data.qpos[self.joints], data.qvel[self.joints]  # views

    def joint_positions(self) -> FloatArray:
        return self._positions

    def joint_velocities(self) -> FloatArray:
        return self._velocities

    def action(self, desired_position: FloatArray, desired_velocity: FloatArray) -> FloatArray:
        return self.controller(desired_position, desired_velocity, self._positions, self._velocities)
