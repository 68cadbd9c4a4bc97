"""TOPERL: what the critic is taught, critic, replay; that it learns, and resumes exactly."""

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
from tether.episodic.off_policy import TOPERL
from tether.episodic.policy import PolicyConfig, WeightDistribution
from tether.episodic.presets import choose
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.replay import Replay
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.segment_critic import SegmentCritic, SegmentCriticConfig
from tether.episodic.train import train
from tether.errors import ConfigError, InvalidInputError
from tether.experiments.files import dump_json, load_json

ENV = "tether/PointReach-v0"
EPS = torch.finfo(torch.float64).eps


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
        replay=ReplayConfig(capacity=200, batch=16, pieces=5, segments=3),
        trust_region=TrustRegionConfig(0.1, 0.02),
        learning_rate=3e-3,
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
        replay=ReplayConfig(capacity=20, batch=8, pieces=5, segments=3),
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


def test_an_episode_is_read_in_pieces(sampler: EpisodeSampler) -> None:
    """50 steps in 4 pieces."""
    learner = build(small_config(precision="float64", replay=ReplayConfig(pieces=4)), sampler)
    motions = learner.act(sampler.reset(2))
    episodes = sampler.execute(motions.positions, motions.velocities)
    rewards = np.random.default_rng(0).normal(size=episodes.rewards.shape)
    learner.observe(motions, replace(episodes, rewards=rewards))
    assert learner.steps.tolist() == [0, 12, 25, 37, 50]
    seen = learner.replay
    expected = [[row[0:12].sum(), row[12:25].sum(), row[25:37].sum(), row[37:50].sum()] for row in rewards]
    torch.testing.assert_close(seen["rewards"], torch.tensor(expected, dtype=torch.float64))
    np.testing.assert_array_equal(seen["actions"], motions.positions[:, [11, 24, 36, 49]])
    np.testing.assert_array_equal(seen["states"][..., :-1], episodes.observations[:, [0, 12, 25, 37]])
    np.testing.assert_allclose(seen["states"][0, :, -1], sampler.spec.dt * np.array([0, 12, 25, 37]))


def test_no_more_pieces_than_steps(sampler: EpisodeSampler) -> None:
    learner = build(small_config(replay=ReplayConfig(pieces=1000)), sampler)
    assert learner.steps.tolist() == list(range(51))


def test_the_critic_is_taught_what_each_beginning_of_a_segment_earned(
    sampler: EpisodeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build(small_config(precision="float64"), sampler)
    observed(learner, sampler)
    drawn = {name: learner.replay[name][:3] for name in ("states", "actions", "rewards")}
    segments = torch.tensor([[1, 2], [3, 4]])
    monkeypatch.setattr(learner, "_draw", lambda: drawn)
    monkeypatch.setattr(learner, "_cut", lambda: segments)
    read: list[tuple[torch.Tensor, torch.Tensor]] = []
    learner.critic.register_forward_hook(lambda _, given, found: read.append((*given, found)))  # type: ignore
    loss = learner._fit_critic()["critic_loss"]
    ((states, actions, found),) = read
    errors = []
    scaled = learner._scaled(drawn["rewards"])
    for row, (episode, first) in enumerate((episode, first) for episode in range(3) for first in (1, 3)):
        expected_state = learner.state_statistics(drawn["states"][episode, first])
        torch.testing.assert_close(states[row], expected_state)
        for i in range(2):
            expected_action = learner.action_statistics(drawn["actions"][episode, first + i])
            torch.testing.assert_close(actions[row, i], expected_action)
            errors.append(found[row, i] - scaled[episode, first : first + i + 1].sum())
    # A mean of twelve squares of two terms each, all rounded.
    assert loss == pytest.approx(torch.stack(errors).square().mean().item(), rel=16 * EPS)


def test_the_policy_is_judged_by_the_motions_that_the_robot_would_be_asked_for(
    sampler: EpisodeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise, before the first step, the critic reads the mean motions from the replay's starts."""
    learner = build(small_config(precision="float64"), sampler)
    starts = sampler.reset(4)
    motions = learner.act(starts, explore=False)
    learner.observe(motions, sampler.execute(motions.positions, motions.velocities))
    monkeypatch.setattr(learner, "_draw", lambda: learner.replay.state_dict()["columns"])
    monkeypatch.setattr(WeightDistribution, "weights", lambda self, _: self.mean)
    read: list[tuple[torch.Tensor, torch.Tensor]] = []
    learner.critic.register_forward_hook(lambda _, given, found: read.append(given))
    learner._improve_policy(learner.policy, 0.0)
    ((states, actions),) = read
    torch.testing.assert_close(states, learner.state_statistics(learner.replay["states"][:, 0]))
    # Positions below 1 are sums of five products; the statistics divide their roundings by a small deviation.
    of = learner.action_statistics
    smallest = (of.squared_deviations / of.count).sqrt().min().item()
    torch.testing.assert_close(actions, of(learner.replay["actions"]), atol=8 * EPS / smallest, rtol=0)


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


@pytest.mark.parametrize("best", [0.0, 0.25, 0.5, 1.0])
def test_a_share_of_what_is_drawn_is_of_the_best_tenth(best: float, sampler: EpisodeSampler) -> None:
    replay = ReplayConfig(capacity=200, batch=400, pieces=5, best=best)
    learner = build(small_config(replay=replay), sampler)
    earned = torch.randperm(100, generator=torch.Generator().manual_seed(0)).float()
    learner.replay.add({"rewards": earned[:, None] * torch.ones(5) / 5, "earned": earned})
    drawn, of_all = learner._draw()["earned"], round(400 * (1 - best))
    assert best == 0 or (drawn[of_all:].unique() == torch.arange(90, 100)).all()
    assert best == 1 or len(drawn[:of_all].unique()) > 60


def test_a_few_episodes_have_a_best_one(sampler: EpisodeSampler) -> None:
    learner = build(small_config(replay=ReplayConfig(batch=10, pieces=5, best=1.0)), sampler)
    learner.replay.add({"rewards": torch.tensor([[1.0], [3.0], [2.0]]).expand(3, 5)})
    assert (learner._draw()["rewards"] == 3.0).all()


@pytest.mark.parametrize("number", range(20))
def test_segments_lie_in_the_episode_and_do_not_overlap(number: int, sampler: EpisodeSampler) -> None:
    learner = build(small_config(replay=ReplayConfig(pieces=8, segments=25)), sampler)
    learner.generator.manual_seed(number)
    segments = learner._cut()
    length, pieces = segments.shape[1], segments.flatten().tolist()
    assert pieces == list(range(pieces[0], pieces[-1] + 1))
    assert 0 <= pieces[0] < length
    assert learner.pieces - length <= pieces[-1] < learner.pieces


# ---------------------------------------------------------------------- critic


def test_the_critic_does_not_look_ahead() -> None:
    generator = torch.Generator().manual_seed(0)
    critic = SegmentCritic(SegmentCriticConfig(), 3, 2, 6, generator=generator, dtype=torch.float64)
    states = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    actions = torch.randn(4, 6, 2, dtype=torch.float64, generator=generator)
    returns = critic(states, actions)
    actions[:, 3] += 1.0
    changed = critic(states, actions)
    torch.testing.assert_close(changed[:, :3], returns[:, :3])
    assert ((changed - returns)[:, 3:].abs() > 1e-12).all()
    states += 1.0
    assert ((critic(states, actions) - changed).abs() > 1e-12).all()


def test_the_seed_alone_decides_how_a_critic_begins() -> None:
    def made() -> SegmentCritic:
        return SegmentCritic(SegmentCriticConfig(), 3, 2, 6, generator=torch.Generator().manual_seed(5))

    torch.manual_seed(1)
    one = made()
    torch.manual_seed(2)
    for left, right in zip(one.parameters(), made().parameters(), strict=True):
        assert torch.equal(left, right)


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
        (lambda: small_config(epochs=0), "epochs"),
        (lambda: small_config(least_noise=1.5), "least_noise"),
        (lambda: ReplayConfig(pieces=0), "pieces"),
        (lambda: SegmentCriticConfig(width=10, heads=4), "heads=4"),
        (lambda: SegmentCriticConfig(learning_rate=0.0), "learning_rate"),
        (lambda: SegmentCriticConfig(learning_rate=math.inf), "learning_rate"),
        (lambda: small_config(learning_rate=math.inf), "learning_rate"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change()
