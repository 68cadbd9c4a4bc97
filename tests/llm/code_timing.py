"""How the time a function takes grows with its argument."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

_REPEATS = 5
_LEAST = 1e-3


def growth(function: Callable[[Any], object], small: Any, large: Any) -> float:
    """CPU time on `large` as a multiple of that on `small`, from the best of a few alternating runs.

    Times below a millisecond count as one, where clocks and caches, not the work, decide.
    """
    best = [float("inf"), float("inf")]
    gc.disable()
    try:
        for _ in range(_REPEATS):
            for index, argument in enumerate((small, large)):
                started = time.thread_time()
                function(argument)
                best[index] = min(best[index], time.thread_time() - started)
    finally:
        gc.enable()
    return max(best[1], _LEAST) / max(best[0], _LEAST)
