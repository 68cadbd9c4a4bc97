"""Work that an accelerator has to do while its host waits for a number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor


class Backlog:
    """What can be asked for now or a little later, kept for when the host has to wait.

    A host that waits for the last thing it asked for leaves its device idle until it has asked for the next:
    milliseconds, where that is a hundred small operations. Here it asks for a copy of its numbers, then for
    what was kept, and waits for the copy alone; the device works on the rest while the host goes on.
    """

    def __init__(self) -> None:
        self._kept: deque[Callable[[], None]] = deque()

    def keep(self, work: Callable[[], None]) -> None:
        """For later; what it holds is let go of once it has been asked for."""
        self._kept.append(work)

    def finish(self) -> None:
        """Ask for all that is kept, in the order in which it came."""
        while self._kept:
            self._kept.popleft()()

    def read(self, numbers: Tensor) -> list[int]:
        """Numbers that are on the device, [n]; what is kept is asked for meanwhile."""
        if self._kept:
            with torch.cuda.device_of(numbers):
                numbers, arrived = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
                arrived.record()
            self.finish()
            arrived.synchronize()
        found: list[int] = numbers.tolist()
        return found
