"""What an evaluation says of episodes that end early, or never begin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tether.episodic.episodes import Starts
from tether.episodic.evaluate import evaluate_learner, jerk_of_episodes, root_mean_square_jerk
from tether.episodic.learner import Motions
from tether.episodic.sampler import EpisodeSampler


class Still:
    """As much of a learner as an evaluation asks for."""

    def __init__(self, sampler: EpisodeSampler) -> None:
        self.spec = sampler.spec
        self.generator = torch.Generator()

    def act(self, starts: Starts, *, explore: bool = True) -> Motions:
        shape = (len(starts.seeds), self.spec.horizon, self.spec.num_dof)
        return Motions(np.zeros(shape), np.zeros(shape))


def evaluated(sampler: EpisodeSampler, number: int) -> Any:
    return evaluate_learner(Still(sampler), sampler, number)  # type: ignore[arg-type]


def test_the_end_of_an_early_episode_is_no_jerk() -> None:
    """This robot moves evenly; its position after the end is a repetition, not a sudden stop."""
    with EpisodeSampler("misbehaving_envs:test/ends-v0") as sampler:
        result = evaluated(sampler, 2)
    assert result.jerk.tolist() == [0.0, 0.0]


def test_a_motion_that_was_refused_is_not_the_smoothest() -> None:
    with EpisodeSampler("misbehaving_envs:test/well-v0") as sampler:
        execute = sampler.execute
        sampler.execute = lambda *motion: (  # type: ignore[method-assign]
            replace(
                execute(*motion), lengths=np.array([5, 0]), positions=np.arange(12.0).reshape(2, 6, 1) ** 3
            )
        )
        result = evaluated(sampler, 2)
    assert result.jerk[0] == pytest.approx(6.0 / 0.1**3)
    assert np.isnan(result.jerk[1])
    assert result.summary()["jerk_greedy"] == result.jerk[0]


def test_episodes_that_run_to_their_end_have_the_jerk_they_had() -> None:
    positions = np.random.default_rng(0).normal(size=(7, 51, 3))
    whole = root_mean_square_jerk(positions, 0.02)
    assert np.array_equal(jerk_of_episodes(positions, np.full(7, 50), 0.02), whole)
    some = jerk_of_episodes(positions, np.array([50, 20, 50, 3, 2, 0, 50]), 0.02)
    assert np.array_equal(some[[0, 2, 6]], whole[[0, 2, 6]])
    assert some[1] == root_mean_square_jerk(positions[1:2, :21], 0.02)[0]
    assert some[3] == pytest.approx(root_mean_square_jerk(positions[3:4, :4], 0.02)[0])
    assert np.isnan(some[[4, 5]]).all()
    assert np.isnan(jerk_of_episodes(positions[:, :3], np.full(7, 2), 0.02)).all()
