"""The committed training curves as a picture, docs/images/episodic-curves.png, and as a table.

    python benchmarks/episodic_curves.py

Both come from benchmarks/results/episodic, nothing is trained. In the picture thin lines are seeds, the
thick one is their mean; the table is Markdown, printed for docs/episodic_results.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tether.experiments import StudyTable
from tether.experiments.plots import Panel, save_figure, small_multiples
from tether.experiments.statistics import Curve

RESULTS = Path(__file__).parent / "results" / "episodic"
TABLE, SUMMARIES = RESULTS / "episodic.csv", RESULTS / "summaries.json"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "episodic-curves.png"
MILLION = 1e6


def curves(study: str, metric: str) -> Sequence[Curve]:
    """One curve a seed of a study, over millions of environment steps."""
    runs = StudyTable(TABLE).select(study)
    return [
        Curve([row["env_steps"] / MILLION for row in run.evals], [row[metric] for row in run.evals])
        for run in runs
    ]


def panel(title: str, metric: str, y_label: str, studies: dict[str, str], **lines: float) -> Panel:
    return Panel(
        title,
        {label: curves(study, f"{metric}_greedy") for label, study in studies.items()},
        x_label="million environment steps",
        y_label=f"{y_label} of the mean motion",
        percent=metric == "success",
        lines={name.replace("_", " "): height for name, height in lines.items()},
    )


def panels() -> list[Panel]:
    dense = {"tce": "hopper-jump-quick", "bbrl": "hopper-jump-bbrl-quick"}
    sparse = {"tce": "hopper-jump-sparse-long", "bbrl": "hopper-jump-sparse-bbrl-long"}
    button = {"tce": "metaworld-paper", "bbrl": "metaworld-bbrl"}
    others = {task: f"metaworld-paper-{task}-v3" for task in ("reach", "window-open", "drawer-open")}
    height = "height (m)"
    return [
        panel("Hopper Jump, dense reward", "max_height", height, dense, standing=1.5),
        panel("Hopper Jump, sparse reward", "max_height", height, sparse, published=1.89),
        panel("Meta-World button-press", "success", "success", button),
        panel("Meta-World, other tasks, TCE", "success", "success", others),
        panel("Box Pushing, dense, TCE", "return", "return", {"tce": "box-pushing-dense-quick"}),
        panel("Table Tennis, TCE", "return", "return", {"tce": "table-tennis-quick"}),
    ]


def table() -> str:
    """What every study came to at each of its budgets, seeds and their (interquartile) mean."""
    lines = ["| study | environment steps | judged by | mean | seeds | jerk |", "|---|---|---|---|---|---|"]
    for study, summary in sorted(json.loads(SUMMARIES.read_text()).items()):
        name = summary["headline"]
        for row in summary["budgets"]:
            seeds = ", ".join(f"{value:.2f}" for value in row["seeds"][name])
            mean, jerk = row["interquartile_mean"][name], row["interquartile_mean"]["jerk_greedy"]
            judged = name.removesuffix("_greedy").replace("_", " ")
            cells = (
                f"`{study}`",
                f"{row['env_steps']:,}",
                judged,
                f"{mean:.3f}",
                seeds,
                f"{jerk:.3g}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    save_figure(small_multiples(panels(), columns=2, width=4.1, height=2.6), options.output)
    print(table())


if __name__ == "__main__":
    main()
