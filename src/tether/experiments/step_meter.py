"""What one training step takes of the machine."""

from __future__ import annotations

import time

import torch

from tether.experiments.peak_memory import peak_memory


class StepMeter:
    """Measure each step of a training run alone, whatever happens between steps.

    Call `begin` and `end` around a step. On a CPU the processor time of all threads is measured besides the
    memory, because other processes disturb it less than the wall's.

    >>> meter = StepMeter("cpu")
    >>> meter.begin()
    >>> total = sum(range(10**6))
    >>> meter.end()["processor_seconds"] > 0
    True
    """

    def __init__(self, device: torch.device | str) -> None:
        self._memory = peak_memory(device)
        self._on_cpu = torch.device(device).type == "cpu"
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        if self._memory is not None:
            self._memory.restart()
        self._began = time.process_time()

    def end(self) -> dict[str, float]:
        """What the step took, as metrics: bytes (see `MEMORY_METRICS`) and seconds of all threads."""
        found: dict[str, float] = {}
        if self._on_cpu:
            found["processor_seconds"] = time.process_time() - self._began
        if self._memory is not None:
            found[self._memory.metric] = self._memory.peak()
        return found
