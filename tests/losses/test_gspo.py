"""GSPO: one ratio a sequence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import oracles
from tether.losses import gspo

OLD = np.full((2, 3), -1.0)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_loss_by_hand() -> None:
    new = torch.tensor([[-0.7, -1.2, -0.8], [-1.3, -1.1, 9.0]], dtype=torch.float64)
    result = gspo(
        new, torch.tensor(OLD), torch.tensor([2.0, -1.0], dtype=torch.float64), MASK,
        clip_ratio_low=0.3, clip_ratio_high=0.05,
    )  # fmt: skip
    # Mean log-ratios .1 and -.2. The first is clipped to 1.05, the second stays e^-.2.
    assert result.loss.item() == pytest.approx((-1.05 * 2 + math.exp(-0.2)) / 2, rel=1e-12)
    assert result.metrics["clipped"].item() == pytest.approx(3 / 5)
    assert result.metrics["ratio_max"].item() == pytest.approx(math.exp(0.1))


def test_the_gradient_is_that_of_the_papers_sequence_objective() -> None:
    """Finite differences of mean_i min(s_i A_i, clip(s_i) A_i), which knows nothing of stopped gradients."""
    new = np.array([[-0.9, -1.2, -0.8], [-1.3, -1.1, -1.0]])
    advantages = np.array([2.0, -1.0])

    def objective(log_probs: np.ndarray) -> float:
        total = 0.0
        for i, length in enumerate((3, 2)):
            s = math.exp(sum(log_probs[i, :length] - OLD[i, :length]) / length)
            total += min(s * advantages[i], min(max(s, 0.7), 1.4) * advantages[i])
        return -total / 2

    leaf = torch.tensor(new).requires_grad_()
    options = {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}
    gspo(leaf, torch.tensor(OLD), torch.tensor(advantages), MASK, **options).loss.backward()
    np.testing.assert_allclose(leaf.grad, oracles.central_differences(objective, new), atol=1e-9)


def test_a_sequence_that_went_too_far_loses_its_gradient_whole_and_alone() -> None:
    leaf = torch.tensor([[-0.5, -1.0, -1.1], [-1.0, -1.0, -1.0]]).requires_grad_()
    gspo(leaf, torch.tensor(OLD).float(), torch.tensor([1.0, 1.0]), MASK).loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == [0, 0, 0]  # even the third token, which became less likely
    np.testing.assert_allclose(leaf.grad[1], [-0.25, -0.25, 0.0], rtol=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_became_impossible_takes_its_sequence_alone(advantage: float) -> None:
    leaf = torch.tensor([[-0.9, -math.inf, -0.8], [-1.3, -1.1, -1.0]]).requires_grad_()
    result = gspo(
        leaf, torch.tensor(OLD).float(), torch.full((2,), advantage), MASK,
        clip_ratio_low=0.3, clip_ratio_high=0.4,
    )  # fmt: skip
    result.loss.backward()
    # s = 0, where the clip holds a sequence that is discouraged at .7; the second's is e^-.2.
    expected = [0.0 if advantage > 0 else -0.7, -advantage * math.exp(-0.2)]
    expected[0] *= advantage
    assert result.loss.item() == pytest.approx(sum(expected) / 2)
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == [0, 0, 0]
    np.testing.assert_allclose(leaf.grad[1, :2], [expected[1] / 4] * 2, rtol=1e-6)


def test_with_an_advantage_a_token_each_token_gets_its_own() -> None:
    leaf = torch.tensor([[-0.9, -1.1, -1.0]], dtype=torch.float64).requires_grad_()  # s = 1
    advantages = torch.tensor([[3.0, -6.0, 0.0]], dtype=torch.float64)
    gspo(
        leaf, torch.tensor(OLD[:1]), advantages, MASK[:1], clip_ratio_low=0.1, clip_ratio_high=0.1
    ).loss.backward()
    np.testing.assert_allclose(leaf.grad, [[-1.0, 2.0, 0.0]], atol=1e-12)
