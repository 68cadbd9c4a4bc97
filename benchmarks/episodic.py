"""Episodic training curves: a preset over several seeds, one after the other.

    python benchmarks/episodic.py hopper-jump-quick
    python benchmarks/episodic.py metaworld-paper --until 100 --budgets 400000 800000

Run folders go to runs/episodic/<preset>/seed-<n> and are continued if the command is given again. What they
measured is kept in benchmarks/results/episodic/episodic.csv, and a table of the deterministic evaluations, as
interquartile means over seeds, is printed and written to summaries.json there.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tether.episodic.presets import PRESETS, preset
from tether.episodic.train import train
from tether.experiments import RunFolder, StudyTable, load_runs
from tether.experiments.statistics import interquartile_mean
from tether.kinds import KINDS

RESULTS = Path(__file__).parent / "results" / "episodic"
TABLE, SUMMARIES = RESULTS / "episodic.csv", RESULTS / "summaries.json"


def at_budget(evaluations: list[dict[str, Any]], budget: int) -> dict[str, Any] | None:
    """The last evaluation within a number of environment steps; None if the run did not get that far."""
    if evaluations[-1]["env_steps"] < budget:
        return None
    return [row for row in evaluations if row["env_steps"] <= budget][-1]


def summarise(runs: list[Path], budgets: list[int]) -> dict[str, Any]:
    folders = [RunFolder.open(run) for run in runs]
    headline = f"{folders[0].config.settings['headline']}_greedy"
    names = sorted({headline, "success_greedy", "return_greedy", "jerk_greedy"})
    table = []
    for budget in budgets:
        rows = [at_budget(folder.evals(), budget) for folder in folders]
        reached = [row for row in rows if row is not None]
        if len(reached) == len(rows):
            values = {name: [row[name] for row in reached] for name in names}
            means = {name: float(interquartile_mean(numbers)) for name, numbers in values.items()}
            table.append({"env_steps": budget, "interquartile_mean": means, "seeds": values})
    seconds = [
        {
            part: sum(row[f"{part}_seconds"] for row in folder.metrics())
            for part in ("sampling", "critic", "policy")
        }
        for folder in folders
    ]
    return {"headline": headline, "budgets": table, "training_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", help=f"one of {', '.join(sorted(PRESETS))}, Meta-World with :task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--until", type=int, default=None, help="stop after this iteration")
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[350_000, 800_000], help="environment steps"
    )
    parser.add_argument("--workers", type=int, default=1, help="simulator processes")
    parser.add_argument("--runs", type=Path, default=Path("runs/episodic"))
    options = parser.parse_args()
    name = options.preset.replace(":", "-")
    runs = []
    for seed in options.seeds:
        run = options.runs / name / f"seed-{seed}"
        config = replace(preset(options.preset), seed=seed, num_workers=options.workers)

        def report(step: int, metrics: dict[str, float], seed: int = seed) -> None:
            if "return_greedy" in metrics:
                numbers = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())
                print(f"seed {seed}  iteration {step}  {numbers}", flush=True)

        train(config, run, label=config.algo, resume=True, until=options.until, report=report)
        runs.append(run)
    StudyTable(TABLE, KINDS).add(name, load_runs(runs, KINDS), unfinished=True)
    summary = summarise(runs, options.budgets)
    command = f"python benchmarks/episodic.py {options.preset}"
    command += f" --until {options.until}" if options.until else ""
    record = {"command": command, "seeds": options.seeds, **summary}
    summaries = json.loads(SUMMARIES.read_text()) if SUMMARIES.exists() else {}
    summaries[name] = record
    SUMMARIES.write_text(json.dumps(dict(sorted(summaries.items())), indent=2) + "\n")
    for row in summary["budgets"]:
        means = "  ".join(f"{key} {value:.4g}" for key, value in row["interquartile_mean"].items())
        print(f"{row['env_steps']:>9} steps, {len(runs)} seeds: {means}")


if __name__ == "__main__":
    main()
