"""VESPO: the weight of a sequence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tether.losses import vespo


def _weight(log_w: float, advantage: float, **options: float) -> float:
    """Read off the gradient of a sequence of two tokens whose log-ratios sum to log_w."""
    leaf = torch.full((1, 2), -3.0 + log_w / 2, dtype=torch.float64).requires_grad_()
    old = torch.full((1, 2), -3.0, dtype=torch.float64)
    vespo(
        leaf, old, torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 2), **options
    ).loss.backward()
    assert leaf.grad is not None
    return -2 * leaf.grad[0, 0].item() / advantage


@pytest.mark.parametrize("log_w", [-3.0, -0.5, 0.0, 0.7, 2.0])
def test_the_weight_is_the_papers_kernel(log_w: float) -> None:
    w = math.exp(log_w)
    assert _weight(log_w, 1.5) == pytest.approx(w**2 * math.exp(3 * (1 - w)), rel=1e-12)
    assert _weight(log_w, -1.5) == pytest.approx(w**3 * math.exp(2 * (1 - w)), rel=1e-12)


def test_the_weight_is_bounded_by_its_maximum_at_k_over_lambda() -> None:
    grid = np.linspace(-12, 5, 400)
    for advantage, k, decay in ((1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)):
        largest = (k / decay) ** k * math.exp(decay - k)
        weights = [_weight(log_w, advantage) for log_w in grid]
        assert max(weights) <= largest * (1 + 1e-12)
        assert _weight(math.log(k / decay), advantage) == pytest.approx(largest)


def test_the_product_is_of_the_whole_sequence_and_of_what_counts() -> None:
    """No length normalisation: twice as many tokens of the same drift square W."""
    old = torch.full((1, 5), -3.0, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    result = vespo(old + 0.2, old, torch.ones(1), mask)
    assert result.metrics["ratio_mean"].item() == pytest.approx(math.exp(0.8))


def test_loss_by_hand() -> None:
    new = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    result = vespo(
        new,
        torch.tensor([[-1.5, -2.0]], dtype=torch.float64),
        torch.tensor([2.0], dtype=torch.float64),
        torch.ones(1, 2),
    )
    w = math.exp(0.5)
    assert result.loss.item() == pytest.approx(-(w**2) * math.exp(3 * (1 - w)) * 2 * (-1.0 - 2.0) / 2)


def test_a_token_that_could_not_be_sampled_spoils_nothing() -> None:
    """An engine that reports -inf of what it drew, as half precision does: W is beyond all bounds."""
    leaf = torch.tensor([[-0.5, -3.0], [-0.5, -0.6]], requires_grad=True)
    result = vespo(leaf, torch.tensor([[-0.6, -math.inf], [-0.6, -0.5]]), torch.ones(2), torch.ones(2, 2))
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert gradient[0].tolist() == [0.0, 0.0]
    assert bool((gradient[1] < 0).all())
    assert math.isfinite(result.loss.item())
