"""How often Box Pushing succeeds, by how near turns are to where quaternions jump: a table of a page.

    tether episodic eval --run RUN --episodes 1216 --each each.csv
    python -m benchmarks.box_turns --add box-pushing-dense-long 2271 each.csv
    python -m benchmarks.box_turns

The second keeps the mean motion's numbers of a run and iteration in benchmarks/results/robots/box-turns.csv.
Turns by 179 degrees to the left and to the right are two degrees apart, and their quaternions opposite. A
start counts by the one of its box and its target that lies nearer to there.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from benchmarks.robot_evaluations import percent
from numpy.typing import NDArray

from tether.episodic.curves import markdown_table
from tether.experiments.files import atomic_write_text, csv_text
from tether.experiments.statistics import proportion_interval

KEPT = Path(__file__).parent / "results" / "robots" / "box-turns.csv"
COLUMNS = ("grid", "step", "from", "to", "starts", "succeeded")
EDGES = (0.0, 0.4, 0.8, 1.2, np.pi)


def seam_distances(contexts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of starts [N, C]: how far the nearer of both turns is from half a turn, in rad, [N].

    A context is seven joints, and of box and target each its place (3) and turn: a quaternion (4; of a turn
    about the vertical w, 0, 0, z) or the direction of its x axis (3).
    """
    turn = (contexts.shape[1] - 7) // 2 - 3
    nearest = np.full(len(contexts), np.inf)
    for first in (10, 10 + turn + 3):
        of = contexts[:, first : first + turn]
        yaw = 2 * np.arctan2(of[:, 3], of[:, 0]) if turn == 4 else np.arctan2(of[:, 1], of[:, 0])
        nearest = np.minimum(nearest, np.pi - np.abs(yaw))
    return nearest


def kept() -> list[dict[str, str]]:
    """Every row of the file."""
    with KEPT.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def add(grid: str, step: str, each: Path) -> None:
    """Count a policy's episodes, in the place of an earlier count of the same iteration."""
    with each.open(encoding="utf-8", newline="") as file:
        episodes = [row for row in csv.DictReader(file) if row["policy"] == "deterministic"]
    contexts = [[float(row[name]) for name in row if name.startswith("context_")] for row in episodes]
    nearest = seam_distances(np.array(contexts))
    success = np.array([float(row["success"]) for row in episodes])
    rows = [row for row in kept() if (row["grid"], row["step"]) != (grid, step)]
    for low, high in pairwise(EDGES):
        here = (nearest >= low) & (nearest < high)
        values = grid, step, f"{low:.1f}", f"{high:.1f}", str(here.sum()), f"{success[here].sum():.0f}"
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    rows.sort(key=lambda row: (row["grid"], int(row["step"]), float(row["from"])))
    atomic_write_text(KEPT, csv_text([COLUMNS, *(row.values() for row in rows)]))


def table(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """A row for each policy: its success near to half a turn, further away, and at all starts."""
    found = []
    for (grid, step), of in groupby(rows, lambda row: (row["grid"], row["step"])):
        parts = list(of)
        shares = {f"{part['from']} to {part['to']} rad": _share([part]) for part in parts}
        found.append({"run": grid, "iteration": f"{int(step):,}", **shares, "all starts": _share(parts)})
    return found


def _share(parts: list[dict[str, str]]) -> str:
    starts, succeeded = (sum(int(part[name]) for part in parts) for name in ("starts", "succeeded"))
    share = proportion_interval(succeeded / starts, starts)
    return percent(share.value, share.low, share.high)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", nargs=3, metavar=("GRID", "ITERATION", "FILE"))
    if given := parser.parse_args().add:
        add(given[0], given[1], Path(given[2]))
    print(markdown_table(table(kept())))


if __name__ == "__main__":
    main()
