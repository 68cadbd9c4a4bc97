"""What each deviation from the published settings buys: `make robots-ablation` as a table.

    python benchmarks/robot_ablation.py

Of every run counts its mean motion over the last quarter of its evaluations, sixteen episodes each. A
deviation's difference is that to the runs with all settings as published, with a bootstrap interval over the
seeds of both and the p-value of dealing them out anew, which three seeds against three cannot bring below .1.
Runs that have not come as far as the furthest of their task are left out.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tether.episodic.curves import markdown_table, task_name
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


def seconds(run: RunData) -> float:
    """Wall-clock seconds for a thousand environment steps."""
    return 1000 * run.evals[-1]["time_s"] / run.evals[-1]["env_steps"]


def rows(variants: Variants) -> list[dict[str, str]]:
    """A task's table, the published settings first."""
    published = variants[PUBLISHED]
    reference = [last_quarter(run, "return_greedy") for run in published]
    found = []
    for label, runs in variants.items():
        returns = [last_quarter(run, "return_greedy") for run in runs]
        change = difference_interval(returns, reference)
        found.append({
            "settings": label,
            "seeds": f"{len(runs)}",
            "steps": f"{min(run.evals[-1]['env_steps'] for run in runs):,}",
            "success": _each(runs, "success_greedy", ".2f"),
            "at any step": _each(runs, "success_any_greedy", ".2f"),
            "return": f"{np.mean(returns):.0f}",
            "to published": f"{change.value:+.0f} ({change.low:+.0f} to {change.high:+.0f})",
            "p": f"{permutation_p_value(returns, reference):.2f}",
            "jerk": f"{np.mean([last_quarter(run, 'jerk_greedy') for run in runs]):.3g}",
            "seconds for 1000 steps": f"{np.mean([seconds(run) for run in runs]):.2f}",
        })  # fmt: skip
    return [{**row, "to published": "", "p": ""} if row["settings"] == PUBLISHED else row for row in found]


def _each(runs: Sequence[RunData], name: str, form: str) -> str:
    values = [last_quarter(run, name) for run in runs]
    return f"{np.mean(values):{form}} ({', '.join(f'{value:{form}}' for value in values)})"


def by_task(runs: Iterable[RunData]) -> dict[str, dict[str, list[RunData]]]:
    """Runs that have come as far as any of their task, by task and by what differs; the published first."""
    evaluated = sorted((run for run in runs if run.evals), key=lambda run: run.config.seed)
    furthest: dict[str, int] = defaultdict(int)
    for run in evaluated:
        task = task_name(run.config.settings)
        furthest[task] = max(furthest[task], run.evals[-1]["env_steps"])
    found: dict[str, dict[str, list[RunData]]] = {task: {PUBLISHED: []} for task in furthest}
    for run in evaluated:
        task = task_name(run.config.settings)
        if run.evals[-1]["env_steps"] == furthest[task]:
            found[task].setdefault(run.config.label.partition(", ")[2], []).append(run)
    return {task: variants for task, variants in found.items() if variants[PUBLISHED]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, default=TABLE)
    for task, variants in by_task(StudyTable(parser.parse_args().table, KINDS).select()).items():
        print(f"{task}\n\n{markdown_table(rows(variants))}\n")


if __name__ == "__main__":
    main()
