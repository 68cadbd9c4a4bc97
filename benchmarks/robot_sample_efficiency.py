"""How many steps each learner needs for nine tenths of what TCE ends at: `make robots-off-policy` as a table.

    python benchmarks/robot_sample_efficiency.py

What TCE ends at is in benchmarks/results/robots/long.csv. Judged is the mean motion; between two evaluations
a straight line is drawn. A run that never comes that far counts by all its steps, with a > before them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tether.episodic.curves import headline_of, markdown_table
from tether.experiments import StudyTable
from tether.experiments.run_data import RunData
from tether.kinds import KINDS

RESULTS = Path(__file__).parent / "results" / "robots"
SHARE = 0.9

Grouped = Mapping[str, Mapping[str, Sequence[RunData]]]
"""Environment -> algorithm -> its runs."""


def steps_to(run: RunData, wanted: float) -> float | None:
    """When a run's mean motion first comes to a value; None where it never does."""
    steps, values = (np.array([row[name] for row in run.evals]) for name in ("env_steps", headline_of(run)))
    (reached,) = np.nonzero(values >= wanted)
    if not reached.size or reached[0] == 0:
        return float(steps[0]) if reached.size else None
    around = slice(reached[0] - 1, reached[0] + 1)
    return float(np.interp(wanted, values[around], steps[around]))


def row(task: str, algo: str, runs: Sequence[RunData], wanted: float, of_tce: float) -> dict[str, str]:
    found = [steps_to(run, wanted) for run in runs]
    ends = [run.evals[-1] for run in runs]
    counted = [end["env_steps"] if at is None else at for end, at in zip(ends, found, strict=True)]
    return {
        "task": task,
        "learner": algo,
        "wanted": f"{wanted:.2f}",
        "steps, mean": f"{np.mean(counted):,.0f}",
        "seeds": ", ".join(
            f"{'>' if at is None else ''}{count / 1000:.0f}k"
            for at, count in zip(found, counted, strict=True)
        ),
        "TCE's steps over these": f"{of_tce / np.mean(counted):.1f}",
        "seconds for 1000 steps": f"{np.mean([1e3 * end['time_s'] / end['env_steps'] for end in ends]):.2f}",
    }


def rows(runs: Grouped, long_runs: Grouped) -> list[dict[str, str]]:
    """Of runs by environment and algorithm, and long ones, which say what TCE ends at."""
    found = []
    for env, by_algo in runs.items():
        wanted = SHARE * float(np.mean([run.evals[-1][headline_of(run)] for run in long_runs[env]["tce"]]))
        tce = row(env, "tce", by_algo["tce"], wanted, 1.0)
        of_tce = float(tce["steps, mean"].replace(",", ""))
        found += [row(env, algo, seeds, wanted, of_tce) for algo, seeds in by_algo.items()]
    return found


def grouped(table: Path) -> Grouped:
    found: dict[str, dict[str, list[RunData]]] = defaultdict(lambda: defaultdict(list))
    for run in StudyTable(table, KINDS).select():
        settings = run.config.settings
        found[settings["env_id"].removeprefix("tether/")][settings["algo"]].append(run)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, default=RESULTS / "off-policy.csv")
    print(markdown_table(rows(grouped(parser.parse_args().table), grouped(RESULTS / "long.csv"))))


if __name__ == "__main__":
    main()
