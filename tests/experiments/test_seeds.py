from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tether.errors import CheckpointError, InvalidInputError
from tether.experiments import RandomState, seed_everything


def draws() -> tuple[float, ...]:
    """Some of everything, Gaussians too: those keep a second value in stock."""
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


def test_a_state_saved_between_two_gaussians_continues_exactly(tmp_path: Path) -> None:
    seed_everything(1)
    draws()  # an odd number of Gaussians: one is in stock in each generator
    path = RandomState.capture().save(tmp_path / "random.pt")
    expected = draws() + draws()
    seed_everything(2)
    draws()
    RandomState.load(path).restore()
    assert draws() + draws() == expected


def test_the_file_holds_no_pickled_code(tmp_path: Path) -> None:
    path = RandomState.capture().save(tmp_path / "random.pt")
    assert set(torch.load(path, weights_only=True)) == {"python", "numpy", "torch_cpu", "torch_cuda"}


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pt"):
        RandomState.load(tmp_path / "none.pt")
    (tmp_path / "bad.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"bad\.pt is not a saved random state"):
        RandomState.load(tmp_path / "bad.pt")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"other\.pt is not a saved random state"):
        RandomState.load(tmp_path / "other.pt")


def test_another_number_of_devices_is_refused() -> None:
    state = RandomState.capture()
    more = RandomState(state.python, state.numpy, state.torch_cpu, [*state.torch_cuda, torch.get_rng_state()])
    with pytest.raises(CheckpointError, match="CUDA devices"):
        more.restore()
