"""What each deviation from the published settings buys: `make robots-ablation` as a table.

    python benchmarks/robot_ablation.py

Of every run counts its mean motion over the last quarter of its evaluations, sixteen episodes each. A
deviation's difference is that to the runs with all settings as published, with a bootstrap interval over the
seeds of both and the p-value of dealing them out anew, which three seeds against three cannot bring below .1.
Runs that have not come as far as the furthest of their task are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tether.episodic.curves import by_study, markdown_table, pace
from tether.experiments import StudyTable
from tether.experiments.run_data import RunData
from tether.experiments.statistics import difference_interval, permutation_p_value
from tether.kinds import KINDS

TABLE = Path(__file__).parent / "results" / "robots" / "ablation.csv"
PUBLISHED = "published"

Variants = Mapping[str, Sequence[RunData]]
"""What differs from the publication -> its seeds."""


def last_quarter(run: RunData, name: str) -> float:
    """Mean over the last quarter of a run's evaluations."""
    return float(np.mean([row[name] for row in run.evals[-max(1, len(run.evals) // 4) :]]))


def steps(run: RunData) -> int:
    """The environment steps that a run took."""
    return int(run.evals[-1]["env_steps"])


def rows(variants: Variants) -> list[dict[str, str]]:
    """A task's table, the published settings first."""
    reference = [last_quarter(run, "return_greedy") for run in variants[PUBLISHED]]
    found = []
    for label, runs in variants.items():
        returns = [last_quarter(run, "return_greedy") for run in runs]
        change, p = difference_interval(returns, reference), permutation_p_value(returns, reference)
        interval = f"{change.value:+.0f} ({change.low:+.0f} to {change.high:+.0f})"
        found.append({
            "settings": label,
            "seeds": f"{len(runs)}",
            "steps": f"{steps(runs[0]):,}",
            "success": _each(runs, "success_greedy"),
            "at any step": _each(runs, "success_any_greedy"),
            "return": f"{np.mean(returns):.0f}",
            "to published": "" if label == PUBLISHED else interval,
            "p": "" if label == PUBLISHED else f"{p:.2f}",
            "jerk": f"{np.mean([last_quarter(run, 'jerk_greedy') for run in runs]):.3g}",
            "seconds for 1000 steps": f"{pace(runs):.2f}",
        })  # fmt: skip
    return found


def _each(runs: Sequence[RunData], name: str) -> str:
    values = [last_quarter(run, name) for run in runs]
    return f"{np.mean(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})"


def by_task(runs: Iterable[RunData]) -> dict[str, Variants]:
    """Runs that have come as far as any of their task, by task and by what differs; the published first."""
    studies: dict[str, dict[str, Sequence[RunData]]] = {}
    for (task, label), seeds in by_study(runs).items():
        studies.setdefault(task, {PUBLISHED: []})[label.partition(", ")[2]] = seeds
    return {task: there for task, variants in studies.items() if (there := _arrived(variants))[PUBLISHED]}


def _arrived(variants: Variants) -> Variants:
    furthest = max(steps(run) for runs in variants.values() for run in runs)
    arrived = {label: [run for run in runs if steps(run) == furthest] for label, runs in variants.items()}
    return {label: runs for label, runs in arrived.items() if runs or label == PUBLISHED}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, default=TABLE)
    for task, variants in by_task(StudyTable(parser.parse_args().table, KINDS).select()).items():
        print(f"{task}\n\n{markdown_table(rows(variants))}\n")


if __name__ == "__main__":
    main()
