"""How many steps each learner needs for nine tenths of what TCE ends at: `make robots-off-policy` as a table.

    python benchmarks/robot_sample_efficiency.py

What TCE ends at, with published settings, is in benchmarks/results/robots/long.csv. Judged is the mean
motion; between two evaluations a straight line is drawn. A run that never comes that far counts by all its
steps, with a > before them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tether.episodic.curves import headline_of, markdown_table, pace
from tether.experiments import StudyTable
from tether.experiments.run_data import RunData
from tether.kinds import KINDS

RESULTS = Path(__file__).parent / "results" / "robots"
SHARE = 0.9

Grouped = Mapping[str, Mapping[str, Sequence[RunData]]]
"""Environment -> algorithm -> its runs."""


def steps_to(run: RunData, wanted: float) -> tuple[float, bool]:
    """When a run's mean motion first comes to a value, and whether it does; all its steps if not."""
    steps, values = (np.array([row[name] for row in run.evals]) for name in ("env_steps", headline_of(run)))
    (reached,) = np.nonzero(values >= wanted)
    if not reached.size:
        return float(steps[-1]), False
    around = slice(max(0, reached[0] - 1), reached[0] + 1)
    return float(np.interp(wanted, values[around], steps[around])), True


def rows(runs: Grouped, long_runs: Grouped) -> list[dict[str, str]]:
    """Of runs by environment and algorithm, and long ones, which say what TCE ends at."""
    found = []
    for env, by_algo in runs.items():
        # A run with settings of our own has them in its label.
        published = [run for run in long_runs[env]["tce"] if run.config.label == "tce"]
        wanted = SHARE * float(np.mean([run.evals[-1][headline_of(run)] for run in published]))
        taken = {algo: [steps_to(run, wanted) for run in seeds] for algo, seeds in by_algo.items()}
        means = {algo: np.mean([steps for steps, _ in seeds]) for algo, seeds in taken.items()}
        for algo, seeds in taken.items():
            found.append({
                "task": env,
                "learner": algo,
                "wanted": f"{wanted:.2f}",
                "steps, mean": f"{means[algo]:,.0f}",
                "seeds": ", ".join(f"{'' if come else '>'}{steps / 1000:.0f}k" for steps, come in seeds),
                "TCE's steps over these": f"{means['tce'] / means[algo]:.1f}",
                "seconds for 1000 steps": f"{pace(by_algo[algo]):.2f}",
            })  # fmt: skip
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
