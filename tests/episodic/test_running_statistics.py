"""Running statistics against numpy over everything seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tether.episodic.statistics import RunningStatistics
from tether.errors import InvalidInputError


def test_batches_of_any_size_give_the_moments_of_all_rows_together() -> None:
    rows = np.random.default_rng(0).normal(1e6, 3.0, size=(200, 4))
    statistics = RunningStatistics(4)
    for part in np.split(rows, [1, 7, 120]):
        statistics.update(torch.from_numpy(part))
    expected = (rows - rows.mean(0)) / rows.std(0)
    assert np.abs(statistics(torch.from_numpy(rows)).numpy() - expected).max() < 1e-6


def test_a_constant_feature_passes_as_zero_and_does_not_explode() -> None:
    statistics = RunningStatistics(2)
    statistics.update(torch.tensor([[5.0, 1.0], [5.0, 2.0]]))
    assert statistics(torch.tensor([[5.0, 1.5]])).tolist() == [[0.0, 0.0]]


def test_far_values_are_clipped() -> None:
    statistics = RunningStatistics(1, clip=3.0)
    statistics.update(torch.tensor([[0.0], [2.0]]))
    assert statistics(torch.tensor([[100.0], [-100.0]])).tolist() == [[3.0], [-3.0]]


def test_invert_undoes_the_normalisation() -> None:
    statistics = RunningStatistics(1, clip=math.inf)
    rows = torch.tensor([[1.0], [4.0], [10.0]], dtype=torch.float64)
    assert torch.equal(statistics.invert(rows), rows)
    statistics.update(rows)
    assert torch.allclose(statistics.invert(statistics(rows * 7)), rows * 7)


def test_state_survives_saving() -> None:
    statistics, other = RunningStatistics(3), RunningStatistics(3)
    statistics.update(torch.randn(9, 3, generator=torch.Generator().manual_seed(0)))
    other.load_state_dict(statistics.state_dict())
    probe = torch.ones(1, 3)
    assert torch.equal(other(probe), statistics(probe))


def test_refuses_rows_that_would_poison_it() -> None:
    statistics = RunningStatistics(2)
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        statistics.update(torch.tensor([[1.0, math.nan]]))
    with pytest.raises(InvalidInputError, match=r"Rows must be \[..., 2\].*\(4, 3\)"):
        statistics.update(torch.zeros(4, 3))
