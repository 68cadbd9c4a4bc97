"""Motions in a simulation as a robot with limits would run them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.episodic.algorithms import build_learner
from tether.episodic.config import OnPolicyConfig
from tether.episodic.learner import Motions
from tether.episodic.limited_motions import within_limits
from tether.episodic.plans import MotionLimits
from tether.episodic.sampler import EpisodeSampler
from tether.errors import ConfigError

CONFIG = OnPolicyConfig("tether/PointReach-v0", seed=2, num_workers=0)


def assert_same_motions(found: np.ndarray, expected: np.ndarray) -> None:
    """One motion after the other or all at once are summed in another order."""
    wanted = torch.from_numpy(expected)
    atol = SUMMED_ANOTHER_WAY * unit_of(wanted, torch.float64, terms=CONFIG.motion.num_basis + 3)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=atol)


def test_each_motion_keeps_the_limits_or_stays_where_it_begins() -> None:
    with EpisodeSampler(CONFIG.env_id) as sampler:
        learner, starts = build_learner(CONFIG, sampler.spec), sampler.reset(24)
        motions = learner.act(starts)
        dt = sampler.spec.dt
        high = float(np.quantile(motions.positions.max(axis=(1, 2)), 0.7))
        limits = MotionLimits(velocity=float(np.quantile(abs(motions.velocities), 0.9)), position_high=high)
        limited = within_limits(learner, motions, starts, limits, "scale")
        episodes = sampler.execute(limited.positions, limited.velocities)
    assert 0 < limited.refused.sum() < 24
    assert episodes.lengths.min() == sampler.spec.horizon
    kept = ~limited.refused
    assert np.isnan(limited.slowed[~kept]).all()
    assert (limited.slowed[kept] > 1).any()
    assert np.abs(limited.velocities).max() <= limits.velocity * (1 + 1e-9)
    assert limited.positions[kept].max() <= high * (1 + 1e-9)
    still = np.repeat(starts.positions[~kept, None], sampler.spec.horizon, axis=1)
    assert np.array_equal(limited.positions[~kept], still)
    moved = np.diff(limited.positions, axis=1, prepend=starts.positions[:, None])
    assert np.abs(moved).max() <= limits.velocity * dt * (1 + 1e-9)
    # What was within the limits is what it was.
    same = limited.slowed == 1
    assert same.any()
    assert_same_motions(limited.positions[same], motions.positions[same])


def test_motions_without_weights_and_limits_of_another_robot_are_refused() -> None:
    with EpisodeSampler(CONFIG.env_id) as sampler:
        learner, starts = build_learner(CONFIG, sampler.spec), sampler.reset(2)
    motions = learner.act(starts)
    with pytest.raises(ConfigError, match=r"TCE\.act returns motions without their weights"):
        within_limits(
            learner, Motions(motions.positions, motions.velocities), starts, MotionLimits(), "scale"
        )
    with pytest.raises(ConfigError, match="2 degrees of freedom, but velocity has 3 values"):
        within_limits(learner, motions, starts, MotionLimits(velocity=(1.0, 2.0, 3.0)), "scale")


def test_weights_in_half_of_the_precision_mean_the_same_motion() -> None:
    config = replace(CONFIG, precision="float32")
    with EpisodeSampler(config.env_id) as sampler:
        learner, starts = build_learner(config, sampler.spec), sampler.reset(3)
    motions = learner.act(starts)
    assert motions.weights.dtype == torch.float32
    free = within_limits(learner, motions, starts, MotionLimits(velocity=1e6), "refuse")
    assert_same_motions(free.positions, motions.positions)
    assert not free.refused.any()
