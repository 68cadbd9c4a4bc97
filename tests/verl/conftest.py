"""One process that plays verl's only worker, and a tiny model on disk."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_ENGINE_DEVICE="cuda",  # verl registers its engines for accelerators only
    VERL_USE_EXTERNAL_MODULES="cpu_platform",
    VERL_LOGGING_LEVEL="ERROR",
    RANK="0",
    WORLD_SIZE="1",
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",  # asked for, never used: the group exists already
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES="",
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl names every engine whose framework is not installed
    import verl.workers.engine  # noqa: F401

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
