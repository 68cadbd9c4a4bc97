"""The most memory a stretch of training takes, and which number of a run that is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

MEMORY_METRICS = {
    "device_bytes_max": "tensors on the device",
    "resident_bytes_max": "resident set of the process",
}
"""Under which name a step's peak is logged, and what it measures, relative to usage when training started."""

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What Linux takes in ``clear_refs`` as "forget the largest resident set" (proc(5))."""


class PeakMemory(ABC):
    """Measure the most memory a step uses, relative to usage when measuring began.

    Create it once everything is loaded, `restart` it before each step and read `peak` after it. What was
    loaded by then (libraries, weights, data) does not count; gradients, the optimizer's moments, activations,
    logits and whatever a method keeps of the old policy do. In bytes; zero where a step needed nothing more.

    `peak_memory` returns the kind that suits a device.
    """

    metric: str
    """The name to log it under, one of `MEMORY_METRICS`."""

    def __init__(self) -> None:
        self._origin = self._in_use()

    @abstractmethod
    def restart(self) -> None:
        """Forget earlier peaks."""

    def peak(self) -> int:
        """The most since `restart`, beyond the origin."""
        return max(0, self._highest() - self._origin)

    @abstractmethod
    def _in_use(self) -> int: ...

    @abstractmethod
    def _highest(self) -> int: ...


class _Allocated(PeakMemory):
    """Tensors on a CUDA device, as torch's allocator counts them: exact, and without its reserve."""

    metric = "device_bytes_max"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        super().__init__()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def _in_use(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def _highest(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class _Resident(PeakMemory):
    """Pages of this process in main memory, as the kernel counts them.

    torch does not count tensors on a CPU. Pages are what a machine runs out of, but they are blurred by what
    the C library keeps for reuse: some ten megabytes, nothing beside the logits of a real vocabulary.

    `restart` resets the kernel's own mark, so that other tools, too, read the peak since the last step
    (``VmHWM``, ``ru_maxrss``).
    """

    metric = "resident_bytes_max"

    def restart(self) -> None:
        _CLEAR.write_text(_RESET_PEAK)

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
    >>> memory = peak_memory("cpu")
    >>> if memory is not None:
    ...     memory.restart()
    ...     block = torch.ones(16 * 2**20)
    ...     peak = memory.peak()  # 64 MB, less what the rest of the process gives back meanwhile
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _Allocated(device)
    if device.type != "cpu" or not _can_reset():
        return None
    return _Resident()


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


def _can_reset() -> bool:
    """Whether the kernel keeps a mark of the largest resident set and lets this process reset it."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
        _from_status("VmHWM")
    except (OSError, LookupError):
        return False
    return True


def _from_status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(f"{_STATUS} has no {name}.")
    return int(found[1]) * 1024
