"""The critic's loss: by hand, and by finite differences."""

from __future__ import annotations

import math
from typing import Any

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


@pytest.mark.parametrize("clip_range", [None, 0.5])
@pytest.mark.parametrize("garbage", [1e30, -1e30, math.nan, math.inf, -math.inf])
def test_garbage_under_the_mask_leaks_nowhere(clip_range: float | None, garbage: float) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    outcomes = []
    for fill in (1.0, garbage):
        values, old, returns = (
            torch.where(mask > 0, torch.full((2, 3), fine), fill) for fine in (0.2, 0.0, 1.5)
        )
        result = value_clip(values.requires_grad_(), old, returns, mask, clip_range=clip_range)
        (gradient,) = torch.autograd.grad(result.loss, values)
        outcomes.append((result.loss.item(), gradient.tolist(), result.metrics["clipped"].item()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    values, old, returns = (torch.tensor([[x, 0.1]], dtype=dtype) for x in (0.3, 0.2, 300.0))
    leaf = values.clone().requires_grad_()
    half = value_clip(leaf, old, returns, torch.ones(1, 2))  # 300 squared is no float16
    single = value_clip(values.float(), old.float(), returns.float(), torch.ones(1, 2))
    assert half.loss.dtype == torch.float32
    assert half.loss.item() == single.loss.item()
    half.loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype


@pytest.mark.parametrize("clip_range", [0.0, -1.0, math.nan, "0.5"])
def test_a_range_that_is_not_positive_is_refused(clip_range: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=r"clip_range must be greater than 0, got .* \(0\.5 by default"
    ):
        value_clip(*[torch.ones(1, 2)] * 4, clip_range=clip_range)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidInputError, match="returns"):
        value_clip(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 2))
