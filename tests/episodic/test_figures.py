"""The exploration picture: it draws the motions it is given, and drawing them changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tether.episodic.algorithms import build_learner
from tether.episodic.config import OnPolicyConfig
from tether.episodic.figures import (
    SHOWN_JOINTS,
    MotionSamples,
    exploration_figure,
    sample_motions,
    save_exploration,
)
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.sampler import EpisodeSampler
from tether.errors import InvalidInputError


def motions(joints: int, number: int = 4, scale: float = 1.0) -> MotionSamples:
    times = np.linspace(0.1, 1.0, 10)
    noise = np.random.default_rng(0).normal(size=(number, 10, joints)) * scale
    return MotionSamples(times, noise, noise.mean(axis=0))


def test_every_drawn_motion_and_the_mean_stand_in_the_axes_of_their_joint() -> None:
    before, after = motions(2), motions(2, scale=0.1)
    figure = exploration_figure([("before", before), ("after", after)])
    assert len(figure.axes) == 4
    axes = figure.axes[3]  # second row, second joint
    for line, expected in zip(axes.lines, [*after.sampled, after.mean], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), expected[:, 1])
        np.testing.assert_array_equal(line.get_xdata(), after.times)


def test_rows_share_the_scale_of_a_joint() -> None:
    figure = exploration_figure([("before", motions(1)), ("after", motions(1, scale=0.01))])
    upper, lower = figure.axes
    assert upper.get_ylim() == lower.get_ylim()
    assert upper.get_ylim()[1] >= motions(1).sampled.max()


def test_a_robot_of_many_joints_is_cut_and_the_title_says_so() -> None:
    figure = exploration_figure([("now", motions(SHOWN_JOINTS + 3))], title="arm")
    assert len(figure.axes) == SHOWN_JOINTS
    assert figure.get_suptitle() == f"arm (joints 1 to {SHOWN_JOINTS} of {SHOWN_JOINTS + 3})"


def test_rows_of_different_robots_and_no_rows_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\[1, 2\]"):
        exploration_figure([("a", motions(1)), ("b", motions(2))])
    with pytest.raises(InvalidInputError, match="0 rows"):
        exploration_figure([])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\(3, 5, 2\)"):
        MotionSamples(np.zeros(4), np.zeros((3, 5, 2)), np.zeros((5, 2)))


def test_a_picture_is_a_png_that_holds_more_than_its_ground(tmp_path: Path) -> None:
    path = save_exploration([("before", motions(2))], tmp_path / "new" / "exploration.png")
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert len(set(picture.convert("L").get_flattened_data())) > 10
    assert [file.name for file in path.parent.iterdir()] == ["exploration.png"]


def test_sampled_motions_scatter_around_the_mean_and_leave_the_learners_random_numbers_alone() -> None:
    config = OnPolicyConfig("tether/PointReach-v0", motion=ProDMPConfig(2, 0.5), precision="float64")
    with EpisodeSampler(config.env_id) as sampler:
        start = sampler.reset(seeds=(5,))
        learner = build_learner(config, sampler.spec)
    state = learner.generator.get_state()
    drawn = sample_motions(learner, start, 4000)
    assert torch.equal(state, learner.generator.get_state())
    assert drawn.times[-1] == pytest.approx(learner.spec.duration)
    # A motion is linear in its weights, so the mean of motions is that of the mean; 5 standard errors.
    error = drawn.sampled.std(axis=0) / np.sqrt(4000)
    assert (np.abs(drawn.sampled.mean(axis=0) - drawn.mean) <= 5 * error + 1e-12).all()
    assert drawn.sampled[:, -1].std() > 0.1
    with pytest.raises(InvalidInputError, match="at least 1"):
        sample_motions(learner, start, 0)
