"""What `tether episodic eval --episodes 304` said of long robot runs: a table of docs/episodic_results.md.

    python benchmarks/robot_evaluations.py
    python benchmarks/robot_evaluations.py --add box-pushing-dense-long runs/.../evaluation.json

The second keeps another run's numbers beside those of benchmarks/results/robots/evaluations.json, under the
name of its grid in long.csv. The 16 starts that a run is judged by while it trains are the first of the 304.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.episodic.curves import markdown_table
from tether.experiments.files import atomic_write_text, dump_json, load_json

KEPT = Path(__file__).parent / "results" / "robots" / "evaluations.json"


def kept() -> list[dict[str, Any]]:
    """Every evaluation, in the order of its run and iteration."""
    found: list[dict[str, Any]] = load_json(KEPT.read_text(encoding="utf-8"))
    return found


def add(grid: str, evaluation: Mapping[str, Any]) -> None:
    """Keep one, in the place of an earlier one of the same run and iteration."""
    new = {"grid": grid, **evaluation}
    others = [one for one in kept() if _key(one) != _key(new)]
    lines = ",\n".join(dump_json(one) for one in sorted([*others, new], key=_key))
    atomic_write_text(KEPT, f"[\n{lines}\n]\n")


def _key(one: Mapping[str, Any]) -> tuple[str, int, int]:
    return one["grid"], int(one["run"].rpartition("seed")[2]), one["step"]


def rows(evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each: what the task is judged by, of the mean motion and of exploring ones."""
    found = []
    for one in evaluations:
        greedy, headline = one["deterministic"], one["headline"]
        beside = {
            text: f"{100 * greedy[name]['mean']:.0f} %"
            for name, text in (("success_any", "at any step"), ("returned", "returned"))
            if name in greedy and (name != "success_any" or "returned" not in greedy)
        }
        found.append({
            "run": f"{one['grid']}, {one['run'].replace('-seed', ', seed ')}",
            "iteration": f"{one['step']:,}",
            "mean motion": _written(headline, greedy[headline]),
            "besides": ", ".join(f"{text} {share}" for text, share in beside.items()),
            "exploring": _written(headline, one["stochastic"][headline]),
            "jerk": f"{greedy['jerk']['mean']:.3g}",
        })  # fmt: skip
    return found


def percent(mean: float, low: float, high: float) -> str:
    """A share and its interval."""
    return f"{100 * mean:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def _written(headline: str, measured: Mapping[str, Any]) -> str:
    mean, (low, high) = measured["mean"], measured["mean_interval"]
    if headline == "success":
        return percent(mean, low, high)
    return f"{mean:.3f} m ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", nargs=2, metavar=("GRID", "FILE"))
    if given := parser.parse_args().add:
        add(given[0], load_json(Path(given[1]).read_text(encoding="utf-8")))
    print(markdown_table(rows(kept())))


if __name__ == "__main__":
    main()
