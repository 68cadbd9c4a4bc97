"""Results of an evaluation as tables, for the terminal and the page."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tether.experiments.statistics import Interval
from tether.experiments.summary import format_gain, format_interval
from tether.llm.eval_config import PAGE_FILE, EvalConfig
from tether.llm.measures import Difference, Summary, TaskResult


def print_evaluation(config: EvalConfig, results: Sequence[TaskResult]) -> None:
    """Show the results as tables, with 95 % intervals over problems, and where the page is."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for result in results:
        count = result.summaries["model"].problems
        table = Table(title=f"{result.task} ({config.split}, {count} problems)", title_justify="left")
        rows = table_rows(result, config)
        table.add_column("95 % intervals over problems")
        for name, _ in rows:
            table.add_column(name, justify="right", overflow="fold")
        for place, (heading, _) in enumerate(table_columns(result, config)):
            table.add_row(heading, *(cells[place] for _, cells in rows))
        console.print(table)
    if config.output is not None:
        console.print(f"Page: {(config.output / PAGE_FILE).resolve().as_uri()}", soft_wrap=True)


def table_rows(result: TaskResult, config: EvalConfig) -> list[tuple[str, list[str]]]:
    """Rows of the table: what it is about, and its cells; the difference of two models comes last."""
    names: dict[str, str] = {**config.models}
    if result.difference is not None:
        names["difference"] = "model less baseline"
    columns = table_columns(result, config)
    return [(name, [cells[side] for _, cells in columns]) for side, name in names.items()]


def table_columns(result: TaskResult, config: EvalConfig) -> list[tuple[str, dict[str, str]]]:
    """Columns of the table: heading, and text by side (and ``"difference"``)."""
    columns: list[tuple[str, dict[str, str]]] = []

    def add(heading: str, of: Callable[[Any], Interval | None]) -> None:
        cells = {
            side: format_interval(of(summary), fraction=True) for side, summary in result.summaries.items()
        }
        if result.difference is not None:
            cells["difference"] = format_gain(of(result.difference), fraction=True)
        columns.append((heading, cells))

    if config.samples:
        add(f"success, avg@{config.samples}", lambda summary: summary.success)
        for k in config.ks:
            if k > 1:
                add(f"pass@{k}", functools.partial(_pass_at, k))
    if config.greedy:
        add("greedy", lambda summary: summary.greedy)
    for heading, name in (("reward", "reward"), ("cut off", "truncated"), ("tokens", "length")):
        columns.append((heading, _numbers(result, name)))
    return columns


def _pass_at(k: int, of: Summary | Difference) -> Interval:
    return of.pass_at[k]


def _numbers(result: TaskResult, name: str) -> dict[str, str]:
    values = {side: getattr(summary, name) for side, summary in result.summaries.items()}
    share = name == "truncated"
    cells = {side: f"{100 * value:.1f} %" if share else f"{value:.3g}" for side, value in values.items()}
    return cells | {"difference": ""}
