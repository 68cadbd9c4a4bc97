"""GMPO: the geometric mean of clipped ratios."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import oracles
from tether.losses import gmpo

OLD = np.full((2, 3), -1.0)
MASK = torch.tensor([[1, 1, 1], [1, 0, 1]])


def test_the_gradient_is_that_of_the_papers_product() -> None:
    """Finite differences of the equation as it is printed: a product of ratios to the power sgn A."""
    new = np.array([[-0.4, -1.1, -1.9], [-0.2, 7.0, -1.7]])  # log-ratios .6, -.1, -.9 and .8, -, -.7
    advantages = np.array([2.0, -1.5])

    def objective(log_probs: np.ndarray) -> float:
        total = 0.0
        for i, positions in enumerate(([0, 1, 2], [0, 2])):
            sign, product = math.copysign(1, advantages[i]), 1.0
            for t in positions:
                ratio = math.exp(log_probs[i, t] - OLD[i, t])
                clipped = min(max(ratio, math.exp(-0.4)), math.exp(0.4))
                product *= min(ratio**sign, clipped**sign) ** sign
            total += product ** (1 / len(positions)) * advantages[i]
        return -total / 2

    leaf = torch.tensor(new).requires_grad_()
    result = gmpo(leaf, torch.tensor(OLD), torch.tensor(advantages), MASK)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(objective(new), rel=1e-12)
    np.testing.assert_allclose(leaf.grad, oracles.central_differences(objective, new), atol=1e-9)
    # Clipped: .6 of the rewarded, -.7 of the punished sequence. What moved against its push is not.
    assert result.metrics["clipped"].item() == pytest.approx(2 / 5)


def test_a_clipped_token_loses_its_gradient_and_its_neighbours_do_not() -> None:
    leaf = torch.tensor([[-0.4, -1.0, -1.0]], dtype=torch.float64).requires_grad_()
    gmpo(leaf, torch.tensor(OLD[:1]), torch.ones(1).double(), MASK[:1]).loss.backward()
    weight = math.exp(0.4 / 3) / 3
    np.testing.assert_allclose(leaf.grad, [[0.0, -weight, -weight]], rtol=1e-12)


def test_a_token_that_nothing_pushes_is_not_called_clipped() -> None:
    far = torch.tensor(OLD) - 0.9
    for advantage, clipped in ((0.0, 0.0), (-1.0, 1.0), (1.0, 0.0)):
        result = gmpo(far, torch.tensor(OLD), torch.full((2,), advantage), MASK)
        assert result.metrics["clipped"].item() == clipped


def test_sequences_weigh_the_same_whatever_their_length() -> None:
    result = gmpo(torch.tensor(OLD), torch.tensor(OLD), torch.tensor([1.0, 3.0], dtype=torch.float64), MASK)
    assert result.loss.item() == pytest.approx(-2.0)
