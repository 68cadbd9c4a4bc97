"""How long do the published budgets take? Iterations of each robot task, sampling and update apart.

    python benchmarks/robot_speed.py
    python benchmarks/robot_speed.py --against ../before --rounds 3

The presets of the long runs, and Hopper Jump's published one in float32 with a critic on every fifth state,
with two simulators and motions that are small and smooth. With --against, a folder with another version of
the repository, both are measured in turn.

The bars are of the wall clock on two cores with nothing else to do. On a machine that others use as well, of
which each case says how much, it tells little; the processor time beside it says more, where it is compared
with that of another version.
Written to benchmarks/results/robots/speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "robots" / "speed.json"
CORES = 2

# Of the processor's time, on any system. A guest's is part of the user's.
_BUSY = {"user", "nice", "system", "irq", "softirq", "steal", "interrupt", "dpc"}
OTHERS_MATTER = 0.1
"""Cores that other processes use, from which on a wall clock says little."""

_SPARING = {"precision": "float32", "critic.state_stride": 5}
# Task: preset, changes of it, iterations of the budget, bar in hours.
CASES: dict[str, tuple[str, dict[str, Any], int, float]] = {
    "Meta-World button-press, 20M steps": ("metaworld-long:button-press-v3", {}, 2500, 40 / 60),
    "Meta-World push, 20M steps": ("metaworld-long:push-v3", {}, 2500, 40 / 60),
    "Box Pushing dense, 50M steps": ("box-pushing-dense-long", {}, 3290, 3.5),
    "Table Tennis, 12,000 iterations": ("table-tennis-long", {}, 12_000, 5.0),
    "Hopper Jump sparse, 3.5M steps": ("hopper-jump-sparse-paper", _SPARING, 219, 5 / 60),
}


def processor_seconds(pids: list[int]) -> float:
    """What processes have used so far."""
    used = (psutil.Process(pid).cpu_times() for pid in pids)
    return float(sum(times.user + times.system for times in used))


def busy_seconds() -> float:
    """What all processes of the machine have used so far, and what other machines took of its cores."""
    times = psutil.cpu_times()._asdict()
    return float(sum(times[name] for name in times.keys() & _BUSY))


def measure(case: str, iterations: int) -> list[dict[str, float]]:
    """Seconds of some iterations of the package that is on the path."""
    import numpy as np
    import torch

    from tether.episodic.algorithms import build_learner
    from tether.episodic.presets import preset
    from tether.episodic.queue import changed
    from tether.episodic.sampler import EpisodeSampler

    torch.set_num_threads(int(os.environ.get("LEARNER_THREADS", "1")))
    name, settings, *_ = CASES[case]
    config: Any = changed(preset(name), settings)
    rows = []
    with EpisodeSampler(config.env_id, CORES, 0, config.env_options) as sampler:
        learner: Any = build_learner(config, sampler.spec)
        pids = [process.pid for process in sampler._backend._processes]  # type: ignore[union-attr]
        swing = np.sin(np.pi * np.linspace(0, 1, sampler.spec.horizon))[None, :, None] ** 2
        for iteration in range(iterations + 1):
            reach = np.random.default_rng(iteration).normal(
                0, 0.05, (config.episodes, 1, sampler.spec.num_dof)
            )
            used, began, busy = processor_seconds(pids), time.perf_counter(), busy_seconds()
            before = time.process_time()
            starts = sampler.reset(config.episodes)
            positions = starts.positions[:, None] + reach * swing
            episodes = sampler.execute(positions, np.gradient(positions, sampler.spec.dt, axis=1))
            sampled, simulated = time.perf_counter(), processor_seconds(pids) - used
            own = time.process_time()
            learner.observe(learner.act(starts), episodes)
            learner.update(0.0)
            ended, learned = time.perf_counter(), time.process_time()
            others = busy_seconds() - busy - (learned - before) - simulated
            rows.append({
                "steps": float(episodes.env_steps),
                "sampling_seconds": sampled - began,
                "update_seconds": ended - sampled,
                "sampling_processor_seconds": simulated,
                "update_processor_seconds": learned - own,
                "others_cores": max(0.0, others) / (ended - began),
            })  # fmt: skip
    return rows[1:]


def in_tree(tree: Path, case: str, iterations: int, threads: int) -> list[dict[str, float]]:
    """`measure` with the package of a tree."""
    command = [sys.executable, __file__, "--measure", case, "--iterations", str(iterations)]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "LEARNER_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}: {case} failed.\n{done.stderr[-2000:]}")
    rows: list[dict[str, float]] = json.loads(done.stdout)
    return rows


def summary(case: str, rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians of an iteration, and what the budget takes."""
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    *_, iterations, bar = CASES[case]
    seconds = found["sampling_seconds"] + found["update_seconds"]
    return found | {
        "steps_a_second": found["steps"] / seconds,
        "hours": iterations * seconds / 3600,
        "bar_hours": bar,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="folder with another version of the repository")
    parser.add_argument("--iterations", type=int, default=3, help="of each case in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of learning; more show in the wall clock")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure, options.iterations)))
        return
    trees = {"now": ROOT} | ({"before": options.against.resolve()} if options.against else {})
    cases: dict[str, Any] = {}
    for case in options.only:
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(options.rounds):
            for name, tree in trees.items():
                rows[name] += in_tree(tree, case, options.iterations, options.threads)
        cases[case] = {name: summary(case, found) for name, found in rows.items()}
        # Beside each case: others in the file may be of another call.
        cases[case] |= {"threads": options.threads, "rounds": options.rounds, "load": os.getloadavg()}
        for name in trees:
            found = cases[case][name]
            others = found["others_cores"]
            print(
                f"{case}, {name}: sampling {found['sampling_seconds']:.2f} s and update "
                f"{found['update_seconds']:.2f} s an iteration (processor time "
                f"{found['sampling_processor_seconds']:.2f} and {found['update_processor_seconds']:.2f} s), "
                f"{found['steps_a_second']:.0f} steps/s, {found['hours']:.2f} h "
                f"(bar {found['bar_hours']:.2f} h)"
                + (f"; other processes used {others:.1f} cores meanwhile" if others > OTHERS_MATTER else ""),
                flush=True,
            )
    if RESULTS.exists():
        kept = json.loads(RESULTS.read_text())["cases"]
        cases = {case: kept[case] for case in CASES if case in kept} | cases
    record = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "cases": cases,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
