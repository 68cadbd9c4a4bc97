"""What a sandboxed run costs, and whether hostile programs are contained, on every backend that works here.

    python -m benchmarks.sandbox cost       # cost.json: time from call to result, programs a second
    python -m benchmarks.sandbox hostile    # hostile-<backend>.txt: a line a program
    python -m benchmarks.sandbox            # both

The cost stands beside a plain subprocess of the same interpreter, which contains nothing. Hostile programs
that gather memory run one at a time while the machine's available memory is sampled from outside; run them on
a machine with little else to do. Results go to benchmarks/results/sandbox/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.hostile import HOSTILE, Hostile
from benchmarks.hostile.host import MEMORY, Host, escape, host, run
from benchmarks.hostile.watch import Watch

from tether.llm.sandbox import Backend, Sandbox
from tether.llm.sandbox.backends import BACKENDS, interpreter
from tether.llm.sandbox.sandbox import try_backend

RESULTS = Path(__file__).parent / "results" / "sandbox"
SINGLE, MANY = 30, 100
PROGRAM = "print(6 * 7)"
SECONDS = 3.0
BOUND = int(1.25 * MEMORY) + 32 * 2**20
LONGEST = 0.1
"""Bytes above which the machine may hold memory for a program, and seconds for which it may."""
ATTEMPTS = 3
"""Other programs come and go between two samples: what one look ascribes to ours, three must."""


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


def sandboxed(backend: Backend) -> dict[str, Any]:
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
            taken = time.perf_counter() - started
            result[f"programs_per_second_{workers}_workers"] = round(MANY / taken, 1)
            assert all(one.ok for one in done)
    return result


def cost() -> None:
    results: dict[str, Any] = {"subprocess": plain()}
    for backend in BACKENDS:
        reason = try_backend(backend)
        results[backend] = sandboxed(backend) if reason is None else {"unavailable": reason}
    results["host"] = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "root": os.geteuid() == 0}
    print(json.dumps(results, indent=2))
    (RESULTS / "cost.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def line(name: str, hostile: Hostile, sandbox: Sandbox, against: Host) -> tuple[str, bool]:
    """Run one program, watched where it gathers memory: a line of the results, and whether it held."""
    for _ in range(ATTEMPTS):
        with Watch() as watch:
            done = run(sandbox, against, {name: hostile}, SECONDS)[name]
        above = watch.seconds_above(BOUND) if name.startswith("memory") else 0.0
        if above <= LONGEST:
            break
    found = escape(hostile, done, SECONDS)
    told = f"{name:<60} {done.status:<8} {done.seconds:5.2f} s"
    if name.startswith("memory"):
        told += f"  peak {watch.peak() / 2**20:6.0f} MiB, {above:4.2f} s above {BOUND / 2**20:.0f} MiB"
        found = found or (f"held too much for {above:.2f} s" if above > LONGEST else None)
    return told + (f"  NOT CONTAINED: {found}" if found else ""), found is None


def hostile(backend: Backend, only: str) -> bool:
    """Run the hostile programs; say whether all were contained and the host is as it was."""
    programs = {name: one for name, one in HOSTILE.items() if name.startswith(only)}
    reason = try_backend(backend)
    if reason is not None:
        print(f"{backend}: not run, {reason}")
        return True
    header = f"{backend}, {'root' if os.geteuid() == 0 else 'an ordinary user'}, Linux {platform.release()}"
    lines, contained = [f"{header}, limit {MEMORY / 2**20:.0f} MiB, {SECONDS:g} s"], 0
    with tempfile.TemporaryDirectory() as folder, host(Path(folder)) as against:
        with Sandbox(workers=1, backend=backend) as sandbox:
            for name, one in programs.items():
                told, kept = line(name, one, sandbox, against)
                lines.append(told)
                contained += kept
                print(told, flush=True)
        harm = against.harm()
    lines.append(f"contained: {contained} of {len(programs)}; harm to the host: {', '.join(harm) or 'none'}")
    print(lines[-1])
    if only:
        return contained == len(programs) and not harm
    (RESULTS / f"hostile-{backend}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return contained == len(programs) and not harm


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("cost", "hostile"), help="one of the two; else both")
    parser.add_argument("--only", default="", help="hostile programs whose names begin so")
    parser.add_argument("--backend", choices=BACKENDS, help="hostile programs on this one only")
    chosen = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if chosen.what != "hostile":
        cost()
    if chosen.what == "cost":
        return 0
    held = [hostile(backend, chosen.only) for backend in ((chosen.backend,) if chosen.backend else BACKENDS)]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
