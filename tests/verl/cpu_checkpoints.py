"""Weights from verl's trainer to rollout servers of their own, by a file. For these tests only.

verl's transfers are for accelerators (NCCL and the like); this one is in its registry of checkpoint engines.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import cpu_rollout  # noqa: F401  (registers the rollout by its name)
import torch
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("cpu")
class FileCheckpointEngine(CheckpointEngine):
    """The first worker, a trainer, names the file; it writes, and every rollout reads."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._file = Path()

    def prepare(self) -> dict[str, Any]:
        return {"folder": tempfile.mkdtemp(prefix="weights")}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        folder = metadata[0]["folder"]
        return {"folder": [folder] * actor_wg_world_size}, {"folder": [folder] * rollout_world_size}

    def init_process_group(self, folder: str) -> None:
        self._file = Path(folder, "weights.safetensors")

    def finalize(self) -> None:
        self._file.unlink(missing_ok=True)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        copies = {name: value.detach().cpu().contiguous().clone() for name, value in weights}
        unfinished = self._file.with_suffix(".part")
        save_file(copies, unfinished)
        unfinished.rename(self._file)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while not self._file.exists():
            await asyncio.sleep(0.02)
        for name, value in load_file(self._file).items():
            yield name, value
