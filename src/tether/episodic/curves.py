"""Runs of several tasks on one page: a panel and a few rows of a table for each task."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tether.episodic.run_kind import metric_text
from tether.experiments.files import atomic_write_text
from tether.experiments.plots import Panel, png_bytes, small_multiples
from tether.experiments.progress import format_duration
from tether.experiments.run_data import RunData
from tether.experiments.statistics import Curve, interquartile_mean

_SHARES = (0.25, 0.5, 1.0)
_MILLION = 1e6

Studies = Mapping[tuple[str, str], Sequence[RunData]]
"""(task, method) -> its seeds."""


def task_name(settings: Mapping[str, Any]) -> str:
    """The environment that a run's settings are about, with its options.

    >>> task_name({"env_id": "tether/HopperJumpSparse-v0", "env_options": {"show_memory": True, "reach": 2}})
    'HopperJumpSparse-v0 (reach=2, show_memory)'
    """
    given = sorted(settings.get("env_options", {}).items())
    options = ", ".join(name if value is True else f"{name}={value!r}" for name, value in given)
    task = str(settings["env_id"]).removeprefix("tether/")
    return f"{task} ({options})" if options else task


def by_study(runs: Iterable[RunData]) -> Studies:
    """Runs by task and label, in alphabetical order.

    Means end where the shortest seed does, so that one which has not come half as far as the furthest yet is
    left out, like a run without an evaluation.
    """
    found: dict[tuple[str, str], list[RunData]] = {}
    for run in sorted(runs, key=lambda run: run.config.seed):
        if run.evals:
            found.setdefault((task_name(run.config.settings), run.config.label), []).append(run)
    return {key: _far_enough(seeds) for key, seeds in sorted(found.items())}


def _far_enough(seeds: list[RunData]) -> list[RunData]:
    furthest = max(run.evals[-1]["env_steps"] for run in seeds)
    return [run for run in seeds if run.evals[-1]["env_steps"] >= furthest / 2]


def headline_of(run: RunData) -> str:
    """What the mean motion of a run is judged by."""
    return f"{run.config.settings['headline']}_greedy"


def task_panels(runs: Iterable[RunData]) -> list[Panel]:
    """What each task is judged by over millions of environment steps, one panel a task."""
    panels: dict[str, Panel] = {}
    for (task, label), seeds in by_study(runs).items():
        name = headline_of(seeds[0])
        curves = [
            Curve(
                np.array([row["env_steps"] / _MILLION for row in run.evals]),
                np.array([row[name] for row in run.evals]),
            )
            for run in seeds
        ]
        others = panels[task].curves if task in panels else {}
        panels[task] = Panel(
            task, {**others, label: curves}, x_label="million environment steps",
            y_label=metric_text(name.removesuffix("_greedy")),
            percent=name == "success_greedy", whole=name == "success_greedy",
        )  # fmt: skip
    return list(panels.values())


def at_budget(run: RunData, budget: float) -> Mapping[str, Any]:
    """The last evaluation within a number of environment steps."""
    return [row for row in run.evals if row["env_steps"] <= budget][-1]


def task_rows(runs: Iterable[RunData]) -> list[dict[str, str]]:
    """What each study came to after a quarter, half and all of the steps that its shortest run took.

    Means over seeds are interquartile means; of fewer than four seeds those are plain means.
    """
    rows = []
    for (task, label), seeds in by_study(runs).items():
        name = headline_of(seeds[0])
        shortest = min(run.evals[-1]["env_steps"] for run in seeds)
        for steps in dict.fromkeys(at_budget(seeds[0], share * shortest)["env_steps"] for share in _SHARES):
            found = [at_budget(run, steps) for run in seeds]

            def mean(name: str, found: Sequence[Mapping[str, Any]] = found) -> float:
                return float(interquartile_mean([row[name] for row in found]))

            rows.append({
                "task": task,
                "method": label,
                "environment steps": f"{found[0]['env_steps']:,}",
                "judged by": metric_text(name.removesuffix("_greedy")),
                "mean": f"{mean(name):.3f}",
                "seeds": ", ".join(f"{row[name]:.2f}" for row in found),
                "at any step": f"{mean('success_any_greedy'):.3f}" if name == "success_greedy" else "",
                "jerk": f"{mean('jerk_greedy'):.3g}",
                "time": format_duration(mean("time_s")),
            })  # fmt: skip
    return rows


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as a table of a Markdown page."""
    lines = [rows[0], dict.fromkeys(rows[0], "---"), *rows]
    cells = [list(rows[0]), *(list(line.values()) for line in lines[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def write_overview(runs: Sequence[RunData], path: Path, title: str) -> Path:
    """Write one self-contained HTML page with the panels and the table of all runs."""
    rows = task_rows(runs)
    figure = small_multiples(task_panels(runs), columns=3)
    picture = base64.b64encode(png_bytes(figure)).decode()
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    table = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    unfinished = sum(not run.finished for run in runs)
    return atomic_write_text(
        path,
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<style>body{font:15px sans-serif;max-width:75em;margin:2em auto}img{max-width:100%}"
        "td{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:right}</style>"
        f"<h1>{html.escape(title)}</h1><p>Thin lines are seeds, the thick one is their mean. Judged is the "
        f"mean motion, always on the same episodes. {unfinished} of {len(runs)} runs have not come to "
        "the end of their schedule; seeds that have not come half as far as the furthest are left out.</p>"
        f"<img src='data:image/png;base64,{picture}' alt='Curves of all tasks'><table>{table}</table>",
    )
