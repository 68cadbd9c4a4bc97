from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tether.errors import InvalidInputError
from tether.experiments import seed_everything


def draws() -> tuple[float, ...]:
    """Some of everything."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    )


def test_one_seed_gives_one_stream_and_another_seed_another() -> None:
    seed_everything(5)
    first = draws()
    seed_everything(5)
    assert draws() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_the_seed_reaches_each_generator_as_it_is() -> None:
    seed_everything(7)
    assert random.random() == random.Random(7).random()
    assert np.random.rand() == np.random.RandomState(7).rand()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_numpy_cannot_take_is_refused(seed: int) -> None:
    with pytest.raises(InvalidInputError, match=str(seed)):
        seed_everything(seed)
