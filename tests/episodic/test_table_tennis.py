"""The published version of Table Tennis: starts, dense reward and the price of leaving the joints' range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest

from tether.episodic.environments import make_position_controlled
from tether.episodic.envs.table_tennis import JOINT_HIGH, JOINT_LOW, TableTennisEnv

PUBLISHED = "tether/TableTennisRandomInit-v0"
RECORDED = Path(__file__).parent / "data" / "original_table_tennis.npz"


def course(env: TableTennisEnv, actions: np.ndarray) -> dict[str, np.ndarray]:
    """What bare MuJoCo makes of actions from the present start: for each of its steps the ball and the bat,
    and what the ball touches."""
    data = mujoco.MjData(env.model)
    data.qpos[:], data.qvel[:] = env.data.qpos, env.data.qvel
    mujoco.mj_forward(env.model, data)
    ball, front, back, floor, table = (
        env.model.geom(name).id
        for name in ("target_ball_contact", "bat", "bat_back", "floor", "table_tennis_table")
    )
    rows: dict[str, list[Any]] = {name: [] for name in ("ball", "bat", "hit", "floor", "table")}
    for action in actions:
        for _ in range(4):
            data.ctrl[:] = action
            mujoco.mj_step(env.model, data)
            touched = {sum(pair) - ball for pair in data.contact.geom.tolist() if ball in pair}
            rows["ball"].append(data.body("target_ball").xpos.copy())
            rows["bat"].append(data.geom("bat").xpos.copy())
            rows["hit"].append(bool(touched & {front, back}))
            rows["floor"].append(floor in touched)
            rows["table"].append(table in touched)
    return {name: np.array(values) for name, values in rows.items()}


def dense_rewards(found: dict[str, np.ndarray], target: np.ndarray) -> np.ndarray:
    """The published reward of each step of four simulator steps, from its definition."""
    hits, lands = np.flatnonzero(found["hit"]), np.flatnonzero(found["floor"] | found["table"])
    hit = hits[0] if hits.size and not found["floor"][: hits[0]].any() else None
    landed = next((k for k in lands if hit is not None and k >= hit), None)
    rewards = []
    for last in range(3, len(found["ball"]), 4):
        step = last // 4
        if hit is None or step < hit // 4:
            gap = np.linalg.norm(found["ball"][: last + 1] - found["bat"][: last + 1], axis=1).min()
            rewards.append(0.005 * (1 - np.tanh(gap**2)))
        elif step == hit // 4:
            rewards.append(2.0)
        elif landed is None or step < landed // 4:
            flight = found["ball"][4 * (hit // 4 + 1) : last + 1, :2]
            rewards.append(0.02 * (1 - np.tanh(np.linalg.norm(flight - target, axis=1).min() ** 2)))
        elif step == landed // 4:
            place = found["ball"][landed, :2]
            miss = np.linalg.norm(place - target)
            rewards.append(4 * (1 - np.tanh(miss**2)) + float(place[0] < 0))
        else:
            rewards.append(0.0)
    return np.array(rewards)


@pytest.mark.parametrize(("episode", "hits"), [(0, True), (1, True), (2, False), (3, False)])
def test_the_dense_reward_is_its_definition_on_what_bare_mujoco_does(episode: int, hits: bool) -> None:
    with np.load(RECORDED) as stored:
        seed, actions = int(stored["seeds"][episode]), stored["actions"][episode][:300]
    env = TableTennisEnv(reward="dense")
    env.reset(seed=seed)
    found = course(env, actions)
    steps = [env.step(action) for action in actions]
    expected = dense_rewards(found, env._target)
    np.testing.assert_allclose([reward for _, reward, *_ in steps], expected, rtol=0, atol=1e-12)
    assert steps[-1][4]["hit_ball"] is hits
    assert (2.0 in expected) is hits


def test_joints_start_anywhere_within_a_tenth_of_their_range_and_ball_and_target_as_ever() -> None:
    middle = np.array([0.0, 0.0, 0.0, 1.5, 0.0, 0.0, 1.5])
    with make_position_controlled(PUBLISHED) as env, make_position_controlled("tether/TableTennis-v0") as old:
        starts, before = [env.reset(seed) for seed in range(60)], [old.reset(seed) for seed in range(60)]
    reach = np.abs([start.position - middle for start in starts]).max(axis=0) / (JOINT_HIGH - JOINT_LOW)
    assert (reach <= 0.1 + 1e-12).all()
    assert (reach > 0.09).all()
    for start, other in zip(starts, before, strict=True):
        np.testing.assert_array_equal(start.observation[14:], other.observation[14:])
        np.testing.assert_array_equal(start.context, [*start.position, *other.context])


def test_a_motion_that_leaves_the_joints_range_is_run_and_pays_from_there_on() -> None:
    with make_position_controlled(PUBLISHED) as env:
        start = env.reset(0)
        inside = np.tile(start.position, (300, 1))
        outside = inside.copy()
        outside[100, 2] = JOINT_HIGH[2] + 2.1
        outside[100, 3] = JOINT_LOW[3] - 0.7
        outside[200, 0] = JOINT_LOW[0] - 1.4
        still = np.zeros_like(inside)
        allowed, paid = env.execute(0, inside, still), env.execute(0, outside, still)
    assert paid.length == 300
    np.testing.assert_array_equal(paid.rewards[:100], allowed.rewards[:100])
    expected = np.zeros(200)
    expected[0], expected[100] = -(2.1 + 0.7) / 7, -1.4 / 7
    np.testing.assert_allclose(paid.rewards[100:], expected, atol=1e-12)
    assert (paid.observations[150] != allowed.observations[150]).any()  # it moved


def test_the_baselines_environment_refuses_what_the_published_one_runs() -> None:
    with make_position_controlled(PUBLISHED, violations="refused") as env:
        wanted = np.tile(env.reset(0).position, (300, 1))
        wanted[7, 0] = JOINT_HIGH[0] + 2.1
        episode = env.execute(0, wanted, np.zeros_like(wanted))
    assert episode.length == 0
    assert episode.rewards.sum() == pytest.approx(-2.1 / 2100)


def test_a_returned_ball_stays_returned_when_the_simulation_breaks_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it runs
    with np.load(RECORDED) as stored:
        seed, actions = int(stored["seeds"][0]), stored["actions"][0][:300]
    env = gymnasium.make("tether/TableTennis-v0", reward="dense")
    env.reset(seed=seed)
    inner: Any = env.unwrapped
    infos = []
    for t, action in enumerate(actions):
        if t == 250:
            inner.data.qvel[1] = 1e8
        infos.append(env.step(action)[4])
    assert infos[249]["returned"]
    assert infos[-1]["broken"]
    assert infos[-1]["returned"]
