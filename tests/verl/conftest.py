"""One process that plays verl's only worker, and a tiny model on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cpu_verl  # noqa: F401  (before anything that imports verl)
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # gloo under its own name: verl would ask for "cpu:gloo,cpu:gloo" on a platform called cpu.
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{meeting}")
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from actor import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose LM head is its embedding."""
    from actor import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture
def float64() -> Iterator[None]:
    """verl's engine in float64, with `FLOAT64` among its settings."""
    from actor import in_float64

    with in_float64():
        yield
