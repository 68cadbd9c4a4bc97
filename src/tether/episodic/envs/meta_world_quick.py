"""Meta-World's tasks in 0.3 to 0.7 of their time: methods that answer the same, to the last digit.

What is replaced belongs to one simulation; the package itself stays as it is. Of what a task tells nothing
changes: `tests/episodic/test_envs.py` compares all fifty with the bare ones.
"""

from __future__ import annotations

import math
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Self

import mujoco
import numpy as np
from metaworld.sawyer_xyz_env import SawyerXYZEnv
from metaworld.utils import reward_utils

from tether.episodic.envs.simulation import keep_no_marks
from tether.episodic.episodes import FloatArray


def spare_time(simulation: Any) -> None:
    """Replace a simulation's methods by quicker ones.

    Its `step` must be given actions in [-1, 1], of float64: what lies within is not clipped again.
    """
    keep_no_marks(simulation.model)
    _remember_where_names_stand(simulation)
    _skip_what_comes_to_nothing(simulation)
    _observe_in_one_array(simulation)
    _ask_contacts_at_once(simulation)
    _step_without_sites(simulation)
    with_ours = {"Rotation": _Turn, "reward_utils": _REWARDS, "np": _NUMPY}
    for name in ("_get_quat_objects", "compute_reward", "_gripper_caging_reward"):
        method = getattr(simulation, name)
        setattr(simulation, name, MethodType(_knowing(method.__func__, with_ours), simulation))
    if type(simulation)._gripper_caging_reward is SawyerXYZEnv._gripper_caging_reward:
        _cage_without_arrays(simulation)


def without_looks(kind: type[Any]) -> type[Any]:
    """A task's class whose model has nothing that is only seen, and needs a third of the memory.

    That is most of its geoms and their meshes. Nothing touches them, and bodies have their masses apart.
    """
    # A copy, as its __init__ looks for the class above type(self).
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, kind.__bases__, own | {"_initialize_simulation": _what_is_touched})


def _what_is_touched(simulation: Any) -> tuple[Any, Any]:
    spec = mujoco.MjSpec.from_file(simulation.fullpath)
    for geom in list(spec.geoms):
        # Tasks ask for some by name.
        if not (geom.contype or geom.conaffinity or geom.name):
            geom.delete()
    used = {geom.meshname for geom in spec.geoms}
    for mesh in list(spec.meshes):
        if mesh.name not in used:
            mesh.delete()
    model = spec.compile()
    return model, mujoco.MjData(model)


def _knowing(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """The same function, to which some of its module's names mean something else."""
    known = function.__globals__ | names
    return FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )


class _Places(dict[str, FloatArray]):
    """Where bodies are, by name: views, which go with the simulation."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self._data = data

    def __missing__(self, name: str) -> FloatArray:
        place: FloatArray = self._data.body(name).xpos
        self[name] = place
        return place


def _remember_where_names_stand(simulation: Any) -> None:
    """Looking a name up takes longer than what is done with it."""
    data, kind = simulation.data, type(simulation)
    simulation.get_body_com = _Places(data).__getitem__
    right, left = (data.site(name).xpos for name in ("rightEndEffector", "leftEndEffector"))
    centre = property(lambda _: (right + left) / 2.0)
    simulation.__class__ = type(kind.__name__, (kind,), {"tcp_center": centre})  # of this one alone


def _skip_what_comes_to_nothing(simulation: Any) -> None:
    """Each episode begins twice, with fifty steps that bring the hand to its place, and the simulator is
    cleared in between: the first fifty come to nothing. Gymnasium computes forces that no task reads."""
    model, data, begin = simulation.model, simulation.data, simulation.reset
    cleared = True

    def reset(*args: Any, **options: Any) -> Any:
        nonlocal cleared
        cleared = False
        return begin(*args, **options)

    def simulate(control: Any, n_frames: int) -> None:
        nonlocal cleared
        cleared |= data.time == 0.0
        if cleared:
            data.ctrl[:] = control
            mujoco.mj_step(model, data, n_frames)

    def move_hand(action: FloatArray) -> None:
        wanted = data.mocap_pos[0] + action * simulation.action_scale
        data.mocap_pos[0] = np.minimum(np.maximum(wanted, simulation.mocap_low), simulation.mocap_high)
        data.mocap_quat[0] = (1.0, 0.0, 1.0, 0.0)

    simulation.reset = reset
    simulation.do_simulation = simulate
    simulation.set_xyz_action = move_hand


def _observe_in_one_array(simulation: Any) -> None:
    """Not put together from a dozen small ones."""
    model, data = simulation.model, simulation.data
    # Views, which go with the simulation.
    hand, right, left = (data.xpos[model.body(name).id] for name in ("hand", "rightclaw", "leftclaw"))

    def hand_and_objects() -> FloatArray:
        found = np.zeros(4 + simulation._obs_obj_max_len)
        found[:3] = hand
        gap = right - left
        found[3] = min(math.sqrt(gap.dot(gap)) / 0.1, 1.0)
        places = simulation._get_pos_objects().reshape(-1, 3)
        turns = simulation._get_quat_objects().reshape(-1, 4)
        objects = found[4 : 4 + 7 * len(places)].reshape(-1, 7)
        objects[:, :3], objects[:, 3:] = places, turns
        return found

    def observation() -> FloatArray:
        now = hand_and_objects()
        found = np.concatenate((now, simulation._prev_obs, simulation._target_pos))
        simulation._prev_obs = now
        return found

    simulation._get_obs = observation


def _ask_contacts_at_once(simulation: Any) -> None:
    """Whether both pads press on a thing; one by one that takes longer than the physics."""
    data = simulation.data
    pads = [simulation.model.geom(name).id for name in ("leftpad_geom", "rightpad_geom")]

    def touching(thing: int) -> bool:
        contacts = [(at, pair) for at, pair in enumerate(data.contact.geom.tolist()) if thing in pair]
        for pad in pads:
            touched = [at for at, pair in contacts if pad in pair]
            if not (touched and sum(data.efc_force[data.contact.efc_address[touched]].tolist()) > 0):
                return False
        return True

    simulation.touching_object = touching


def _step_without_sites(simulation: Any) -> None:
    """The bare step moves the target's sites, and its forward pass puts them back, unread."""
    model, data = simulation.model, simulation.data
    low, high = simulation.sawyer_observation_space.low, simulation.sawyer_observation_space.high

    def step(action: FloatArray) -> tuple[FloatArray, Any, bool, bool, dict[str, Any]]:
        if simulation.curr_path_length >= simulation.max_path_length:
            raise ValueError(f"The episode is over after {simulation.max_path_length} steps: reset first.")
        simulation.set_xyz_action(action[:3])
        simulation.do_simulation([action[3], -action[3]], n_frames=simulation.frame_skip)
        simulation.curr_path_length += 1
        mujoco.mj_forward(model, data)
        observation = np.minimum(np.maximum(simulation._get_obs(), low), high)
        reward, info = simulation.evaluate_state(observation, action)
        return observation, reward, False, simulation.curr_path_length == simulation.max_path_length, info

    simulation.step = step


def _cage_without_arrays(simulation: Any) -> None:
    """The reward for pads around a thing, and closed: the package's terms, of numbers instead of arrays."""
    left_pad, right_pad = (simulation.get_body_com(name) for name in ("leftpad", "rightpad"))
    across = [0, 2]
    product = reward_utils.hamacher_product

    def caging_reward(
        action: FloatArray,
        obj_pos: FloatArray,
        obj_radius: float,
        pad_success_thresh: float,
        object_reach_radius: float,
        xz_thresh: float,
        desired_gripper_effort: float = 1.0,
        high_density: bool = False,
        medium_density: bool = False,
    ) -> float:
        begun, place = float(simulation.obj_init_pos[1]), float(obj_pos[1])
        beside = []
        for pad in (float(left_pad[1]), float(right_pad[1])):
            margin = abs(abs(pad - begun) - pad_success_thresh)
            beside.append(_tolerance(abs(pad - place), (obj_radius, pad_success_thresh), margin, "long_tail"))
        hand = simulation.tcp_center
        reach = _norm((simulation.obj_init_pos - simulation.init_tcp)[across]) - xz_thresh
        around = _tolerance(_norm((hand - obj_pos)[across]), (0, xz_thresh), reach, "long_tail")
        caging = product(product(*beside), float(around))
        closed = min(max(0.0, float(action[-1])), desired_gripper_effort) / desired_gripper_effort
        reward = product(caging, closed if caging > 0.97 else 0.0)
        if high_density:
            reward = (reward + caging) / 2
        if medium_density:
            margin = abs(_norm(simulation.obj_init_pos - simulation.init_tcp) - object_reach_radius)
            near = _tolerance(_norm(obj_pos - hand), (0, object_reach_radius), margin, "long_tail")
            reward = (reward + float(near)) / 2
        return float(reward)

    simulation._gripper_caging_reward = caging_reward


class _Turn:
    """What the tasks ask of SciPy's `Rotation`, which tests first whether a matrix is one; these are."""

    def __init__(self, quaternion: FloatArray) -> None:
        self._quaternion = quaternion

    @classmethod
    def from_matrix(cls, matrix: FloatArray) -> Self:
        """The quaternion's largest entry first, from the diagonal, then the others (Markley, 2008)."""
        m = matrix.tolist()
        trace = m[0][0] + m[1][1] + m[2][2]
        i = max((0, 1, 2), key=lambda axis: m[axis][axis])
        if trace > m[i][i]:
            q = [m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1], 1.0 + trace]
        else:
            j, k = (i + 1) % 3, (i + 2) % 3
            q = [0.0, 0.0, 0.0, m[k][j] - m[j][k]]
            q[i] = 1.0 - trace + 2.0 * m[i][i]
            q[j], q[k] = m[j][i] + m[i][j], m[k][i] + m[i][k]
        length = math.sqrt(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3])
        return cls(np.array([entry / length for entry in q]))

    def as_quat(self) -> FloatArray:
        """[x, y, z, w]"""
        return self._quaternion


def _tolerance(
    x: Any, bounds: Any = (0.0, 0.0), margin: Any = 0.0, sigmoid: Any = "gaussian", value_at_margin: Any = 0.1
) -> Any:
    """Meta-World's `tolerance`; for a number, with a long tail, as nearly always, without arrays."""
    if sigmoid != "long_tail" or not isinstance(x, float) or not margin > 0 or bounds[0] > bounds[1]:
        return reward_utils.tolerance(x, bounds, margin, sigmoid, value_at_margin)
    value, lower, upper = float(x), float(bounds[0]), float(bounds[1])
    if lower <= value <= upper:
        return 1.0
    distance = (lower - value if value < lower else value - upper) / float(margin)
    return 1.0 / ((distance * math.sqrt(1.0 / value_at_margin - 1.0)) ** 2 + 1.0)


_REWARDS = SimpleNamespace(**vars(reward_utils) | {"tolerance": _tolerance})


def _norm(x: Any, *args: Any, **options: Any) -> Any:
    """NumPy's, without its questions for what is nearly always asked: a vector's length."""
    if args or options or type(x) is not np.ndarray or x.ndim != 1 or x.dtype != np.float64:
        return np.linalg.norm(x, *args, **options)
    return np.float64(math.sqrt(x.dot(x)))


_NUMPY = SimpleNamespace(**vars(np) | {"linalg": SimpleNamespace(**vars(np.linalg) | {"norm": _norm})})
