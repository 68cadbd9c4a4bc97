"""Paired, interleaved timing: contestants take turns, and only ratios within a turn are compared.

A turn runs every contestant once in order and once in the reverse order, so that a drift of the machine
meets all of them alike (A B B A). One contestant takes part under two names; the ratio of those two (A/A)
says how much of any other ratio is noise.

On a CPU, times are the processor's, on one thread: other processes then disturb them little. On an
accelerator they are the wall's, after its queue has emptied.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios and where 95 % of its bootstrap resamples lie."""

    median: float
    low: float
    high: float


def run_in_turns(contestants: Mapping[str, Callable[[], object]], turns: int, device: torch.device) -> Times:
    """Seconds of each contestant, a value a turn (the mean of its two runs).

    One that does not fit into the device's memory is left out, and that is said.
    """
    contestants = {n: c for n, c in contestants.items() if _fits(n, c, device)}
    times: Times = {name: [] for name in contestants}
    forwards, backwards = list(contestants), list(reversed(contestants))
    for _ in range(turns):
        turn = dict.fromkeys(contestants, 0.0)
        for name in forwards + backwards:
            turn[name] += seconds(contestants[name], device)
        for name, total in turn.items():
            times[name].append(total / 2)
    return times


def _fits(name: str, contestant: Callable[[], object], device: torch.device) -> bool:
    """A first run, which compiles, allocates and loads pages, too."""
    try:
        seconds(contestant, device)
        return True
    except torch.OutOfMemoryError as error:
        print(f"left out: {name} does not fit on the device ({error})", flush=True)
    if device.type != "cpu":  # outside, where the error no longer holds what it had allocated
        torch.accelerator.empty_cache()
    return False


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """What one call takes; what it returns is freed outside."""
    clock = processor_clock if device.type == "cpu" else accelerator_clock
    start = clock()
    result = function()
    spent = clock() - start
    del result
    return spent


def processor_clock() -> float:
    return time.process_time()


def accelerator_clock() -> float:
    torch.accelerator.synchronize()
    return time.perf_counter()


def ratio(times: Times, ours: str, against: str, *, resamples: int = 2000) -> Ratio:
    """Ratio of two contestants' times, turn by turn."""
    pairs = [a / b for a, b in zip(times[ours], times[against], strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(resamples))
    return Ratio(
        statistics.median(pairs), medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]
    )
