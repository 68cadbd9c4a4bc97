"""How many steps each learner needs for nine tenths of what TCE ends at: `make robots-off-policy` as a table.

    python benchmarks/robot_sample_efficiency.py

What TCE ends at, with the published region, is in benchmarks/results/robots/long.csv; one seed of TCE with
the wider region of the quick presets, evaluated less often, is in short.csv. Judged is the mean motion;
between two evaluations a straight line is drawn. A run counts from when it first comes that far, and from
when it stays there to its end; one that does not, by all its steps, with a > before them.
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


def steps_to(run: RunData, wanted: float, *, for_good: bool = False) -> tuple[float, bool]:
    """When a run's mean motion first comes to a value, or does so for good, and whether it ever does.

    It counts with all its steps if not.
    """
    steps, values = (np.array([row[name] for row in run.evals]) for name in ("env_steps", headline_of(run)))
    there = values >= wanted
    if for_good:
        there = np.logical_and.accumulate(there[::-1])[::-1]
    if not there.any():
        return float(steps[-1]), False
    first = int(there.argmax())
    around = slice(max(0, first - 1), first + 1)
    return float(np.interp(wanted, values[around], steps[around])), True


def rows(runs: Grouped, long_runs: Grouped, wide_runs: Grouped) -> list[dict[str, str]]:
    """Of runs by environment and algorithm; of long ones, which say what TCE ends at; of a wider region."""
    found = []
    for env, by_algo in runs.items():
        if "tce" not in by_algo:
            continue  # nothing to compare with that was evaluated as often
        ends = [run.evals[-1][headline_of(run)] for run in unchanged(long_runs[env])]
        wanted, learners = SHARE * float(np.mean(ends)), dict(by_algo)
        if env in wide_runs:
            learners["tce, sixteen times the region"] = unchanged(wide_runs[env])
        for learner, seeds in learners.items():
            row = {"task": env, "learner": learner, "wanted": f"{wanted:.2f}"}
            for when, for_good in (("first there", False), ("there for good", True)):
                (mean, listed), (tces, _) = (_taken(of, wanted, for_good) for of in (seeds, by_algo["tce"]))
                row |= {when: listed, f"TCE's steps over these, {when}": f"{tces / mean:.1f}"}
            found.append(row | {"seconds for 1000 steps": f"{pace(seeds):.2f}"})
    return found


def unchanged(by_algo: Mapping[str, Sequence[RunData]]) -> list[RunData]:
    """TCE's runs with its preset's own settings: a run with others has them in its label."""
    return [run for run in by_algo["tce"] if run.config.label == "tce"]


def _taken(seeds: Sequence[RunData], wanted: float, for_good: bool) -> tuple[float, str]:
    """The mean of the seeds' steps, and each of them."""
    taken = [steps_to(run, wanted, for_good=for_good) for run in seeds]
    mean = float(np.mean([steps for steps, _ in taken]))
    return mean, ", ".join(f"{'' if come else '>'}{steps / 1000:.0f}k" for steps, come in taken)


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
    tables = (parser.parse_args().table, RESULTS / "long.csv", RESULTS / "short.csv")
    print(markdown_table(rows(*map(grouped, tables))))


if __name__ == "__main__":
    main()
