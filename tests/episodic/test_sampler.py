from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tether.episodic.envs.point_reach import PointReachAdapter, PointReachEnv
from tether.episodic.sampler import Episodes, EpisodeSampler, Starts
from tether.errors import ConfigError, InvalidInputError, SimulationError

REACH = "tether/PointReach-v0"


def straight_lines(sampler: EpisodeSampler, starts: Starts) -> tuple[np.ndarray, np.ndarray]:
    """A line from each start to a point that depends on the episode alone."""
    spec = sampler.spec
    share = np.arange(1, spec.horizon + 1)[None, :, None] / spec.horizon
    goal = starts.contexts[:, None, : spec.num_dof]
    positions = starts.positions[:, None] * (1 - share) + goal * share
    return positions, np.gradient(positions, spec.dt, axis=1)


def collect(env_id: str, num_workers: int, batches: int = 2, episodes: int = 5) -> list[Episodes]:
    with EpisodeSampler(env_id, num_workers=num_workers, seed=3) as sampler:
        return [sampler.execute(*straight_lines(sampler, sampler.reset(episodes))) for _ in range(batches)]


def assert_same(first: Episodes, second: Episodes) -> None:
    for name in ("observations", "rewards", "success", "positions", "lengths"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    for name in first.extras:
        np.testing.assert_array_equal(first.extras[name], second.extras[name])


@pytest.fixture(scope="module")
def two_workers() -> Iterator[EpisodeSampler]:
    with EpisodeSampler("misbehaving_envs:test/nan-for-half-v0", num_workers=2, seed=1) as sampler:
        yield sampler


def test_results_do_not_depend_on_the_number_of_workers() -> None:
    for alone, shared in zip(collect(REACH, 0), collect(REACH, 3), strict=True):
        assert_same(alone, shared)


def test_a_simulated_robot_does_not_depend_on_the_number_of_workers_either() -> None:
    # One worker gets no episode at all.
    alone, shared = (collect("tether/HopperJump-v0", workers, batches=1, episodes=1) for workers in (0, 2))
    assert_same(alone[0], shared[0])


def test_episodes_that_stand_ready_are_those_of_one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    env_id = "tether/MetaWorld-push-v3"
    standing = collect(env_id, 0)
    monkeypatch.setattr("tether.episodic.envs.meta_world.MetaWorldAdapter.standing", 2)
    for many, few, shared in zip(standing, collect(env_id, 0), collect(env_id, 2), strict=True):
        assert_same(many, few)
        assert_same(many, shared)


def test_an_environment_that_stands_ready_is_not_reset_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resets = []
    begin = PointReachEnv.reset
    monkeypatch.setattr(PointReachEnv, "reset", lambda env, **seed: resets.append(env) or begin(env, **seed))
    monkeypatch.setattr(PointReachAdapter, "standing", 3)
    collect(REACH, 0, batches=2, episodes=3)
    assert (len(resets), len(set(map(id, resets)))) == (6, 3)
    resets.clear()
    collect(REACH, 0, batches=1, episodes=5)  # of which the third waits on its own
    assert (len(resets), len(set(map(id, resets)))) == (9, 3)


def test_a_restored_random_state_continues_the_stream_exactly() -> None:
    with EpisodeSampler(REACH, seed=5) as sampler:
        sampler.reset(3)
        state = sampler.random_state()
        expected = sampler.reset(4).observations
    with EpisodeSampler(REACH, seed=99) as sampler:
        sampler.set_random_state(state)
        np.testing.assert_array_equal(sampler.reset(4).observations, expected)


def test_batches_of_one_stream_can_be_cut_anywhere() -> None:
    with EpisodeSampler(REACH, seed=5) as sampler:
        together = sampler.reset(6).seeds
        sampler.set_random_state({"seed": 5, "episodes_drawn": 0})
        assert sampler.reset(2).seeds + sampler.reset(4).seeds == together
    assert len(set(together)) == 6


def test_chosen_seeds_are_run_and_leave_the_stream_where_it_was() -> None:
    with EpisodeSampler(REACH, seed=5) as sampler:
        before = sampler.random_state()
        starts = sampler.reset(seeds=[11, 12])
        assert starts.seeds == (11, 12)
        assert sampler.random_state() == before
        again = sampler.reset(seeds=[12, 11])
    np.testing.assert_array_equal(starts.observations, again.observations[::-1])


def test_the_same_starts_can_be_run_along_other_trajectories() -> None:
    with EpisodeSampler(REACH, seed=5) as sampler:
        starts = sampler.reset(2)
        first = sampler.execute(*straight_lines(sampler, starts))
        still = np.repeat(starts.positions[:, None], sampler.spec.horizon, axis=1)
        sampler.execute(still, np.zeros_like(still))
        assert_same(first, sampler.execute(*straight_lines(sampler, starts)))


def test_starts_say_what_the_episode_begins_with() -> None:
    with EpisodeSampler(REACH, seed=5) as sampler:
        starts = sampler.reset(3)
        episodes = sampler.execute(*straight_lines(sampler, starts))
    np.testing.assert_array_equal(episodes.observations[:, 0], starts.observations)
    np.testing.assert_array_equal(episodes.positions[:, 0], starts.positions)
    np.testing.assert_array_equal(starts.observations[:, :2], starts.contexts)
    np.testing.assert_array_equal(starts.observations[:, 2:4], starts.positions)


def test_returns_and_env_steps_add_up() -> None:
    episodes = collect(REACH, 0, batches=1, episodes=4)[0]
    assert episodes.env_steps == 4 * 50
    # The reward is minus the distance between goal (0, 1) and position (2, 3).
    gaps = episodes.observations[:, 1:, 0:2] - episodes.observations[:, 1:, 2:4]
    np.testing.assert_allclose(episodes.returns, -np.sqrt((gaps**2).sum(-1)).sum(1), rtol=1e-12)


@pytest.mark.parametrize(
    ("positions_shape", "velocities_shape"),
    [
        ((2, 4, 1), (2, 5, 1)),
        ((2, 5, 1), (2, 6, 1)),
        ((3, 5, 1), (3, 5, 1)),
        ((2, 5, 2), (2, 5, 2)),
        ((5, 1), (5, 1)),
    ],
)
def test_a_wrong_shape_is_refused_before_anything_is_stepped(
    positions_shape: tuple[int, ...], velocities_shape: tuple[int, ...]
) -> None:
    # A step of this environment would end the test process.
    with EpisodeSampler("misbehaving_envs:test/exits-v0", seed=0) as sampler:
        sampler.reset(2)
        with pytest.raises(InvalidInputError, match=r"expected \(2, 5, 1\).*horizon 5"):
            sampler.execute(np.zeros(positions_shape), np.zeros(velocities_shape))


def test_a_trajectory_that_is_not_finite_is_refused_before_anything_is_stepped() -> None:
    with EpisodeSampler("misbehaving_envs:test/exits-v0", seed=0) as sampler:
        sampler.reset(2)
        bad = np.zeros((2, 5, 1))
        bad[1, 3, 0] = np.nan
        with pytest.raises(InvalidInputError, match=r"velocities are not finite, first at index \(1, 3, 0\)"):
            sampler.execute(np.zeros((2, 5, 1)), bad)


def test_executing_before_a_reset_is_refused() -> None:
    with EpisodeSampler(REACH) as sampler, pytest.raises(InvalidInputError, match="call reset first"):
        sampler.execute(np.zeros((1, 50, 2)), np.zeros((1, 50, 2)))


@pytest.mark.parametrize("arguments", [{}, {"num_episodes": 0}, {"num_episodes": 2, "seeds": [1, 2]}])
def test_reset_needs_exactly_one_way_to_choose_episodes(arguments: dict[str, object]) -> None:
    with EpisodeSampler(REACH) as sampler, pytest.raises(InvalidInputError):
        sampler.reset(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unknown_environment_is_refused_with_the_known_ones(num_workers: int) -> None:
    with pytest.raises(ConfigError, match=r"tether/Hopper-v9.*tether/HopperJump-v0"):
        EpisodeSampler("tether/Hopper-v9", num_workers=num_workers)


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        EpisodeSampler("no_such_module:test/well-v0")


@pytest.mark.parametrize(("way", "ending"), [("exits", "exit code 7"), ("killed", "signal SIGKILL")])
def test_a_worker_that_dies_is_reported_within_seconds(way: str, ending: str) -> None:
    env_id = f"misbehaving_envs:test/{way}-v0"
    with EpisodeSampler(env_id, num_workers=2) as sampler:
        sampler.reset(4)
        began = time.monotonic()
        with pytest.raises(SimulationError, match=rf"{env_id}.*worker [01] of 2.*{ending}"):
            sampler.execute(np.zeros((4, 5, 1)), np.zeros((4, 5, 1)))
        assert time.monotonic() - began < 60  # and not until the episode's own end, which never comes
        with pytest.raises(SimulationError, match="closed"):
            sampler.reset(1)


def test_an_unexpected_exception_in_a_worker_is_reported_with_its_words() -> None:
    with EpisodeSampler("misbehaving_envs:test/raises-v0", num_workers=1) as sampler:
        sampler.reset(1)
        with pytest.raises(SimulationError, match="RuntimeError: the simulator's own words"):
            sampler.execute(np.zeros((1, 5, 1)), np.zeros((1, 5, 1)))


def test_nan_from_the_simulator_names_the_episode_and_leaves_the_workers_usable(
    two_workers: EpisodeSampler,
) -> None:
    starts = two_workers.reset(8)
    draws = starts.contexts[:, 0]
    zeros = np.zeros((8, 5, 1))
    assert (draws > 0.5).any()
    with pytest.raises(SimulationError, match=r"not finite at step 2 .* seed (\d+)") as failure:
        two_workers.execute(zeros, zeros)
    named = int(str(failure.value).split("seed ")[1].split(".")[0])
    assert draws[starts.seeds.index(named)] > 0.5
    healthy = [seed for seed, draw in zip(starts.seeds, draws, strict=True) if draw <= 0.5]
    two_workers.reset(seeds=healthy)
    quiet = np.zeros((len(healthy), 5, 1))
    np.testing.assert_array_equal(two_workers.execute(quiet, quiet).rewards, 1.0)


def test_signals_to_all_of_a_group_are_for_the_workers_parent(two_workers: EpisodeSampler) -> None:
    """A terminal that is closed, a service and a scheduler tell all processes; the parent may save."""
    seeds = [seed for seed in range(20) if np.random.default_rng(seed).uniform() <= 0.5][:2]
    two_workers.reset(seeds=seeds)
    for process in two_workers._backend._processes:  # type: ignore[union-attr]
        assert process.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(process.pid, number)
    np.testing.assert_array_equal(two_workers.execute(np.zeros((2, 5, 1)), np.zeros((2, 5, 1))).rewards, 1.0)


def test_an_interrupted_request_leaves_no_answer_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = itertools.chain([KeyboardInterrupt], itertools.repeat(None))

    def wait(*arguments: Any) -> Any:
        if ends := next(waits):
            raise ends
        return connection.wait(*arguments)

    with EpisodeSampler("misbehaving_envs:test/well-v0", num_workers=1) as sampler:
        sampler.reset(2)
        monkeypatch.setattr("tether.episodic.workers.connection", SimpleNamespace(wait=wait))
        with pytest.raises(KeyboardInterrupt):
            sampler.execute(np.full((2, 5, 1), 0.5), np.zeros((2, 5, 1)))
        with pytest.raises(SimulationError, match=r"closed\. Build a new one"):
            sampler.execute(np.zeros((2, 5, 1)), np.zeros((2, 5, 1)))


def test_a_reset_that_fails_leaves_no_earlier_episode_to_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with EpisodeSampler("misbehaving_envs:test/well-v0") as sampler:
        robot = sampler._backend._envs[0]  # type: ignore[union-attr]
        zeros, task = np.zeros((5, 1)), robot.env.unwrapped
        expected = robot.execute(1, zeros, zeros).observations
        robot.reset(1)
        sampler.reset(seeds=[1])

        def fails(**options: object) -> None:
            type(task).reset(task, **options)
            raise RuntimeError("no start")

        with monkeypatch.context() as patch:
            patch.setattr(task, "reset", fails)
            with pytest.raises(RuntimeError, match="no start"):
                sampler.reset(seeds=[2])
        with pytest.raises(InvalidInputError, match="call reset first"):
            sampler.execute(zeros[None], zeros[None])
        np.testing.assert_array_equal(robot.execute(1, zeros, zeros).observations, expected)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environment_that_ignores_its_seed_is_named(num_workers: int) -> None:
    """The motions would be planned for other starts than those they are run from."""
    with EpisodeSampler("misbehaving_envs:test/unseeded-v0", num_workers=num_workers) as sampler:
        sampler.reset(seeds=[7, 8])
        with pytest.raises(
            SimulationError, match=r"resets with seed 7 gave different .* context .* np_random"
        ):
            sampler.execute(np.zeros((2, 5, 1)), np.zeros((2, 5, 1)))


def test_workers_share_the_batch_and_compute_on_one_thread_each(two_workers: EpisodeSampler) -> None:
    seeds = [seed for seed in range(20) if np.random.default_rng(seed).uniform() <= 0.5][:6]
    two_workers.reset(seeds=seeds)
    episodes = two_workers.execute(np.zeros((6, 5, 1)), np.zeros((6, 5, 1)))
    assert len(set(episodes.extras["worker"])) == 2
    np.testing.assert_array_equal(episodes.extras["threads"], 1.0)


def test_desired_positions_reach_the_episode_they_belong_to(two_workers: EpisodeSampler) -> None:
    seeds = [seed for seed in range(20) if np.random.default_rng(seed).uniform() <= 0.5][:5]
    two_workers.reset(seeds=seeds)
    desired = np.broadcast_to(np.linspace(-0.9, 0.9, 5)[:, None, None], (5, 5, 1))
    episodes = two_workers.execute(desired, np.zeros((5, 5, 1)))
    np.testing.assert_allclose(episodes.extras["action"], np.linspace(-0.9, 0.9, 5))


def test_closing_twice_is_fine_and_ends_the_workers() -> None:
    sampler = EpisodeSampler(REACH, num_workers=1)
    processes = list(sampler._backend._processes)  # type: ignore[union-attr]
    sampler.close()
    sampler.close()
    assert not any(process.is_alive() for process in processes)
