"""Segment likelihoods and advantages against Monte Carlo, torch.distributions and hand numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tether.episodic.prodmp import ProDMP, ProDMPConfig
from tether.episodic.segments import (
    gae_returns,
    normalised,
    segment_advantages,
    segment_log_probs,
    segment_points,
)
from tether.errors import ConfigError, InvalidInputError

F64 = torch.float64


def setup_motion(seed: int = 0) -> tuple[ProDMP, Tensor, Tensor, Tensor, Tensor]:
    """A motion, the basis of three pairs, means [4, W], a factor [W, W] and noise [4, W]."""
    motion = ProDMP(ProDMPConfig(num_basis=3, tau=1.0), num_dof=2)
    generator = torch.Generator().manual_seed(seed)
    size = motion.num_weights
    points = torch.tensor([10, 40, 70, 100])
    basis = motion.basis(np.arange(1, 121) * 0.01).positions
    pair_basis = torch.stack((basis[points[:-1]], basis[points[1:]]), 1)
    root = torch.randn(size, size, generator=generator, dtype=F64) / size
    factor = torch.linalg.cholesky(root @ root.mT + 0.2 * torch.eye(size, dtype=F64))
    mean = torch.randn(4, size, generator=generator, dtype=F64)
    noise = torch.randn(4, size, generator=generator, dtype=F64)
    return motion, pair_basis, mean, factor, noise


def full_basis(pair: Tensor, num_dof: int) -> Tensor:
    """The matrix [2 D, W] from weights to both positions, written out entry by entry."""
    ends, size = pair.shape
    matrix = torch.zeros(ends * num_dof, num_dof * size, dtype=pair.dtype)
    for end in range(ends):
        for dof in range(num_dof):
            matrix[end * num_dof + dof, dof * size : (dof + 1) * size] = pair[end]
    return matrix


def test_likelihood_equals_the_multivariate_normal_of_the_two_positions() -> None:
    motion, pair_basis, mean, factor, noise = setup_motion()
    weights = mean + noise @ factor.mT
    ours = segment_log_probs(weights, mean, factor, pair_basis, motion.num_dof)
    matrices = [full_basis(pair, motion.num_dof) for pair in pair_basis]
    covariances = [matrix @ factor @ factor.mT @ matrix.mT for matrix in matrices]
    ridge = 1e-4 * max(covariance.diagonal().max() for covariance in covariances)
    for s, (matrix, covariance) in enumerate(zip(matrices, covariances, strict=True)):
        normal = torch.distributions.MultivariateNormal(
            mean @ matrix.mT, covariance + ridge * torch.eye(len(covariance), dtype=F64)
        )
        assert torch.allclose(ours[:, s], normal.log_prob(weights @ matrix.mT), atol=1e-9)


def test_pair_covariance_is_that_of_sampled_trajectories() -> None:
    """Monte Carlo through the whole motion, boundary condition included."""
    motion, pair_basis, mean, factor, _ = setup_motion()
    generator = torch.Generator().manual_seed(7)
    draws = mean[0] + torch.randn(200_000, motion.num_weights, generator=generator, dtype=F64) @ factor.mT
    start = torch.tensor([0.3, -0.8], dtype=F64)
    positions, _ = motion.trajectory(draws, start, -start, [0.41, 0.71])  # the second pair's times
    sampled = torch.cov(positions.flatten(1).mT)
    matrix = full_basis(pair_basis[1], motion.num_dof)
    expected = matrix @ factor @ factor.mT @ matrix.mT
    assert (sampled - expected).abs().max() < 0.01 * expected.diagonal().max()


def test_contextual_covariances_equal_one_by_one_evaluation() -> None:
    motion, pair_basis, mean, factor, noise = setup_motion()
    factors = torch.stack([factor * scale for scale in (1.0, 1.0, 1.0, 1.0)])
    weights = mean + noise @ factor.mT
    shared = segment_log_probs(weights, mean, factor, pair_basis, motion.num_dof)
    contextual = segment_log_probs(weights, mean, factors, pair_basis, motion.num_dof)
    assert torch.allclose(shared, contextual, atol=1e-10)
    wider = segment_log_probs(weights, mean, 2 * factors, pair_basis, motion.num_dof)
    one = segment_log_probs(weights, mean, 2 * factor, pair_basis, motion.num_dof)
    assert torch.allclose(wider, one, atol=1e-10)
    assert not torch.allclose(wider, contextual)


def test_likelihood_gradient_is_that_of_finite_differences() -> None:
    """The regularisation is a constant to the gradient, so it is held fixed by a larger pair."""
    motion, pair_basis, mean, factor, noise = setup_motion()
    weights = (mean + noise @ factor.mT).detach()

    def likelihood(mean: Tensor) -> Tensor:
        return segment_log_probs(weights, mean, factor, pair_basis, motion.num_dof)

    assert torch.autograd.gradcheck(likelihood, (mean.requires_grad_(),))


def test_advantages_of_a_hand_computed_example() -> None:
    """Two episodes of six steps cut at 1, 3 and 5, gamma 1/2: every term written out."""
    rewards = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 0.0, 0.0, 0.0, 0.0, 8.0]])
    values = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]])
    points = torch.tensor([1, 3, 5])
    ours = segment_advantages(rewards, values, points, gamma=0.5)
    expected = [
        [2 + 0.5 * 3 + 0.25 * 6 - 8, 4 + 0.5 * 5 + 0.25 * 4 - 6],
        [0.25 * 1 - 1, 0.25 * 2 - 1],
    ]
    assert ours.tolist() == expected
    whole = segment_advantages(rewards, values, points, gamma=0.5, include_last_reward=True)
    expected[0][1] = 4 + 0.5 * 5 + 0.25 * 6 - 6
    expected[1][1] = 0.25 * 8 - 1
    assert whole.tolist() == expected


def test_the_last_reward_is_in_no_segment_unless_asked_for() -> None:
    """Whatever the offset: the largest one ends the last segment at the last step, before its reward."""
    horizon = 100
    rewards = torch.zeros(1, horizon)
    rewards[0, -1] = 1.0
    values = torch.zeros(1, horizon)
    for offset in range(4):
        points = segment_points(horizon, 25, offset)
        assert not segment_advantages(rewards, values, points).any()
        last = segment_advantages(rewards, values, points, include_last_reward=True)
        assert last[0].tolist() == [0.0] * 23 + [1.0]


def test_points_are_equally_spaced_and_every_step_after_the_first_is_some_offsets_point() -> None:
    for horizon in (500, 250, 100, 300):
        spacing = horizon // 25
        cuts = [segment_points(horizon, 25, offset) for offset in range(spacing)]
        assert all(len(points) == 25 and (points.diff() == spacing).all() for points in cuts)
        assert sorted(torch.cat(cuts).tolist()) == list(range(25 * spacing))


@pytest.mark.parametrize(("horizon", "points"), [(49, 25), (99, 25), (40, 25), (7, 3)])
def test_no_part_of_a_motion_is_left_out_where_the_points_do_not_divide_its_steps(
    horizon: int, points: int
) -> None:
    spacing = horizon // points
    for offset in range(spacing):
        cuts = segment_points(horizon, points, offset)
        assert len(cuts) == points
        assert set(cuts.diff().tolist()) <= {spacing, spacing + 1}
        assert 0 <= horizon - 1 - int(cuts[-1]) <= spacing


def test_discounts_have_the_precision_of_the_rewards() -> None:
    """gamma to the power of an integer tensor would be float32."""
    rewards = torch.zeros(1, 9, dtype=F64)
    rewards[0, 7] = 1.0
    advantage = segment_advantages(rewards, 0 * rewards, torch.tensor([0, 8]), gamma=0.99)
    assert advantage.item() == pytest.approx(0.99**7, rel=1e-15)


def test_critic_targets_of_a_hand_computed_example() -> None:
    """delta = (1 + 4 - 2, 3 + 0 - 4) = (3, -1); advantages (3 - 1/2, -1); plus values."""
    rewards, values = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 4.0]])
    assert gae_returns(rewards, values, gae_lambda=0.5).tolist() == [[4.5, 3.0]]


def test_critic_targets_at_both_ends_of_lambda() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(3, 8, generator=generator, dtype=F64)
    values = torch.randn(3, 8, generator=generator, dtype=F64)
    to_go = rewards.flip(-1).cumsum(-1).flip(-1)
    assert torch.allclose(gae_returns(rewards, values, gae_lambda=1.0), to_go)
    following = torch.cat((values[:, 1:], torch.zeros(3, 1, dtype=F64)), 1)
    assert torch.allclose(gae_returns(rewards, values, gae_lambda=0.0), rewards + following)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("value", [1000.1, -437.3, 0.3, 1e-3, 0.0])
@pytest.mark.parametrize("number", [2, 16, 152 * 24])
def test_episodes_that_earned_alike_have_no_advantage(dtype: torch.dtype, value: float, number: int) -> None:
    equal = torch.full((number,), value, dtype=dtype)
    assert not normalised(equal).any()
    equal[0] += 1 + abs(value)
    assert normalised(equal).std().item() == pytest.approx(1.0, rel=1e-3)


def test_normalised_advantages_survive_a_single_episode() -> None:
    assert normalised(torch.tensor([5.0])).tolist() == [0.0]


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="100 steps is cut at 2 to 100 points, got 101"):
        segment_points(100, 101, 0)
    with pytest.raises(ConfigError, match=r"offset must lie in \[0, 4\).*got 4"):
        segment_points(100, 25, 4)
    rewards = torch.zeros(2, 5)
    with pytest.raises(InvalidInputError, match=r"\(2, 5\), \(2, 6\)"):
        segment_advantages(rewards, torch.zeros(2, 6), torch.tensor([0, 2]))
    with pytest.raises(InvalidInputError, match="increasing"):
        segment_advantages(rewards, rewards, torch.tensor([2, 2]))
    with pytest.raises(InvalidInputError, match=r"points must lie in \[0, 5\)"):
        segment_advantages(rewards, rewards, torch.tensor([0, 5]))
    with pytest.raises(InvalidInputError, match=r"\(2, 5\) and \(3, 4\)"):
        gae_returns(rewards, torch.zeros(3, 4))
    with pytest.raises(InvalidInputError, match="pair_basis"):
        segment_log_probs(torch.zeros(2, 8), torch.zeros(2, 8), torch.eye(8), torch.zeros(3, 2, 3), 2)
