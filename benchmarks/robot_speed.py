"""How long do the published budgets take? The beginning of each robot task's own training.

    python -m benchmarks.robot_speed
    python -m benchmarks.robot_speed --against ../before --rounds 3
    python -m benchmarks.robot_speed --page

The presets of the long runs, and Hopper Jump's published one in float32 with a critic on every fifth state,
with two simulators. Counted is the second half of the iterations, evaluations between them included: by then
motions touch things, which takes longer to simulate than the first policy's. With --against, a folder with
another version of the repository, both are measured in turn.

The bars are of the wall clock on two cores with nothing else to do. On a machine that others use as well, of
which each case says how much, it tells little; the processor time beside it says more, where it is compared
with that of another version.
Written to benchmarks/results/robots/speed.json, of which --page prints docs/episodic_results.md's table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from benchmarks.bench.report import processor_name
from benchmarks.sampler import processor_seconds

from tether.episodic.curves import markdown_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "robots" / "speed.json"
CORES = 2

# Of the processor's time, on any system. A guest's is part of the user's.
_BUSY = {"user", "nice", "system", "irq", "softirq", "steal", "interrupt", "dpc"}
_PARTS = ("sampling_seconds", "policy_seconds", "critic_seconds")
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


def busy_seconds() -> float:
    """What all processes of the machine have used so far, and what other machines took of its cores."""
    times = psutil.cpu_times()._asdict()
    return float(sum(times[name] for name in times.keys() & _BUSY))


def measure(case: str, iterations: int) -> list[dict[str, float]]:
    """The later iterations of a training's beginning, with the package that is on the path."""
    from tether.episodic.presets import preset
    from tether.episodic.queue import changed
    from tether.episodic.train import train

    name, settings, *_ = CASES[case]
    config: Any = changed(preset(name), {"num_workers": CORES, **settings})
    marks: list[dict[str, float]] = []

    def note(_: int, numbers: dict[str, float]) -> None:
        if "sampling_seconds" in numbers:  # an iteration's, not an evaluation's
            so_far = {
                "seconds": time.perf_counter(),
                "processor": processor_seconds(),
                "busy": busy_seconds(),
            }
            marks.append(so_far | {part: numbers[part] for part in _PARTS})

    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run", until=iterations, report=note)
    rows = []
    for before, after in itertools.pairwise(marks):
        spent = {name: after[name] - before[name] for name in ("seconds", "processor", "busy")}
        others = max(0.0, spent.pop("busy") - spent["processor"])
        rows.append(
            spent | {part: after[part] for part in _PARTS} | {"others_cores": others / spent["seconds"]}
        )
    return rows[len(rows) // 2 :]


def in_tree(tree: Path, case: str, iterations: int) -> list[dict[str, float]]:
    """`measure` with the package of a tree."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.robot_speed",
        "--measure",
        case,
        "--iterations",
        str(iterations),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}: {case} failed.\n{done.stderr[-2000:]}")
    rows: list[dict[str, float]] = json.loads(done.stdout)
    return rows


def summary(case: str, rounds: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Means of an iteration over all rounds, and what the budget takes by each of them."""
    rows = [row for found in rounds for row in found]
    *_, iterations, bar = CASES[case]
    hours = [iterations * statistics.fmean(row["seconds"] for row in found) / 3600 for found in rounds]
    means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    return means | {"hours": hours, "bar_hours": bar}


def span(hours: list[float]) -> str:
    """The shortest and the longest time, in words.

    >>> span([0.843, 1.163]), span([0.06, 0.059]), span([3.32, 3.31])
    ('51 to 70 minutes', '4 minutes', '3.3 h')
    """
    minutes = max(hours) < 2
    ends = {f"{found * (60 if minutes else 1):.{0 if minutes else 1}f}" for found in (min(hours), max(hours))}
    return f"{' to '.join(sorted(ends, key=float))} {'minutes' if minutes else 'h'}"


def table(cases: dict[str, Any]) -> list[dict[str, str]]:
    """What was measured of the present version, as a row for each task."""
    return [
        {
            "": case,
            "an iteration": f"{cases[case]['now']['seconds']:.2f} s",
            "of it sampling and policy": " and ".join(
                f"{cases[case]['now'][part]:.2f} s" for part in _PARTS[:2]
            ),
            "the budget takes": span(cases[case]["now"]["hours"]),
            "wanted": span([bar]),
        }
        for case, (*_, bar) in CASES.items()
        if case in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="folder with another version of the repository")
    parser.add_argument("--iterations", type=int, default=80, help="of each case in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--page", action="store_true", help="print the table of what was measured, no more")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page:
        print(markdown_table(table(json.loads(RESULTS.read_text()))))
        return
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure, options.iterations)))
        return
    trees = {"now": ROOT} | ({"before": options.against.resolve()} if options.against else {})
    found: dict[str, dict[str, list[Any]]] = {case: {name: [] for name in trees} for case in options.only}
    for _ in range(options.rounds):  # each case once, then again: a machine changes its pace
        for case, (name, tree) in itertools.product(options.only, trees.items()):
            found[case][name].append(in_tree(tree, case, options.iterations))
    summaries = {
        case: {name: summary(case, rounds) for name, rounds in by_tree.items()}
        for case, by_tree in found.items()
    }
    for case, by_tree in summaries.items():
        for name, means in by_tree.items():
            others = means["others_cores"]
            print(
                f"{case}, {name}: {means['seconds']:.2f} s an iteration (sampling "
                f"{means['sampling_seconds']:.2f}, policy {means['policy_seconds']:.2f}, then critic "
                f"{means['critic_seconds']:.2f}; processor time {means['processor']:.2f} s), "
                f"{min(means['hours']):.2f} to {max(means['hours']):.2f} h (bar {means['bar_hours']:.2f} h)"
                + (f"; other processes used {others:.1f} cores meanwhile" if others > OTHERS_MATTER else ""),
                flush=True,
            )
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = f"{processor_name()}, {os.cpu_count()} cores"
    record = kept | {case: {"machine": machine, **by_tree} for case, by_tree in summaries.items()}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
