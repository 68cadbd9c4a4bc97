"""SAPO: the smooth gate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import oracles
from tether.losses import sapo


def _loss(log_ratio: np.ndarray, advantage: float, **options: float) -> float:
    new = torch.tensor(log_ratio)
    advantages = torch.full((1,), advantage, dtype=torch.float64)
    return sapo(new, torch.zeros_like(new), advantages, torch.ones_like(new), **options).loss.item()


@pytest.mark.parametrize(("advantage", "tau"), [(1.5, 1.0), (-1.5, 1.05)])
def test_the_gradient_is_the_policy_gradient_times_the_slope_of_the_gate(
    advantage: float, tau: float
) -> None:
    """d/dr of the gate is 1 / cosh^2(tau (r - 1) / 2), and dr/dlog p = r."""
    log_ratio = np.array([[-2.0, -0.3, 0.0, 0.4, 1.2]])
    leaf = torch.tensor(log_ratio).requires_grad_()
    result = sapo(
        leaf, torch.zeros(1, 5).double(), torch.full((1,), advantage, dtype=torch.float64), torch.ones(1, 5)
    )
    result.loss.backward()
    ratio = np.exp(log_ratio)
    slope = 1 / np.cosh(tau * (ratio - 1) / 2) ** 2
    np.testing.assert_allclose(leaf.grad, -advantage * ratio * slope / 5, rtol=1e-10)
    assert result.metrics["weight_mean"].item() == pytest.approx(slope.mean())
    differences = oracles.central_differences(lambda x: _loss(x, advantage), log_ratio)
    np.testing.assert_allclose(leaf.grad, differences, atol=1e-9)


def test_an_advantage_of_zero_or_less_takes_the_negative_temperature() -> None:
    ratio = np.log([[2.0]])
    assert _loss(ratio, -1.0, tau_neg=3.0) == pytest.approx(4 / 3 / (1 + math.exp(-3)))
    assert _loss(ratio, 1.0, tau_neg=3.0) == pytest.approx(-4 / (1 + math.exp(-1)))


@pytest.mark.parametrize("log_ratio", [15.0, 19.0, 21.0, 60.0, 500.0])
def test_a_saturated_gate_has_a_gradient_of_zero(log_ratio: float) -> None:
    leaf = torch.tensor([[log_ratio]]).requires_grad_()
    result = sapo(leaf, torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-4.0)
    assert leaf.grad is not None
    assert leaf.grad.item() == 0.0
