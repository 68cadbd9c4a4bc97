"""The most memory a stretch of training takes, and which number of a run that is."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MEMORY_METRICS = {
    "device_bytes_max": "tensors on the device",
    "resident_bytes_max": "resident set of the process",
}
"""Under which name a step's peak is logged, and what it measures, relative to usage when training started."""

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Measure the most memory a step uses, relative to usage when measuring began; `peak_memory` makes one.

    Create it once everything is loaded, `restart` it before each step and read `peak` after it. What was
    loaded by then (libraries, weights, data) does not count; gradients, the optimizer's moments, activations,
    logits and whatever a method keeps of the old policy do. In bytes; zero where a step needed nothing more.
    """

    metric: str
    """The name to log it under, one of `MEMORY_METRICS`."""

    def __init__(self) -> None:
        self._origin = self._in_use()

    def restart(self) -> None:
        """Forget earlier peaks."""
        raise NotImplementedError

    def peak(self) -> int:
        """The most since `restart`, beyond the origin."""
        return max(0, self._highest() - self._origin)

    def _in_use(self) -> int:
        raise NotImplementedError

    def _highest(self) -> int:
        raise NotImplementedError


class _Allocated(PeakMemory):
    """Tensors on a CUDA device, as torch's allocator counts them: exact, and without its reserve."""

    metric = "device_bytes_max"

    def __init__(self, device: torch.device) -> None:
        from torch import cuda

        self._device, self._cuda = device, cuda
        super().__init__()

    def restart(self) -> None:
        self._cuda.reset_peak_memory_stats(self._device)

    def _in_use(self) -> int:
        return self._cuda.memory_allocated(self._device)

    def _highest(self) -> int:
        return self._cuda.max_memory_allocated(self._device)


class _Resident(PeakMemory):
    """Pages of this process in main memory, as the Linux kernel counts them.

    torch does not count tensors on a CPU. Pages are blurred by what the C library keeps for reuse: some ten
    megabytes. `restart` resets the kernel's own mark, which other tools read too (``VmHWM``, ``ru_maxrss``).
    """

    metric = "resident_bytes_max"

    def restart(self) -> None:
        _CLEAR.write_text("5")  # "forget the largest resident set", proc(5)

    def _in_use(self) -> int:
        return _from_status("VmRSS")

    def _highest(self) -> int:
        return _from_status("VmHWM")


def peak_memory(device: torch.device | str) -> PeakMemory | None:
    """What measures the memory of training on this device; None where nothing can tell.

    Device memory on CUDA, the process's resident set on a CPU under Linux. Other systems keep no mark that
    can be reset, so there a step cannot be told from the evaluations around it, and nothing is measured.

    >>> peak_memory("mps") is None
    True
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return _Allocated(device)
    if device.type != "cpu":
        return None
    try:
        memory = _Resident()
        memory.restart()
        memory.peak()
    except (OSError, LookupError):  # no such mark
        return None
    return memory


class StepMeter:
    """Measure each step of a training run alone, whatever happens between steps: `begin`, the step, `end`.

    On a CPU the processor time of all threads is measured besides the memory, because other processes disturb
    it less than the wall's.
    """

    def __init__(self, device: torch.device | str) -> None:
        import torch

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


def largest_peak(records: Iterable[Mapping[str, Any]]) -> tuple[str, int] | None:
    """Name and value of a run's largest peak among its lines of metrics; None where none was measured.

    >>> largest_peak([{"step": 1, "resident_bytes_max": 5}, {"step": 2, "resident_bytes_max": 7}])
    ('resident_bytes_max', 7)
    """
    found = [(name, int(record[name])) for record in records for name in MEMORY_METRICS if name in record]
    # A run that moved from one device to another has both; that of the device comes first.
    for name in MEMORY_METRICS:
        values = [value for of, value in found if of == name]
        if values:
            return name, max(values)
    return None


def peak_at_end(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest peak as the end of a run notes it; nothing where none was measured.

    >>> peak_at_end([{"resident_bytes_max": 7}])
    {'peak_memory_bytes': 7, 'peak_memory_of': 'resident set of the process, beyond the start of training'}
    """
    found = largest_peak(records)
    if found is None:
        return {}
    name, value = found
    return {
        "peak_memory_bytes": value,
        "peak_memory_of": f"{MEMORY_METRICS[name]}, beyond the start of training",
    }


def _from_status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(f"{_STATUS} has no {name}.")
    return int(found[1]) * 1024
