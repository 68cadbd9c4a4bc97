"""The critic's loss: by hand, and by finite differences."""

from __future__ import annotations

import pytest
import torch

from tether.errors import InvalidInputError
from tether.losses import value_clip


def test_value_loss_and_clipped_fraction_by_hand() -> None:
    values = torch.tensor([[0.2, 1.0, -1.0, 7.0]], dtype=torch.float64)
    returns = torch.tensor([[1.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0]])
    result = value_clip(values, torch.zeros_like(values), returns, mask, clip_range=0.5)
    # Inside the range: .8^2. Too far towards the target: (.5 - 2)^2. Too far away from it: plain, 2^2.
    assert result.loss.item() == pytest.approx((0.64 + 2.25 + 4.0) / 6)
    assert result.metrics["clipped"].item() == pytest.approx(1 / 3)


def test_gradient_is_zero_where_the_clip_acts_and_the_error_elsewhere() -> None:
    values = torch.tensor([[0.2, 1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([[1.0, 2.0, 1.0]], dtype=torch.float64)
    value_clip(values, torch.zeros(1, 3), returns, torch.ones(1, 3), clip_range=0.5).loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [pytest.approx([-0.8 / 3, 0.0, -2.0 / 3])]


def test_without_a_range_it_is_half_the_squared_error() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(3, 5, generator=generator) > 0.3
    expected = torch.nn.functional.mse_loss(values[mask], returns[mask]) / 2
    result = value_clip(values, old, returns, mask, clip_range=None)
    assert result.loss.item() == pytest.approx(expected.item())
    assert result.metrics["clipped"].item() == 0


def test_targets_and_old_values_get_no_gradient() -> None:
    tensors = [torch.ones(1, 2, requires_grad=True) for _ in range(3)]
    value_clip(*tensors, torch.ones(1, 2)).loss.backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None
    assert tensors[2].grad is None


@pytest.mark.parametrize("clip_range", [0.0, -1.0, float("nan")])
def test_a_range_that_is_not_positive_is_refused(clip_range: float) -> None:
    with pytest.raises(InvalidInputError, match="clip_range must be positive"):
        value_clip(*[torch.ones(1, 2)] * 4, clip_range=clip_range)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidInputError, match="returns"):
        value_clip(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 2))
