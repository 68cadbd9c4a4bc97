"""Whether the time a function takes is linear in its argument's length."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIMES, REPEATS = 8, 5
# A quadratic reader takes TIMES times longer still. Even 100,000 million comparisons a second would not be
# enough to compare half the pairs of 64,000 letters in LEAST_SECONDS.
MOST, LEAST_SECONDS = 1.5 * TIMES, 2e-2


def grows_linearly(function: Callable[[T], object], make: Callable[[int], T], size: int) -> bool:
    """Whether `make(TIMES * size)` costs less than MOST times the CPU time of `make(size)`.

    The longer argument needs 64,000 letters or more, for the reason above.
    """
    short, long = make(size), make(TIMES * size)
    if _seconds(function, long) < LEAST_SECONDS:
        return True
    for _ in range(REPEATS):  # one good pair is enough: no chance makes a quadratic reader fast
        slow = min(_seconds(function, long) for _ in range(2))
        if slow < MOST * min(_seconds(function, short) for _ in range(2)):
            return True
    return False


def _seconds(function: Callable[[T], object], argument: T) -> float:
    gc.disable()  # a collection walks whatever else the process holds
    try:
        started = time.process_time()  # of this process alone: what else the machine does is no growth
        function(argument)
        return time.process_time() - started
    finally:
        gc.enable()
