from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from misbehaving_envs import CountingAdapter

from tether.episodic.adapters import ADAPTERS, PositionControlledEnv, register_adapter
from tether.episodic.environments import make_position_controlled
from tether.episodic.envs.point_reach import PointReachAdapter
from tether.errors import ConfigError, MissingDependencyError, SimulationError


def zeros(env: PositionControlledEnv) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((env.horizon, env.num_dof)), np.zeros((env.horizon, env.num_dof))


def test_an_early_end_becomes_an_absorbing_state() -> None:
    with make_position_controlled("misbehaving_envs:test/ends-v0") as env:
        episode = env.execute(0, *zeros(env))
    assert episode.length == 3
    np.testing.assert_array_equal(episode.rewards, [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(episode.observations[:, 1], [0, 1, 2, 3, 3, 3])
    np.testing.assert_array_equal(episode.positions[:, 0], [0, 1, 2, 3, 3, 3])


@pytest.mark.parametrize(("way", "last"), [("well", False), ("ends", True)])
def test_success_is_that_of_the_last_step_taken_and_that_of_any_step_stands_beside_it(
    way: str, last: bool
) -> None:
    # These environments succeed at step 3 of 5 alone, and one of them ends there.
    with make_position_controlled(f"misbehaving_envs:test/{way}-v0") as env:
        episode = env.execute(0, *zeros(env))
    assert (episode.success, episode.success_any) == (last, True)


def test_the_former_choice_between_the_two_successes_is_named_as_gone() -> None:
    with pytest.raises(ConfigError, match=r"success_rule is gone.*success_any"):
        make_position_controlled("tether/PointReach-v0", success_rule="last")


@pytest.mark.parametrize(
    ("env_id", "event"), [("tether/HopperJump-v0", "took_off"), ("tether/PointReach-v0", "")]
)
def test_an_episode_knows_the_step_of_its_event(env_id: str, event: str) -> None:
    with make_position_controlled(env_id) as env:
        start = env.reset(0)
        bend = 0.5 * np.sin(np.arange(env.horizon) / 20)[:, None]
        motion = start.position + bend
        episode = env.execute(0, motion, np.gradient(motion, env.dt, axis=0))
        told = []
        env.reset(0)
        for t in range(env.horizon if event else 0):
            action = env.action(motion[t], np.gradient(motion, env.dt, axis=0)[t])
            told.append(env.env.step(np.clip(action, -1, 1))[4][event])
    assert episode.event_step == (told.index(True) if event else -1)


def test_an_adapter_without_its_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "test/Forgotten-v0", CountingAdapter)
    with pytest.raises(ConfigError, match=r"test/Forgotten-v0 has an adapter, but .*gymnasium\.register"):
        make_position_controlled("test/Forgotten-v0")


def test_what_an_environment_lacks_is_a_missing_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: object, **options: object) -> None:
        raise gymnasium.error.DependencyNotInstalled("pip install gymnasium[mujoco]")

    monkeypatch.setattr(gymnasium, "make", make)
    with pytest.raises(MissingDependencyError, match=r"PointReach-v0: .*gymnasium\[mujoco\]"):
        make_position_controlled("tether/PointReach-v0")


def test_actions_are_clipped_to_the_action_space() -> None:
    with make_position_controlled("misbehaving_envs:test/well-v0") as env:
        wanted = np.full((5, 1), -7.0)
        assert env.execute(0, wanted, wanted).extras["action"] == -1.0


def test_executing_resets_to_the_episodes_own_start() -> None:
    with make_position_controlled("misbehaving_envs:test/well-v0") as env:
        start = env.reset(3)
        env.reset(8)
        assert env.execute(3, *zeros(env)).observations[0, 0] == start.observation[0]


def test_nan_names_step_and_seed() -> None:
    seed = next(s for s in range(20) if np.random.default_rng(s).uniform() > 0.5)
    with (
        make_position_controlled("misbehaving_envs:test/nan-for-half-v0") as env,
        pytest.raises(SimulationError, match=rf"step 2 of the episode with seed {seed}"),
    ):
        env.execute(seed, *zeros(env))


def test_a_trajectory_outside_of_the_joints_range_is_not_run_and_blamed_evenly_in_table_tennis() -> None:
    """Wherever a motion is cut into segments, each bears its share of the penalty."""
    with make_position_controlled("tether/TableTennis-v0") as env:
        start = env.reset(0)
        wanted = np.tile(start.position, (300, 1))
        wanted[100, 2] = 2.8 + 2.1  # 2.1 rad above its limit, at one of 300 x 7 entries
        wanted[200, 3] = -0.9 - 4.2
        episode = env.execute(0, wanted, np.zeros_like(wanted))
    assert episode.length == 0
    assert episode.rewards.sum() == pytest.approx(-(2.1 + 4.2) / 2100)
    assert np.ptp(episode.rewards) == 0.0
    np.testing.assert_array_equal(episode.observations, np.tile(start.observation, (301, 1)))
    assert episode.extras == {"hit_ball": 0, "returned": 0, "landing_error": 10.0, "broken": 0}


def test_the_table_tennis_arm_follows_a_slow_trajectory() -> None:
    with make_position_controlled("tether/TableTennis-v0") as env:
        start = env.reset(0)
        share = np.arange(1, 301)[:, None] / 300
        wanted = (
            start.position + np.array([0.4, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0]) * np.sin(np.pi / 2 * share) ** 2
        )
        episode = env.execute(0, wanted, np.gradient(wanted, env.dt, axis=0))
    # The arm hangs: what gravity does to a PD controller without a model of it is part of the original.
    assert np.abs(episode.positions[1:, 0] - wanted[:, 0]).max() < 0.05


def test_an_id_cannot_be_given_to_two_adapters() -> None:
    register_adapter("test/twice-v0", "tether.episodic.envs.point_reach:PointReachAdapter")
    with pytest.raises(ConfigError, match="registered already"):
        register_adapter("test/twice-v0", PointReachAdapter)
    with pytest.raises(ConfigError, match="Tether's own"):
        register_adapter("tether/PointReach-v0", PointReachAdapter)


def test_spaces_that_are_no_flat_boxes_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="FlattenObservation"):
        PointReachAdapter(gymnasium.make("FrozenLake-v1"), "FrozenLake-v1")


def adapter(**declared: object) -> PositionControlledEnv:
    """A counting robot that declares something else."""
    kind = type("Declared", (CountingAdapter,), declared)
    built = kind(gymnasium.make("test/well-v0", disable_env_checker=True), "test/well-v0")
    assert isinstance(built, PositionControlledEnv)
    return built


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"headline": "d", "extra_names": ()}, r"headline is 'd', .* extra_names \(none\)\. Add it there"),
        ({"extra_names": ("return", "action")}, "extra_names has return, which every run measures itself"),
        ({"context_indices": (0, 2)}, r"context_indices \(0, 2\) .* observation of 2 numbers"),
        ({"context_indices": (-3,)}, "observation of 2 numbers"),
    ],
)
def test_declarations_that_contradict_each_other_are_refused(
    declared: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter(**declared)


def test_indices_chosen_when_the_environment_is_known_are_checked_as_well() -> None:
    late = adapter()
    late.context_indices = (0, 5)
    with pytest.raises(ConfigError, match="observation of 2 numbers"):
        _ = late.spec


@pytest.mark.parametrize(
    "declared", [{"extra_names": ("action", "hit"), "headline": "hit"}, {"event_key": "hit"}]
)
def test_what_an_environment_does_not_tell_is_named_with_what_it_does(declared: dict[str, object]) -> None:
    env = adapter(**declared)
    with pytest.raises(
        ConfigError, match=r"info has no 'hit', which Declared declares; it has success, .*action"
    ):
        env.execute(0, *zeros(env))


def test_a_refused_episode_needs_a_number_for_every_extra() -> None:
    env = adapter(refusal=lambda self, positions, velocities: -1.0, refused_extras={"action": 0.0})
    with pytest.raises(ConfigError, match=r"refused_extras has no 'threads'.*it has action"):
        env.execute(0, *zeros(env))


@pytest.mark.parametrize("env_id", ["tether/PointReach-v0", "misbehaving_envs:test/well-v0"])
def test_an_option_that_an_environment_does_not_have_is_named(env_id: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{env_id} cannot be made with the options .*'foo': 1.*unexpected"
    ):
        make_position_controlled(env_id, foo=1)


def test_a_failure_of_the_environments_own_stays_what_it_is() -> None:
    gymnasium.register("test/broken-v0", entry_point=lambda: len(5))  # type: ignore[arg-type]
    register_adapter("test/broken-v0", CountingAdapter)
    with pytest.raises(TypeError, match="has no len"):
        make_position_controlled("test/broken-v0")
