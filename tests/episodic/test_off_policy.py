"""TOPERL: targets, critic, motions taken up in the middle, replay; that it learns, and resumes exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tether.episodic.algorithms import build_learner, config_from_dict
from tether.episodic.config import OffPolicyConfig, ReplayConfig, TrustRegionConfig
from tether.episodic.evaluate import evaluate_learner
from tether.episodic.off_policy import TOPERL, Cut, Restarts, n_step_returns
from tether.episodic.policy import PolicyConfig
from tether.episodic.presets import choose
from tether.episodic.prodmp import ProDMP, ProDMPConfig
from tether.episodic.replay import Replay
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.segment_critic import SegmentCritic, SegmentCriticConfig
from tether.episodic.train import train
from tether.errors import ConfigError, InvalidInputError
from tether.experiments.files import dump_json, load_json

ENV = "tether/PointReach-v0"


def small_config(**changes: Any) -> OffPolicyConfig:
    config = OffPolicyConfig(
        env_id=ENV,
        algo="toperl",
        iterations=40,
        episodes=8,
        num_workers=0,
        motion=ProDMPConfig(2, 0.5, 15.0, 3.0, weights_scale=0.3, relative_goal=True),
        policy=PolicyConfig((32,), "tanh", init_std=0.5),
        critic=SegmentCriticConfig(width=16, layers=1, heads=2, learning_rate=3e-3, epochs=10),
        replay=ReplayConfig(capacity=200, batch=16, stride=10, segments=3),
        trust_region=TrustRegionConfig(0.1, 0.02),
        learning_rate=3e-3,
        polyak=0.05,
    )
    return replace(config, **changes)


@pytest.fixture
def sampler() -> Iterator[EpisodeSampler]:
    with EpisodeSampler(ENV, num_workers=0, seed=0) as sampler:
        yield sampler


def build(config: OffPolicyConfig, sampler: EpisodeSampler) -> TOPERL:
    learner = build_learner(config, sampler.spec)
    assert isinstance(learner, TOPERL)
    return learner


def observed(learner: TOPERL, sampler: EpisodeSampler) -> None:
    motions = learner.act(sampler.reset(learner.config.episodes))
    learner.observe(motions, sampler.execute(motions.positions, motions.velocities))


# ---------------------------------------------------------------------- learning


def test_learns_to_reach_a_point(sampler: EpisodeSampler) -> None:
    """The untrained robot stays at the centre, half a unit from the goal at each of 50 steps."""
    learner = build(small_config(), sampler)
    before = evaluate_learner(learner, sampler, 32).returns.mean()
    for iteration in range(learner.config.iterations):
        observed(learner, sampler)
        learner.update(iteration / learner.config.iterations)
    after = evaluate_learner(learner, sampler, 32).returns.mean()
    assert -45 < before < -30
    assert after > -22


def test_an_update_before_any_episode_is_refused(sampler: EpisodeSampler) -> None:
    with pytest.raises(InvalidInputError, match="observe"):
        build(small_config(), sampler).update(0.0)


def test_a_resumed_run_with_its_replay_takes_the_course_of_an_unbroken_one(tmp_path: Path) -> None:
    # The replay is full after three iterations, so that its oldest episodes are being replaced.
    config = small_config(
        iterations=6, evaluate_every=3, checkpoint_every=2, evaluation_episodes=2,
        replay=ReplayConfig(capacity=20, batch=8, stride=10, segments=3),
    )  # fmt: skip
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", until=4)
    parts = train(config, tmp_path / "parts", resume=True)
    assert parts.finished
    for one, other in zip(whole.metrics(), parts.metrics(), strict=True):
        timed = {"time_s"} | {name for name in one if name.endswith("_seconds")}
        assert {name: one[name] for name in one.keys() - timed} == {
            name: other[name] for name in one.keys() - timed
        }
    assert {line["step"]: line["return_greedy"] for line in whole.evals()} == {
        line["step"]: line["return_greedy"] for line in parts.evals() if line["step"] != 4
    }


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.95, 0.9, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_n_step_returns_are_those_of_a_plain_loop(gamma: float, dtype: torch.dtype) -> None:
    """500 steps, after which a discount from the episode's start is nothing in float32."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.tensor([*range(0, 500, 5), 500])
    rewards, values = (torch.randn(3, size, dtype=dtype, generator=generator) for size in (100, 101))
    cut = Cut(torch.tensor([3, 35, 67]), 32)
    found = n_step_returns(rewards, values, steps, gamma, cut)
    # Of a sum of 33 products: as many roundings, of terms up to 4.
    within = 33 * 4 * torch.finfo(dtype).eps
    for episode in range(3):
        for segment, start in enumerate(cut.starts.tolist()):
            total = 0.0
            for i in range(1, cut.length + 1):
                total += gamma ** (5 * (i - 1)) * rewards[episode, start + i - 1].item()
                expected = total + gamma ** (5 * i) * values[episode, start + i].item()
                assert found[episode, segment, i - 1].item() == pytest.approx(expected, abs=within)


def test_what_a_piece_earns_is_discounted_to_its_beginning(sampler: EpisodeSampler) -> None:
    """50 steps in pieces of 15: the last has 5."""
    replay = ReplayConfig(stride=15, gamma=0.9, shift_rewards=False)
    learner = build(small_config(precision="float64", replay=replay), sampler)
    motions = learner.act(sampler.reset(2))
    episodes = sampler.execute(motions.positions, motions.velocities)
    rewards = np.random.default_rng(0).normal(size=episodes.rewards.shape)
    learner.observe(motions, replace(episodes, rewards=rewards))
    assert learner.steps.tolist() == [0, 15, 30, 45, 50]
    expected = [
        [sum(0.9**j * row[start + j] for j in range(stop - start)) for start, stop in
         zip(learner.steps[:-1].tolist(), learner.steps[1:].tolist(), strict=True)]
        for row in rewards
    ]  # fmt: skip
    torch.testing.assert_close(learner.replay["rewards"], torch.tensor(expected, dtype=torch.float64))
    asked = learner.replay["positions"]
    np.testing.assert_array_equal(asked[:, 0], motions.starts.positions)
    np.testing.assert_array_equal(asked[:, 1:], motions.positions[:, [14, 29, 44, 49]])


def test_scaled_returns_have_mean_0_and_deviation_1(sampler: EpisodeSampler) -> None:
    learner = build(small_config(precision="float64"), sampler)
    observed(learner, sampler)
    returns = learner._scaled(learner.replay["rewards"]).sum(-1)
    assert returns.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert returns.std(correction=0).item() == pytest.approx(1.0)


def test_rewards_that_never_differ_are_centred_alone(sampler: EpisodeSampler) -> None:
    """A sparse reward that nobody has earned yet: no division by nothing."""
    learner = build(small_config(), sampler)
    learner.replay.add({"rewards": torch.full((4, learner.pieces), -0.3)})
    assert learner._scaled(learner.replay["rewards"]).abs().max() < 1e-6


@pytest.mark.parametrize("number", range(20))
def test_segments_lie_in_the_episode_and_do_not_overlap(number: int, sampler: EpisodeSampler) -> None:
    learner = build(small_config(replay=ReplayConfig(stride=7, segments=25)), sampler)
    learner.generator.manual_seed(number)
    cut = learner._cut()
    steps = cut.steps.flatten().tolist()
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert 0 <= steps[0] < cut.length
    assert learner.pieces - cut.length <= steps[-1] < learner.pieces


# ---------------------------------------------------------------------- motions


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("delay", [0.0, 0.15])
def test_a_motion_taken_up_where_it_was_goes_on_as_it_would_have(relative: bool, delay: float) -> None:
    motion = ProDMP(ProDMPConfig(3, 0.8, goal_scale=0.7, relative_goal=relative, delay=delay), num_dof=2)
    times = np.array([0.0, 0.1, 0.2, 0.4, 0.6, 0.7])
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(4, motion.num_weights, dtype=torch.float64, generator=generator)
    position = torch.randn(4, 2, dtype=torch.float64, generator=generator)
    velocity = torch.zeros(4, 2, dtype=torch.float64)
    positions, velocities = motion.trajectory(weights, position, velocity, times)
    cut = Cut(torch.tensor([0, 2]), 2)
    found = Restarts(motion, times, torch.float64).positions(weights, positions, velocities, cut)
    torch.testing.assert_close(found, positions[:, cut.steps + 1], atol=1e-9, rtol=0)


def test_a_motion_taken_up_elsewhere_begins_there() -> None:
    """Other weights from the same place: near the restart the position is the restart's."""
    motion = ProDMP(ProDMPConfig(3, 0.8, relative_goal=True), num_dof=1)
    times = np.array([0.0, 0.4, 0.4 + 1e-6, 0.8])
    asked, velocities = torch.tensor([[[0.3], [1.7], [9.0], [9.0]]]).double(), torch.zeros(1, 4, 1).double()
    weights = torch.full((1, 4), 0.5, dtype=torch.float64)
    found = Restarts(motion, times, torch.float64).positions(
        weights, asked, velocities, Cut(torch.tensor([1]), 2)
    )
    assert found[0, 0, 0, 0].item() == pytest.approx(1.7, abs=1e-5)
    expected, _ = motion.trajectory(weights, asked[:, 1], velocities[:, 1], [0.8], init_time=0.4)
    # The goal is measured from 0.3, where the whole motion began, and not from 1.7.
    basis = motion.basis([0.8], 0.4)
    absolute = ProDMP(replace(motion.config, relative_goal=False), 1).basis([0.8], 0.4)
    goal = (basis.position_from_position - absolute.position_from_position).item()
    assert found[0, 0, 1, 0].item() == pytest.approx(expected.item() - goal * (1.7 - 0.3))


# ---------------------------------------------------------------------- critic


def test_the_critic_does_not_look_ahead() -> None:
    generator = torch.Generator().manual_seed(0)
    critic = SegmentCritic(SegmentCriticConfig(), 3, 2, 6, generator=generator, dtype=torch.float64)
    states = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    actions = torch.randn(4, 6, 2, dtype=torch.float64, generator=generator)
    values, returns = critic(states, actions)
    actions[:, 3] += 1.0
    other_values, other_returns = critic(states, actions)
    torch.testing.assert_close(other_values, values)
    torch.testing.assert_close(other_returns[:, :, :3], returns[:, :, :3])
    assert ((other_returns - returns)[:, :, 3:].abs() > 1e-12).all()
    torch.testing.assert_close(critic.values(states.reshape(2, 2, 3)).flatten(1), values)
    states += 1.0
    assert ((critic(states, actions)[1] - other_returns).abs() > 1e-12).all()


def test_members_of_the_ensemble_differ_and_the_seed_alone_decides() -> None:
    def made() -> SegmentCritic:
        return SegmentCritic(SegmentCriticConfig(), 3, 2, 6, generator=torch.Generator().manual_seed(5))

    torch.manual_seed(1)
    one = made()
    torch.manual_seed(2)
    for left, right in zip(one.parameters(), made().parameters(), strict=True):
        assert torch.equal(left, right)
    values, _ = one(torch.ones(1, 3), torch.ones(1, 2, 2))
    assert values[0] != values[1]


# ---------------------------------------------------------------------- replay


def test_a_full_replay_forgets_its_oldest_rows() -> None:
    replay = Replay(5)
    for first in range(0, 12, 3):
        replay.add({"x": torch.arange(first, first + 3), "y": torch.ones(3, 2)})
    assert sorted(replay["x"].tolist()) == [7, 8, 9, 10, 11]
    assert replay["y"].shape == (5, 2)
    with pytest.raises(InvalidInputError, match="6 rows"):
        replay.add({"x": torch.arange(6), "y": torch.ones(6, 2)})


@pytest.mark.parametrize("rows", [0, 3, 9])
def test_a_replay_goes_on_from_its_state(rows: int) -> None:
    one, other = Replay(5), Replay(5)
    for row in range(rows):
        one.add({"x": torch.tensor([row])})
    other.load_state_dict(one.state_dict())
    for replay in (one, other):
        replay.add({"x": torch.tensor([100, 101])})
    draws = [replay.draw(20, torch.Generator().manual_seed(0))["x"] for replay in (one, other)]
    assert torch.equal(*draws)
    assert len(one) == len(other) == min(rows + 2, 5)


# ---------------------------------------------------------------------- settings


def test_settings_survive_json() -> None:
    config = small_config()
    assert config_from_dict(load_json(dump_json(config.as_dict()))) == config


def test_any_preset_can_be_learned_off_policy() -> None:
    _, config = choose("hopper-jump-quick", algo="toperl")
    of = choose("hopper-jump-quick")[1]
    assert isinstance(config, OffPolicyConfig)
    assert (config.env_id, config.motion, config.iterations) == (of.env_id, of.motion, of.iterations)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: small_config(replay=ReplayConfig(capacity=4)), "replay.capacity"),
        (lambda: small_config(polyak=0.0), "polyak"),
        (lambda: ReplayConfig(stride=0), "stride"),
        (lambda: ReplayConfig(gamma=1.1), "gamma"),
        (lambda: SegmentCriticConfig(width=10, heads=4), "heads=4"),
        (lambda: SegmentCriticConfig(learning_rate=0.0), "learning_rate"),
        (lambda: SegmentCriticConfig(learning_rate=math.inf), "learning_rate"),
        (lambda: small_config(learning_rate=math.inf), "learning_rate"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change()
