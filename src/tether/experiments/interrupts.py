"""Ctrl-C and SIGTERM while training: a request to save and stop, before they do what they always do."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Notes the first Ctrl-C or SIGTERM; the second interrupts at once.

    Args:
        stop: called when one is noted, to say and do what there is to be done.

    Only the main thread is told of signals; in another this notes none, and nowhere those that are ignored.

    >>> with Interrupts(lambda: print("Stopping after this iteration.")) as interrupts:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     interrupts.noted == signal.SIGTERM
    Stopping after this iteration.
    True
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.noted: int | None = None
        self._stop = stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that Python did not set, and cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def pass_on(self) -> None:
        """Let the noted signal do what it would have done."""
        self.__exit__()
        number, self.noted = self.noted, None
        if number is not None:
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.__exit__()
        self.noted = number
        self._stop()
