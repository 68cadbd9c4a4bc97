"""verl's actor worker for Ray, on CPU. For these tests only; Ray imports it by name on the worker's side."""

from __future__ import annotations

from typing import Any

import cpu_checkpoints  # noqa: F401  (registers rollout and transfer by their names)
import torch
from verl.experimental.separation.engine_workers import DetachActorWorker


class CPUActorWorker(DetachActorWorker):
    """The worker of all trainers, with what `separate_async` adds.

    Meets its peers over gloo first: verl would ask for "cpu:gloo,cpu:gloo", which torch refuses.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.set_num_threads(1)
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
