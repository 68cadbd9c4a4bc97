"""CISPO: the weight is clipped, the token keeps its gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tether.losses import cispo, ppo_clip


def test_loss_and_gradient_by_hand() -> None:
    old = torch.tensor([[-3.0, -1.0, -1.0]], dtype=torch.float64)
    leaf = torch.tensor([[-1.0, -2.0, -1.0]], dtype=torch.float64).requires_grad_()  # ratios 7.39, .37, 1
    result = cispo(leaf, old, torch.tensor([2.0], dtype=torch.float64), torch.ones(1, 3))
    result.loss.backward()
    low = math.exp(-1)
    assert result.loss.item() == pytest.approx(-2 / 3 * (5 * -1.0 + low * -2.0 + -1.0))
    np.testing.assert_allclose(leaf.grad, [[-2 / 3 * 5, -2 / 3 * low, -2 / 3]], rtol=1e-12)
    assert result.metrics["clipped"].item() == pytest.approx(1 / 3)


def test_a_lower_bound_lifts_small_weights() -> None:
    leaf = torch.tensor([[-2.0]], dtype=torch.float64).requires_grad_()
    cispo(
        leaf, -torch.ones(1, 1).double(), torch.ones(1), torch.ones(1, 1), clip_ratio_low=0.2
    ).loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == pytest.approx(-0.8)


def test_a_token_that_ppo_drops_keeps_a_gradient() -> None:
    old, mask, advantage = torch.tensor([[-2.0]]), torch.ones(1, 1), torch.ones(1)
    gradients = []
    for loss in (ppo_clip, cispo):
        leaf = torch.tensor([[-1.0]]).requires_grad_()
        loss(leaf, old, advantage, mask).loss.backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad.item())
    assert gradients == [0.0, pytest.approx(-math.e)]


def test_a_token_of_no_probability_is_dropped_not_nan() -> None:
    leaf = torch.tensor([[-math.inf, -1.0]]).requires_grad_()
    result = cispo(leaf, -torch.ones(1, 2), torch.ones(1), torch.ones(1, 2))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.5)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[0.0, -0.5]]
