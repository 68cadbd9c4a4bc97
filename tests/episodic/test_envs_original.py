"""The ports against fancy_gym 0.3.0 under mujoco 2.3.3, recorded by data/record_original.py."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest

import tether.episodic.envs  # noqa: F401 - registers the environments
from tether.episodic.envs import simulation

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Replay:
    """One recorded episode, and what the port answers to its actions."""

    original_observations: np.ndarray
    original_rewards: np.ndarray
    original: dict[str, float]
    observations: np.ndarray
    rewards: np.ndarray
    success: bool
    info: dict[str, Any]


def replay(
    name: str,
    env_id: str,
    episode: int,
    before_step: Callable[[Any, int], None] = lambda env, t: None,
    nudged: int | None = None,
) -> Replay:
    """With `nudged`, a seed, half of the actions' numbers are one rounding nearer to zero."""
    with np.load(DATA / f"original_{name}.npz") as stored:
        recording = {key: stored[key][episode] for key in stored}
    if nudged is not None:
        actions = recording["actions"]
        chosen = np.random.default_rng(nudged).random(actions.shape) < 0.5
        recording["actions"] = np.where(chosen, np.nextafter(actions, 0.0), actions)
    env = gymnasium.make(env_id)
    observations = [env.reset(seed=int(recording["seeds"]))[0]]
    rewards, info = [], {}
    for t, action in enumerate(recording["actions"]):
        before_step(env.unwrapped, t)
        observation, reward, _, _, info = env.step(action)
        observations.append(observation)
        rewards.append(float(reward))
    length = int(recording["lengths"])
    return Replay(
        recording["observations"][: length + 1],
        recording["rewards"],
        {key: float(value) for key, value in recording.items() if np.ndim(value) == 0},
        np.array(observations)[: length + 1],
        np.array(rewards),
        bool(info.get("success", False)),
        info,
    )


@pytest.mark.parametrize(
    ("name", "env_id", "episode"),
    [("hopper_jump", "tether/HopperJump-v0", episode) for episode in range(3)]
    + [("hopper_jump_sparse", "tether/HopperJumpSparse-v0", 0)]
    + [("table_tennis", "tether/TableTennis-v0", episode) for episode in (2, 3)],
)
def test_hopper_and_unhit_balls_equal_the_original_to_rounding(name: str, env_id: str, episode: int) -> None:
    ours = replay(name, env_id, episode)
    np.testing.assert_allclose(ours.observations, ours.original_observations, rtol=0, atol=1e-10)
    np.testing.assert_allclose(ours.rewards, ours.original_rewards, rtol=0, atol=1e-10)
    assert ours.success == bool(ours.original["success"])
    for key in {"max_height", "landing_distance", "landing_error"} & ours.info.keys():
        assert ours.info[key] == pytest.approx(ours.original[key], abs=1e-10)


@pytest.mark.parametrize(
    ("name", "env_id", "episode"),
    [("box_pushing_dense", "tether/BoxPushingDense-v0", episode) for episode in range(4)]
    + [("box_pushing_sparse", "tether/BoxPushingSparse-v0", episode) for episode in range(3)]
    + [
        ("box_pushing_spatially_sparse", "tether/BoxPushingSpatiallySparse-v0", episode)
        for episode in range(2)
    ],
)
def test_box_pushing_equals_the_original_to_the_contact_solvers_precision(
    name: str, env_id: str, episode: int
) -> None:
    ours = replay(name, env_id, episode)
    np.testing.assert_allclose(ours.observations[0], ours.original_observations[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours.observations, ours.original_observations, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours.rewards, ours.original_rewards, rtol=0, atol=5e-4)
    np.testing.assert_allclose(ours.rewards[:-1], ours.original_rewards[:-1], rtol=0, atol=1e-6)
    assert ours.success == bool(ours.original["success"])
    assert ours.info["goal_distance"] == pytest.approx(ours.original["goal_distance"], abs=1e-6)
    assert ours.info["goal_angle"] == pytest.approx(ours.original["goal_angle"], abs=1e-5)


def test_the_recordings_hold_successes_and_failures_of_both_tasks() -> None:
    for name in ("box_pushing_dense", "table_tennis"):
        with np.load(DATA / f"original_{name}.npz") as stored:
            assert set(stored["success"]) == {True, False}


def test_a_returned_ball_succeeds_as_in_the_original() -> None:
    ours = replay("table_tennis", "tether/TableTennis-v0", 0)
    assert ours.original["success"] == 1.0
    assert ours.success
    assert np.flatnonzero(ours.rewards).tolist() == np.flatnonzero(ours.original_rewards).tolist()
    # mujoco 3 computes the contact of ball and bat (sphere and cylinder) in closed form, see the next test.
    assert ours.rewards.sum() == pytest.approx(ours.original_rewards.sum(), abs=0.01)
    assert ours.info["landing_error"] == pytest.approx(ours.original["landing_error"], abs=0.01)


@pytest.mark.parametrize(("episode", "hit"), [(0, 76), (1, 100)])
def test_the_ball_on_bat_collider_is_all_that_differs_in_table_tennis(episode: int, hit: int) -> None:
    """A hit makes 1e-4 or 1e-2 of one rounding before it: the original is one more of such courses."""

    # An ellipsoid of equal radii goes through the general convex collider that mujoco 2.3.3 used here.
    def use_general_collider(env: Any, t: int) -> None:
        if t >= hit:
            env.model.geom("target_ball_contact").type = int(mujoco.mjtGeom.mjGEOM_ELLIPSOID)

    found = []
    for nudged in (None, *range(5)):
        ours = replay("table_tennis", "tether/TableTennis-v0", episode, use_general_collider, nudged)
        found.append((ours.rewards.sum(), ours.info["landing_error"]))
    assert ours.original["hit_ball"] == 1.0
    within = 2 * np.ptp(found, axis=0)
    assert (within < 0.05).all(), within
    expected = (ours.original_rewards.sum(), ours.original["landing_error"])
    assert (np.abs(np.subtract(found[0], expected)) <= within).all(), (found, expected)


@pytest.mark.parametrize("start", ["", "RandomInit"])
@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_what_mujoco_culls_better_changes_no_digit(
    name: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Geoms of the world and pairs that are spared, beside a body for each geom and all pairs.

    On all recorded episodes, and on their actions from other starts.
    """
    xml = (simulation.ASSETS / "box_pushing.xml").read_text(encoding="utf-8")
    assert xml.count("<frame") > 30
    bodies = xml.replace("<frame", "<body").replace("</frame", "</body")
    bodies, ours_alone = re.subn(r"(?s)<!-- Never in contact.*?-->(\s*<exclude [^>]*>)+", "", bodies)
    assert ours_alone == 1
    assert xml.count("<exclude") == bodies.count("<exclude") + 4
    bodies = re.sub(r'contype="[24]" conaffinity="0"|conaffinity="[137]"', "", bodies)
    bodies = bodies.replace('meshdir="panda"', f'meshdir="{simulation.ASSETS / "panda"}"')
    (tmp_path / "box_pushing.xml").write_text(bodies, encoding="utf-8")
    with np.load(DATA / f"original_box_pushing_{name}.npz") as stored:
        recorded = list(zip(stored["seeds"], stored["actions"], strict=True))
    env_id = f"tether/BoxPushing{start}{name.capitalize()}-v0"

    def courses() -> list[np.ndarray]:
        env = gymnasium.make(env_id)
        found = []
        for seed, actions in recorded:
            found.append(env.reset(seed=int(seed))[0])
            found += [np.append(*env.step(action)[:2]) for action in actions]
        return found

    ours = courses()
    monkeypatch.setattr(simulation, "ASSETS", tmp_path)
    for mine, theirs in zip(ours, courses(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def box_pushing() -> tuple[Any, Any]:
    """Model, and data with the arm stretched upwards."""
    model = mujoco.MjModel.from_xml_path(str(simulation.ASSETS / "box_pushing.xml"))
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    return model, data


def test_links_that_are_never_compared_cannot_touch_wherever_their_joints_stand() -> None:
    """All places of the joints in between, to 0.1 rad beyond their limits, less than a centimetre apart."""
    model, data = box_pushing()
    pairs = [sorted((int(pair) >> 16, int(pair) & 0xFFFF)) for pair in model.exclude_signature]
    ours = [(near, far) for near, far in pairs if model.body_parentid[far] != near]
    assert len(ours) == 4
    ours.append((model.body("panda_link1").id, model.body("panda_link3").id))
    for near, far in ours:
        joints, body = [], far
        while body != near:
            first = int(model.body_jntadr[body])
            joints += range(first, first + int(model.body_jntnum[body]))
            body = int(model.body_parentid[body])
        spread = 0.1 * (model.jnt_type[joints] == mujoco.mjtJoint.mjJNT_HINGE)
        low, high = model.jnt_range[joints, 0] - spread, model.jnt_range[joints, 1] + spread
        geoms = [
            [g for g in range(model.ngeom) if model.geom_bodyid[g] == one and model.geom_contype[g]]
            for one in (near, far)
        ]
        for places in itertools.product(*np.linspace(low, high, 120).T):
            data.qpos[model.jnt_qposadr[joints]] = places
            mujoco.mj_kinematics(model, data)
            for one, other in itertools.product(*geoms):
                assert mujoco.mj_geomDistance(model, data, one, other, 0.1, None) > 0.01


def test_the_lowest_links_never_come_near_the_room() -> None:
    """They are spared of it. Joints to 0.1 rad beyond their limits; the first turns about the vertical."""
    model, data = box_pushing()
    low = [model.geom(f"panda_joint{i}:geom2").id for i in (1, 2, 3)]
    room = np.flatnonzero(model.geom_conaffinity == 1)
    assert np.flatnonzero(model.geom_contype == 2).tolist() == low
    assert len(room) == 34
    size = model.geom_size[room]
    cylinders = model.geom_type[room] == mujoco.mjtGeom.mjGEOM_CYLINDER
    size[cylinders] = size[cylinders][:, [0, 0, 1]]  # the box about it: radius, and half the length
    shoulder, axes = data.xpos[model.body("panda_link2").id].copy(), data.geom_xmat[room].reshape(-1, 3, 3)
    offset = np.abs(np.einsum("gji,gj->gi", axes, shoulder - data.geom_xpos[room]))
    distance = np.linalg.norm(np.maximum(offset - size, 0.0), axis=1)
    highest = data.geom_xpos[room, 2] + np.einsum("gi,gi->g", np.abs(axes[:, 2]), size)
    bends = np.linspace(*(model.jnt_range[1] + np.array([-0.1, 0.1])), 120)
    for bend, turn in itertools.product(bends, np.linspace(-3.2, 3.2, 60)):
        data.qpos[1:3] = bend, turn
        mujoco.mj_kinematics(model, data)
        for geom in low:
            mesh = model.geom_dataid[geom]
            first, number = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
            vertices = model.mesh_vert[first : first + number] @ data.geom_xmat[geom].reshape(3, 3).T
            vertices = vertices + data.geom_xpos[geom]
            reach = np.linalg.norm(vertices - shoulder, axis=1).max()
            assert ((distance > reach + 0.05) | (highest < vertices[:, 2].min() - 0.05)).all()


def test_the_arm_does_not_reach_the_ground() -> None:
    """It is spared of it: each geom's distance from the shoulder if all in between were in one line."""
    model, data = box_pushing()
    ground, shoulder = model.geom("ground:geom1").id, model.body("panda_link2").id
    assert np.flatnonzero(model.geom_contype == 4).tolist() == [ground]
    above_it = data.xpos[shoulder, 2] - data.geom_xpos[ground, 2]
    for geom in range(model.geom("panda_joint1:geom2").id, model.ngeom):
        body = int(model.geom_bodyid[geom])
        if model.geom_conaffinity[geom] & 4:
            assert model.body(body).name == "box_0"
            continue
        reach = model.geom_rbound[geom] + np.linalg.norm(model.geom_pos[geom])
        while body > shoulder:  # link 1 turns about it
            reach += np.linalg.norm(model.body_pos[body])
            body = int(model.body_parentid[body])
        assert reach < above_it


def test_nothing_else_is_spared_by_the_bits() -> None:
    model, _ = box_pushing()
    kinds = {1: "room", 3: "arm", 7: "box"}
    kind_of = {
        geom: {2: "low", 4: "ground"}.get(int(model.geom_contype[geom]))
        or kinds[int(model.geom_conaffinity[geom])]
        for geom in np.flatnonzero(model.geom_contype)
    }
    assert set(kind_of.values()) == {"room", "ground", "low", "arm", "box"}
    for one, other in itertools.combinations(kind_of, 2):
        types, affinities = model.geom_contype[[one, other]], model.geom_conaffinity[[other, one]]
        pair = {kind_of[one], kind_of[other]}
        spared = pair in ({"low"}, {"low", "room"}) or ("ground" in pair and "box" not in pair)
        assert (types & affinities).any() != spared
