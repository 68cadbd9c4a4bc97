"""What a sandboxed run costs: time from call to result, and programs a second on the pool.

    python benchmarks/sandbox.py

Measures every backend that works here, beside a plain subprocess of the same interpreter, which contains
nothing. Writes benchmarks/results/sandbox/cost.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from tether.llm.sandbox import Sandbox
from tether.llm.sandbox.backends import BACKENDS, interpreter
from tether.llm.sandbox.trial import try_backend

RESULTS = Path(__file__).parent / "results" / "sandbox"
SINGLE, MANY = 30, 100
PROGRAM = "print(6 * 7)"


def summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(1e3 * statistics.median(seconds), 1),
        "largest_ms": round(1e3 * max(seconds), 1),
    }


def plain() -> dict[str, float]:
    seconds = []
    for _ in range(SINGLE):
        started = time.perf_counter()
        subprocess.run([interpreter(), "-c", PROGRAM], capture_output=True, check=True)
        seconds.append(time.perf_counter() - started)
    return summary(seconds)


def sandboxed(backend: Any) -> dict[str, Any]:
    with Sandbox(workers=1, backend=backend) as sandbox:
        seconds = []
        for _ in range(SINGLE):
            started = time.perf_counter()
            assert sandbox.run(PROGRAM).stdout == "42\n"
            seconds.append(time.perf_counter() - started)
    result: dict[str, Any] = summary(seconds)
    for workers in (1, 2):
        with Sandbox(workers=workers, backend=backend) as sandbox:
            started = time.perf_counter()
            done = sandbox.run_many([PROGRAM] * MANY)
            result[f"programs_per_second_{workers}_workers"] = round(
                MANY / (time.perf_counter() - started), 1
            )
            assert all(one.ok for one in done)
    return result


def main() -> None:
    results: dict[str, Any] = {"subprocess": plain()}
    for backend in BACKENDS:
        reason = try_backend(backend)
        results[backend] = sandboxed(backend) if reason is None else {"unavailable": reason}
    results["host"] = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "root": os.geteuid() == 0}
    print(json.dumps(results, indent=2))
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "cost.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
