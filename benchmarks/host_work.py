"""What a GPU does in one loss through an LM head, and what its host asks for and waits for meanwhile.

    python -m benchmarks.host_work                # needs a CUDA device
    python -m benchmarks.host_work --dry-run      # tiny, on a CPU, where no GPU is busy: whether it runs

Forward and backward of `make bench`'s workloads on Qwen3-4B's head, each five times by the clock and once
under PyTorch's profiler. "Busy" is the time in which at least one kernel or copy ran; "operations" are
those, and "waits" the times the host waited for the stream. Adds a line a measurement to
benchmarks/results/bench/host_work.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.bench import contestants
from benchmarks.bench.sections import ALL, CHECKS, FEW
from benchmarks.bench.shapes import GPU, TINY
from benchmarks.bench.timing import seconds
from benchmarks.bench.workload import make_workloads
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

RESULTS = Path(__file__).parent / "results" / "bench" / "host_work.jsonl"
REPEATS = 5
RATES = (FEW, ALL)
CONTESTANTS = ("clip in one pass", "TROLL in one pass", "exact in one pass")


def measure(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Of something that launches kernels on the device."""
    step()  # compiles and allocates
    found: dict[str, Any] = {"milliseconds": [1e3 * seconds(step, device) for _ in range(REPEATS)]}
    if device.type == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - held
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        seconds(step, device)
    on_device = [
        event.time_range
        for event in profiled.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    waits = sum(e.count for e in profiled.key_averages() if e.key == "cudaStreamSynchronize")
    busy = covered((time.start, time.end) for time in on_device) / 1e3
    return {**found, "busy_milliseconds": busy, "operations": len(on_device), "waits": waits}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what spans cover, each moment counted once."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    device = torch.device("cpu" if given.dry_run else "cuda")
    if not given.dry_run and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device here; --dry-run needs none")
    shape = TINY if given.dry_run else GPU[0]
    work = make_workloads(shape, "peaked", RATES, device)
    name = "CPU" if given.dry_run else torch.cuda.get_device_name()
    for rate in RATES:
        for contestant in CONTESTANTS:
            loss, _ = CHECKS[contestant]
            found = measure(contestants.step(loss, work[rate]), device)
            print(
                f"{contestant:20s} {rate:6.1%} outside  {statistics.median(found['milliseconds']):7.1f} ms, "
                f"busy {found['busy_milliseconds']:7.1f}, {found['operations']} operations, "
                f"{found['waits']} waits, {found.get('peak_bytes', 0) / 1e9:.1f} GB",
                flush=True,
            )
            line = {"contestant": contestant, "violating": rate, "head": shape.name, "tokens": shape.tokens}
            with given.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "device": name, "torch": torch.__version__, **found}) + "\n")


if __name__ == "__main__":
    main()
