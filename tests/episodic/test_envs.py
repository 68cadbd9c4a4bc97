from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from tether.episodic.environments import known_env_ids, make_position_controlled
from tether.episodic.envs.hopper_jump import HopperJumpEnv
from tether.episodic.envs.meta_world_tasks import META_WORLD_TASKS
from tether.episodic.envs.rotations import rotation_distance, rotation_error
from tether.errors import ConfigError, InvalidInputError, SimulationError

META = "tether/MetaWorld-button-press-v3"
OURS = [env_id for env_id in known_env_ids() if env_id.startswith("tether/") and "MetaWorld" not in env_id]


@pytest.mark.parametrize("env_id", [*OURS, META])
def test_gymnasiums_checker_finds_nothing_to_complain_about(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Joint positions and velocities have no bounds to declare.
        warnings.filterwarnings("ignore", message=".*Box observation space (min|max)imum value is")
        check_env(gymnasium.make(env_id).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("env_id", [*OURS, META, "tether/MetaWorld-reach-v3"])
def test_a_seed_fixes_start_and_course_whatever_was_run_before(env_id: str) -> None:
    with make_position_controlled(env_id) as env, make_position_controlled(env_id) as fresh:
        start = env.reset(4)
        motion = start.position + np.linspace(0.0, 0.1, env.horizon)[:, None]
        speed = np.zeros_like(motion)
        first = env.execute(4, motion, speed)
        env.execute(9, motion, speed)
        again, elsewhere = env.execute(4, motion, speed), fresh.execute(4, motion, speed)
    for other in (again, elsewhere):
        np.testing.assert_array_equal(other.observations, first.observations)
        np.testing.assert_array_equal(other.rewards, first.rewards)


@pytest.mark.parametrize("env_id", [*OURS, META, "tether/MetaWorld-window-open-v3"])
def test_seeds_give_different_tasks_and_the_context_tells_them_apart(env_id: str) -> None:
    with make_position_controlled(env_id) as env:
        contexts = np.array([env.reset(seed).context for seed in range(4)])
    assert len(np.unique(contexts, axis=0)) == 4


@pytest.mark.parametrize("env_id", [*OURS, META])
def test_what_is_not_in_the_context_is_the_same_at_every_start(env_id: str) -> None:
    with make_position_controlled(env_id) as env:
        starts = [env.reset(seed) for seed in range(3)]
        context = set(
            range(starts[0].observation.size) if env.context_indices is None else env.context_indices
        )
    rest = [i for i in range(starts[0].observation.size) if i not in context]
    if "Hopper" in env_id:  # minus the mark's x, which the context holds, plus what the joints' angles place
        rest = [i for i in rest if i not in (12, 13, 14)]
    if "PointReach" in env_id:  # starts a few centimetres off the origin, too little to matter
        rest = [4, 5]
    for start in starts[1:]:
        np.testing.assert_allclose(start.observation[rest], starts[0].observation[rest], atol=1e-6)


@pytest.mark.parametrize("env_id", [*OURS, META])
def test_episodes_last_exactly_the_horizon(env_id: str) -> None:
    env = gymnasium.make(env_id)
    with make_position_controlled(env_id) as adapter:
        horizon, dt = adapter.horizon, adapter.dt
    env.reset(seed=0)
    still = np.zeros(env.action_space.shape or ())
    endings = [any(env.step(still)[2:4]) for _ in range(horizon)]
    assert endings == [False] * (horizon - 1) + [True]
    assert env.unwrapped.dt == pytest.approx(dt) if hasattr(env.unwrapped, "dt") else dt == 0.0125


@pytest.mark.parametrize("env_id", [*OURS, META])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda action: action[:-1], "shape"),
        (lambda action: np.append(action[:-1], 1.01), r"entry \d is 1.01, outside of \[-1.0, 1.0\]"),
        (lambda action: np.append(action[:-1], np.nan), r"entry \d is nan"),
    ],
)
def test_actions_that_cannot_be_meant_are_refused(env_id: str, spoil: Any, message: str) -> None:
    env = gymnasium.make(env_id, disable_env_checker=True)
    env.reset(seed=0)
    with pytest.raises(InvalidInputError, match=message):
        env.step(spoil(np.zeros(env.action_space.shape or ())))


@pytest.mark.parametrize("env_id", ["tether/HopperJump-v0", "tether/BoxPushingDense-v0", META])
def test_a_simulation_that_falls_apart_is_an_error_not_a_quiet_reset(
    env_id: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it runs
    env = gymnasium.make(env_id)
    env.reset(seed=0)
    inner: Any = env.unwrapped
    data = inner.simulation.data if env_id == META else inner.data
    data.qvel[0] = np.nan
    with pytest.raises(SimulationError, match="step 1 of the episode"):
        env.step(np.zeros(env.action_space.shape or ()))
    env.reset(seed=0)
    env.step(np.zeros(env.action_space.shape or ()))  # a reset makes it usable again


@pytest.mark.parametrize(("fate_open", "reward"), [(True, -25.0), (False, 0.0)])
def test_table_tennis_pays_its_price_for_a_simulation_that_falls_apart_and_then_stands_still(
    fate_open: bool, reward: float, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it runs
    env = gymnasium.make("tether/TableTennis-v0")
    env.reset(seed=0)
    inner: Any = env.unwrapped
    while not fate_open and env.step(np.zeros(7))[1] == 0.0:
        pass  # the ball drops to the floor, which decides its fate, long before the last step
    inner.data.qvel[1] = 1e8
    broken, paid, terminated, _, info = env.step(np.zeros(7))
    assert (paid, terminated, info["broken"], info["success"]) == (reward, False, True, False)
    assert np.isfinite(broken).all()
    while True:
        after, paid, terminated, truncated, info = env.step(np.ones(7))
        np.testing.assert_array_equal(after, broken)
        assert (paid, info["broken"]) == (0.0, True)
        if terminated or truncated:
            break
    env.reset(seed=0)  # makes it usable again
    assert not env.step(np.zeros(7))[4]["broken"]


def test_hopper_pays_height_and_charges_the_distance_to_the_mark() -> None:
    env = HopperJumpEnv()
    observation, _ = env.reset(seed=0)
    observation, reward, _, _, info = env.step(np.array([0.5, 0.0, 0.0]))
    distance = np.linalg.norm(observation[12:15])  # foot minus mark
    expected = 3.0 * info["height"] - 3.0 * distance + 1.0 - 1e-3 * 0.25
    assert reward == pytest.approx(expected, abs=1e-12)


def test_hoppers_sparse_reward_comes_at_the_end() -> None:
    env = gymnasium.make("tether/HopperJumpSparse-v0")
    env.reset(seed=0)
    results = [env.step(np.zeros(3)) for _ in range(250)]
    assert all(reward == 0.0 for _, reward, *_ in results[:-1])
    last = results[-1][4]
    by_hand = 10 * last["max_height"] - 3 * last["goal_distance"] + 2 * last["healthy"]
    by_hand -= 2 * last["landing_distance"]
    assert results[-1][1] == pytest.approx(by_hand, abs=1e-12)


def test_hopper_shows_what_the_sparse_reward_remembers_and_changes_nothing_else_by_it() -> None:
    plain, telling = (
        gymnasium.make("tether/HopperJumpSparse-v0", show_memory=show) for show in (False, True)
    )
    first, same = plain.reset(seed=0)[0], telling.reset(seed=0)[0]
    np.testing.assert_array_equal(same, [*first, 0.0, 5.0])
    for t in range(250):
        action = np.full(3, np.sin(t / 15))
        observation, reward, *_, info = plain.step(action)
        told, same_reward, *_ = telling.step(action)
        np.testing.assert_array_equal(told, [*observation, info["max_height"], info["landing_distance"]])
        assert reward == same_reward


def test_box_starts_with_the_rod_above_the_box_and_the_target_far_enough() -> None:
    env = gymnasium.make("tether/BoxPushingDense-v0", random_init=True)
    inner: Any = env.unwrapped
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        box, target = observation[14:16], observation[21:23]
        assert np.linalg.norm(box - target) >= 0.3
        hand = inner.data.xpos[inner.model.body("tcp").id]
        np.testing.assert_allclose(hand, [*box, 0.14], atol=5e-3)


@pytest.mark.parametrize("turns", ["quaternion", "direction"])
def test_random_box_starts_are_part_of_the_context(turns: str) -> None:
    with make_position_controlled("tether/BoxPushingDense-v0", random_init=True, turns=turns) as env:
        start = env.reset(0)
    np.testing.assert_array_equal(start.context, np.delete(start.observation, range(7, 14)))


def test_directions_tell_turns_without_a_seam_and_change_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published, seamless = (
        gymnasium.make("tether/BoxPushingDense-v0", random_init=True, turns=turns)
        for turns in ("quaternion", "direction")
    )
    action = np.full(7, 0.3)
    for env in (published, seamless):
        env.reset(seed=4)
    for _ in range(30):
        (observation, reward, *_), (told, same_reward, *_) = published.step(action), seamless.step(action)
        np.testing.assert_array_equal(told[:17], observation[:17])
        np.testing.assert_array_equal(told[20:23], observation[21:24])
        for direction, (w, x, y, z) in ((told[17:20], observation[17:21]), (told[23:], observation[24:])):
            x_axis = 1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)
            np.testing.assert_allclose(direction, x_axis, atol=1e-12)
        assert reward == same_reward

    far_apart = {}
    for name, env in (("quaternion", published), ("direction", seamless)):
        inner: Any = env.unwrapped
        starts = []
        for angle in (0.01, 2 * np.pi - 0.01):
            turned = np.array([0.4, 0.0, -0.01, np.sin(angle / 2), 0.0, 0.0, np.cos(angle / 2)])
            there = np.array([0.5, 0.4, *turned[2:]])
            places = iter((turned, there))
            monkeypatch.setattr(inner, "_draw_place", lambda places=places: next(places))
            starts.append(env.reset(seed=0)[0])
        far_apart[name] = float(np.abs(starts[0] - starts[1]).max())
    assert far_apart["quaternion"] == pytest.approx(2 * np.cos(0.005), rel=1e-9)
    assert far_apart["direction"] == pytest.approx(2 * np.sin(0.01), rel=1e-9)


def test_every_meta_world_task_is_registered() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    assert sorted(META_WORLD_TASKS) == sorted(ALL_V3_ENVIRONMENTS)
    assert {f"tether/MetaWorld-{task}" for task in META_WORLD_TASKS} <= set(known_env_ids())


@pytest.mark.slow
@pytest.mark.parametrize("task", META_WORLD_TASKS)
def test_every_meta_world_task_repeats_exactly_and_moves_with_the_seed(task: str) -> None:
    rng = np.random.default_rng(0)
    with (
        make_position_controlled(f"tether/MetaWorld-{task}") as env,
        make_position_controlled(f"tether/MetaWorld-{task}") as fresh,
    ):
        start, other = env.reset(5), env.reset(6)
        assert np.abs(start.observation - other.observation).max() > 0
        motion = start.position + np.cumsum(rng.normal(size=(500, 4)) * [0.01, 0.01, 0.01, 0.1], axis=0)
        speed = np.zeros_like(motion)
        first = env.execute(5, motion, speed)
        env.execute(7, motion, speed)
        for again in (env.execute(5, motion, speed), fresh.execute(5, motion, speed)):
            np.testing.assert_array_equal(again.observations, first.observations)
            np.testing.assert_array_equal(again.rewards, first.rewards)


def bare_meta_world(task: str) -> Any:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE

    bare = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"](seed=0)
    bare._freeze_rand_vec, bare.seeded_rand_vec = False, True
    return bare


@pytest.mark.filterwarnings("ignore:Constant")  # of the experts' own steps
@pytest.mark.parametrize("task", META_WORLD_TASKS)
def test_meta_world_equals_the_bare_task_under_the_same_seed(task: str) -> None:
    from metaworld.policies import ENV_POLICY_MAP

    bare = bare_meta_world(task)
    env = gymnasium.make(f"tether/MetaWorld-{task}")
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (2, 4))
    for seed in (6, 7, 8):
        bare.seed(seed)
        expected, _ = bare.reset()
        observation, _ = env.reset(seed=seed)
        np.testing.assert_array_equal(observation, expected)
        expert = ENV_POLICY_MAP[task]()  # which comes to touch things
        for step in range(120 if seed == 8 else 20):
            if seed == 8:
                towards = np.asarray(expert.get_action(expected), dtype=float)
                action = np.clip(towards + 0.1 * rng.normal(size=4), -1, 1)
            else:
                action = actions[step // 10]
            expected, expected_reward, _, _, expected_info = bare.step(action)
            observation, reward, _, _, info = env.step(action)
            np.testing.assert_array_equal(observation, expected)
            assert reward == expected_reward
            assert info["success"] == bool(expected_info["success"])
            assert info["object_to_target"] == expected_info["obj_to_target"]


def test_meta_world_moves_alike_where_it_can_be_seen() -> None:
    seen, unseen = (gymnasium.make(META, render_mode=mode) for mode in ("rgb_array", None))
    models = [env.unwrapped.simulation.model for env in (seen, unseen)]  # type: ignore[attr-defined]
    assert models[1].ngeom < models[0].ngeom / 2
    for name in ("body_mass", "body_inertia", "body_ipos", "dof_invweight0", "site_pos"):
        np.testing.assert_array_equal(*(getattr(model, name) for model in models))
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(seen.reset(seed=3)[0], unseen.reset(seed=3)[0])
    for _ in range(50):
        action = rng.uniform(-1, 1, 4)
        np.testing.assert_array_equal(seen.step(action)[0], unseen.step(action)[0])


def test_meta_world_tells_a_grasp_as_the_bare_task_does() -> None:
    from metaworld.policies import SawyerPickPlaceV3Policy

    bare = bare_meta_world("pick-place-v3")
    env: Any = gymnasium.make("tether/MetaWorld-pick-place-v3")
    bare.seed(4)
    expected, _ = bare.reset()
    env.reset(seed=4)
    touched = []
    for _ in range(80):
        action = np.clip(SawyerPickPlaceV3Policy().get_action(expected).astype(float), -1, 1)
        expected, *_ = bare.step(action)
        observation, *_ = env.step(action)
        np.testing.assert_array_equal(observation, expected)
        touched.append(bool(bare.touching_main_object))
        assert env.unwrapped.simulation.touching_main_object == touched[-1]
    assert 10 < sum(touched) < 70


def test_meta_world_turns_matrices_to_quaternions_as_scipy_does() -> None:
    import mujoco
    from scipy.spatial.transform import Rotation

    from tether.episodic.envs.meta_world_quick import _Turn

    rng = np.random.default_rng(0)
    matrix = np.zeros(9)
    for turn in np.concatenate([rng.normal(size=(500, 4)), np.eye(4), 1.0 - np.eye(4)]):
        mujoco.mju_quat2Mat(matrix, turn / np.linalg.norm(turn))
        rotation = matrix.reshape(3, 3)
        np.testing.assert_array_equal(
            _Turn.from_matrix(rotation).as_quat(), Rotation.from_matrix(rotation).as_quat()
        )


def test_meta_world_grades_distances_as_its_package_does() -> None:
    from metaworld.utils import reward_utils

    from tether.episodic.envs.meta_world_quick import _tolerance

    rng = np.random.default_rng(0)
    for sigmoid in ("long_tail", "gaussian"):
        for x, low, high, margin in rng.uniform(0, 0.2, (500, 4)):
            bounds = (low / 2, 0.1 + high / 2)
            for asked in (x, x + 0.2, np.nan, np.array([x, 0.3])):
                for width in (0.0, float(margin), margin):
                    expected = reward_utils.tolerance(asked, bounds, width, sigmoid)
                    np.testing.assert_array_equal(_tolerance(asked, bounds, width, sigmoid), expected)
    for bounds, margin in (((0.2, 0.1), 0.1), ((0.0, 0.1), -1.0)):
        with pytest.raises(ValueError, match="must be"):
            _tolerance(0.5, bounds, margin, "long_tail")


def test_meta_worlds_hand_follows_a_straight_push_to_the_button() -> None:
    with make_position_controlled(META) as env:
        start = env.reset(2)
        button = start.observation[4:7]
        share = np.minimum(np.arange(1, 501) / 300, 1.0)[:, None]
        before = np.append(button - np.array([0.0, 0.15, 0.0]), 0.0)
        behind = np.append(button + np.array([0.0, 0.2, 0.0]), 0.0)
        approach = start.position + 2 * share * (before - start.position)
        push = before + (2 * share - 1) * (behind - before)
        path = np.where(share < 0.5, approach, push)
        episode = env.execute(2, path, np.zeros_like(path))
        still = np.tile(start.position, (500, 1))
        idle = env.execute(2, still, np.zeros_like(still))
    assert episode.success
    assert not idle.success
    np.testing.assert_allclose(episode.positions[250, :3], path[249, :3], atol=0.02)


def test_a_box_that_only_passes_its_target_succeeds_at_some_step_and_not_at_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_position_controlled("tether/BoxPushingDense-v0") as env:
        start = env.reset(3)
        still = np.tile(start.position, (env.horizon, 1))
        inner: Any = env.env.unwrapped
        advance, away = inner._advance, inner.data.qpos[9:].copy()

        def passing(action: np.ndarray) -> Any:
            on_target = inner.model.body_pos[inner._target], inner.model.body_quat[inner._target]
            inner.data.qpos[9:] = np.concatenate(on_target) if inner._steps == 50 else away
            inner.data.qvel[7:] = 0.0
            return advance(action)

        monkeypatch.setattr(inner, "_advance", passing)
        episode = env.execute(3, still, np.zeros_like(still))
    assert (episode.success, episode.success_any) == (False, True)


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("tether/HopperJump-v0", {"render_mode": "ansi"}, "rgb_array"),
        ("tether/HopperJump-v0", {"camera": "nowhere"}, "no camera 'nowhere'.*track"),
        ("tether/BoxPushingDense-v0", {"reward": "free"}, "dense.*sparse"),
        ("tether/BoxPushingDense-v0", {"turns": "degrees"}, "turns.*quaternion.*degrees"),
        ("tether/TableTennis-v0", {"reward": "free"}, "dense.*final"),
        ("tether/TableTennis-v0", {"violations": "free"}, "executed.*refused"),
    ],
)
def test_wrong_options_are_named(env_id: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_position_controlled(env_id, **options)


def test_rotation_distance_is_the_angle_between_orientations() -> None:
    from scipy.spatial.transform import Rotation

    rng = np.random.default_rng(0)
    for first, second in zip(Rotation.random(20, rng), Rotation.random(20, rng), strict=True):
        expected = (first.inv() * second).magnitude()
        quaternions = [np.roll(rotation.as_quat(), 1) for rotation in (first, second)]  # scipy puts w last
        assert rotation_distance(*quaternions) == pytest.approx(expected, abs=1e-7)
    same = np.array([0.5, 0.5, 0.5, 0.5]) * (1 + 1e-16)
    assert rotation_distance(same, same) == 0.0


def test_rotation_error_points_along_the_axis_of_the_missing_turn() -> None:
    half = 0.15
    turned = np.array([np.cos(half), 0.0, 0.0, np.sin(half)])
    np.testing.assert_allclose(
        rotation_error(np.array([1.0, 0, 0, 0]), turned), [0, 0, np.sin(half)], atol=1e-12
    )
