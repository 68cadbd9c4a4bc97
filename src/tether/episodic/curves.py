"""Runs of several tasks on one page: a panel and a few rows of a table for each task and each suite."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tether.episodic.run_kind import metric_text
from tether.experiments.files import atomic_write_text
from tether.experiments.plots import Panel, png_bytes, small_multiples
from tether.experiments.progress import format_duration
from tether.experiments.run_data import RunData
from tether.experiments.statistics import Curve, interquartile_mean, mean_curve

_SHARES = (0.25, 0.5, 1.0)
_MILLION = 1e6

Studies = Mapping[tuple[str, str], Sequence[RunData]]
"""(task, method) -> its seeds."""

Suites = Mapping[str, Mapping[str, Mapping[str, Sequence[RunData]]]]
"""Suite -> method -> task -> its seeds."""


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
    return {
        key: [run for (run,) in _far_enough([run] for run in seeds)] for key, seeds in sorted(found.items())
    }


def _far_enough(groups: Iterable[Sequence[RunData]]) -> list[Sequence[RunData]]:
    """Those of which every run has come half as far as the furthest."""
    steps = [(_steps(runs), runs) for runs in groups]
    furthest = max(taken for taken, _ in steps)
    return [runs for taken, runs in steps if taken >= furthest / 2]


def _steps(runs: Iterable[RunData]) -> int:
    """The environment steps that every run took."""
    return min(run.evals[-1]["env_steps"] for run in runs)


def by_suite(runs: Iterable[RunData]) -> Suites:
    """The studies of a suite's tasks: of those named like `MetaWorld-push-v3` and judged by success."""
    found: dict[str, dict[str, dict[str, Sequence[RunData]]]] = {}
    for (task, label), seeds in sorted(by_study(runs).items(), key=lambda study: study[0][1]):
        named = re.match(r"(\w+)-.+-v\d", task)
        if named and headline_of(seeds[0]) == "success_greedy":
            found.setdefault(named[1], {}).setdefault(label, {})[task] = seeds
    return {suite: methods for suite, methods in found.items() if _task_count(methods) > 1}


def _task_count(methods: Mapping[str, Mapping[str, Sequence[RunData]]]) -> int:
    """Tasks that any of the methods has."""
    return len(set[str]().union(*methods.values()))


def headline_of(run: RunData) -> str:
    """What the mean motion of a run is judged by."""
    return f"{run.config.settings['headline']}_greedy"


def task_panels(runs: Iterable[RunData]) -> list[Panel]:
    """What each task is judged by over millions of environment steps, one panel a task."""
    panels: dict[str, Panel] = {}
    for (task, label), seeds in by_study(runs).items():
        others = panels[task].curves if task in panels else {}
        panels[task] = _panel(task, {**others, label: [_curve(run) for run in seeds]}, headline_of(seeds[0]))
    return list(panels.values())


def suite_panels(runs: Iterable[RunData]) -> list[Panel]:
    """Success over all tasks of a suite, each of them a thin line: the mean of its seeds.

    Drawn are methods that have come half as far as their furthest in every task: the mean of easy ones looks
    better.
    """
    panels = []
    for suite, methods in by_suite(runs).items():
        count = _task_count(methods)
        far = {label: _far_enough(tasks.values()) for label, tasks in methods.items()}
        drawn = {
            label: [_mean_of(seeds) for seeds in tasks] for label, tasks in far.items() if len(tasks) == count
        }
        if drawn:
            panels.append(_panel(f"{suite}: {count} tasks and their mean", drawn, "success_greedy"))
    return panels


def _panel(title: str, curves: Mapping[str, Sequence[Curve]], name: str) -> Panel:
    return Panel(
        title, curves, x_label="million environment steps", y_label=metric_text(name.removesuffix("_greedy")),
        percent=name == "success_greedy", whole=name == "success_greedy",
    )  # fmt: skip


def _curve(run: RunData) -> Curve:
    name = headline_of(run)
    steps = np.array([row["env_steps"] / _MILLION for row in run.evals])
    return Curve(steps, np.array([row[name] for row in run.evals]))


def _mean_of(seeds: Sequence[RunData]) -> Curve:
    band = mean_curve([_curve(run) for run in seeds])
    return Curve(band.x, band.mean)


def at_budget(run: RunData, budget: float) -> Mapping[str, Any]:
    """The last evaluation within a number of environment steps."""
    return [row for row in run.evals if row["env_steps"] <= budget][-1]


def pace(runs: Iterable[RunData]) -> float:
    """Seconds for a thousand environment steps, learning and evaluation with them; the mean of runs."""
    ends = [run.evals[-1] for run in runs]
    return float(np.mean([1000 * end["time_s"] / end["env_steps"] for end in ends]))


def task_rows(runs: Iterable[RunData]) -> list[dict[str, str]]:
    """What each study came to after a quarter, half and all of the steps that its shortest run took.

    Means over seeds are interquartile means; of fewer than four seeds those are plain means.
    """
    rows = []
    for (task, label), seeds in by_study(runs).items():
        name = headline_of(seeds[0])
        shortest = _steps(seeds)
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


def suite_rows(runs: Iterable[RunData]) -> list[dict[str, str]]:
    """What each method came to over a suite's tasks, at a quarter, half and all of its longest run's steps.

    A task counts once, by the mean of its seeds, and where all its seeds have come that far. Published
    numbers are interquartile means (arXiv 2108.13264): the hardest quarter of the tasks does not move them,
    so the mean stands beside. A method that has come to more tasks than another has a second row, of those
    that all share.
    """
    rows = []
    for suite, methods in by_suite(runs).items():
        furthest = max(_steps(seeds) for tasks in methods.values() for seeds in tasks.values())
        for budget in (share * furthest for share in _SHARES):
            reached = {
                label: {task: seeds for task, seeds in tasks.items() if _steps(seeds) >= budget}
                for label, tasks in methods.items()
            }
            shared = set.intersection(*(set(tasks) for tasks in reached.values()))
            rows += [_suite_row(suite, label, tasks, budget) for label, tasks in reached.items() if tasks]
            rows += [
                _suite_row(suite, label, {task: tasks[task] for task in shared}, budget, " shared")
                for label, tasks in reached.items()
                if shared and set(tasks) != shared
            ]
    return rows


def _suite_row(
    suite: str, label: str, tasks: Mapping[str, Sequence[RunData]], budget: float, note: str = ""
) -> dict[str, str]:
    found = [[at_budget(run, budget) for run in seeds] for seeds in tasks.values()]
    last, any_step = (
        [np.mean([row[name] for row in rows]) for rows in found]
        for name in ("success_greedy", "success_any_greedy")
    )
    return {
        "suite": suite,
        "method": label,
        "tasks": f"{len(tasks)}{note}",
        "environment steps": f"{budget:,.0f}",
        "mean success": f"{np.mean(last):.3f}",
        "interquartile mean": f"{interquartile_mean(last):.3f}",
        "at any step, mean": f"{np.mean(any_step):.3f}",
    }


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as a table of a Markdown page."""
    lines = [rows[0], dict.fromkeys(rows[0], "---"), *rows]
    cells = [list(rows[0]), *(list(line.values()) for line in lines[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _html_table(rows: Sequence[Mapping[str, str]]) -> str:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    return "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in lines)


def write_overview(runs: Sequence[RunData], path: Path, title: str) -> Path:
    """Write one self-contained HTML page with the panels and the tables of all suites and tasks."""
    figure = small_multiples([*suite_panels(runs), *task_panels(runs)], columns=3)
    picture = base64.b64encode(png_bytes(figure)).decode()
    tables = (_html_table(rows) for rows in (suite_rows(runs), task_rows(runs)))
    unfinished = sum(not run.finished for run in runs)
    return atomic_write_text(
        path,
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<style>body{font:15px sans-serif;max-width:75em;margin:2em auto}img{max-width:100%}"
        "td{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:right}table{margin:1em 0}</style>"
        f"<h1>{html.escape(title)}</h1><p>Thin lines are seeds, or the tasks of a suite; the thick one "
        "is their mean. Judged is the mean motion, always on the same episodes. "
        f"{unfinished} of {len(runs)} runs have not come to the end of their schedule; "
        "seeds that have not come half as far as the furthest are left out.</p>"
        f"<img src='data:image/png;base64,{picture}' alt='Curves of all tasks'>"
        + "".join(f"<table>{table}</table>" for table in tables if table),
    )
