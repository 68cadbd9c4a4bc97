"""The pieces, in the order they run: a function each, and the longest it may take."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.outcome import Figure
from benchmarks.gpu_check.plan import Plan

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Piece:
    """One part of the check."""

    run: Callable[[Plan], list[Figure]]
    minutes: float
    """All together stay below half an hour."""


def _kernels(plan: Plan) -> list[Figure]:
    from benchmarks.gpu_check import kernels

    return kernels.run(plan)


def _bench(plan: Plan) -> list[Figure]:
    """`make bench`'s tables of the device: each ratio with its bar, of the sections that ended well."""
    began, figures, lost = time.monotonic(), [], []
    for section in plan.bench:
        findings, why = _section(plan, section, plan.bench_seconds - (time.monotonic() - began))
        lost += [f"{section} ({why})"] if why else []
        figures += [
            Figure(f"{f['ours']} / {f['against']}, {f['where']}", f["ratio"]["median"], f["limit"])
            for f in findings
        ]
    words = f": {', '.join(lost)}" if lost else ""
    return [Figure(f"sections that failed or had no time{words}", len(lost), 0), *figures]


def _section(plan: Plan, section: str, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Its findings, or why there are none; in a process of its own."""
    if seconds <= 0:
        return [], "no time"
    options = ["--quick"] if plan.dry else ["--device", plan.device.type]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.bench", "--only", section, "--output", folder, *options]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return [], f"not done after {seconds:.0f} s"
        if done.returncode != 0:
            return [], (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        sections = json.loads((Path(folder) / f"{plan.device.type}.json").read_text())["sections"]
    return sections[section]["findings"], ""


def _training(plan: Plan) -> list[Figure]:
    from benchmarks.gpu_check import training

    return training.run(plan)


def _vllm(plan: Plan) -> list[Figure]:
    from benchmarks.gpu_check import training

    return training.run_with_vllm(plan)


def _two_devices(plan: Plan) -> list[Figure]:
    from benchmarks.gpu_check import two_devices

    return two_devices.run(plan)


PIECES = {
    "kernels": Piece(_kernels, 5),
    "training": Piece(_training, 6),
    "vllm": Piece(_vllm, 4),
    "two devices": Piece(_two_devices, 2),
    "bench": Piece(_bench, 12),
}
