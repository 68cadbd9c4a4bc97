"""The kept runs of the studies as tables: a page for the site, and each method's rows for its own page."""

from __future__ import annotations

import csv
import functools
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether.cli import read_grid
from tether.experiments.comparison import comparison_data
from tether.llm.compare import baseline_label, finished_runs, grid_name, rows_of

ROOT = Path(__file__).parents[1]
GRIDS = ROOT / "benchmarks" / "studies"
TABLES = ROOT / "benchmarks" / "results" / "studies"

#: Grid -> what it asks.
STUDIES = {
    "a": "(a) Trust region by estimator, 8 updates a batch, learning rate 3e-4",
    "a-tuned": "(a) Trust region by estimator, 8 updates a batch, learning rate 1e-4",
    "b": "(b) Staleness, learning rate 3e-4",
    "b-curve": "(b) Staleness, the points between, learning rate 3e-4",
    "b-64": "(b) Other settings at 64 updates a batch, learning rate 3e-4",
    "b-tuned": "(b) Staleness, learning rate 1e-4",
    "c": "(c) GSPO's ratio, learning rate 3e-4",
    "c-tuned": "(c) GSPO's ratio, learning rate 1e-4",
    "d": "(d) TROLL's settings, 64 updates a batch, learning rate 3e-4",
    "e": "(e) Learning rates, 16 updates a batch",
    "f": "(f) Entropy and KL over training, 64 updates a batch, learning rate 3e-4",
    "g": "(g) Keeping the network inside, 64 updates a batch, learning rate 3e-4, validation problems",
    "g-gspo": "(g) TROLL on GSPO's ratio, 64 updates a batch, learning rate 3e-4, validation problems",
    "g-optimizer": "(g) SGD instead of Adam, 64 updates a batch, validation problems",
    "h-second-family": "(h) A second model family, learning rate 3e-4",
    "h-longer-task": "(h) The longer task, learning rate 1e-4",
    "h-longer-curve": "(h) The longer task, the points between, learning rate 1e-4",
    "h-longer-rivals": "(h) More rivals on the longer task, 64 updates a batch, learning rate 1e-4",
    "h-longer-gspo": "(h) GSPO's ratio on the longer task, learning rate 1e-4",
    "h-longer-why": "(h) Parts of TROLL on the longer task, 64 updates a batch, learning rate 1e-4",
    "h-longer-best": "(h) The longer task, settings searched on it, 64 updates a batch, learning rate 1e-4",
    "h-longer-tuned": "(h) The longer task, settings searched on it, 64 updates a batch, learning rate 3e-5",
    "h-shorter-rates": "(h) The short task at published defaults, 64 updates a batch",
    "h-shorter-tokens": "(h) The short task with eight times the responses, 64 updates a batch",
    "h-shorter-tokens-rivals": "(h) The same, more rivals, learning rate 3e-4",
    "h-second-family-longer": "(h) The second family on the longer task, learning rate 1e-4",
    "h-second-family-rivals": "(h) The same, more rivals, 64 updates a batch",
    "h-second-family-tokens": "(h) The second family, eight times the responses, 64 updates a batch",
    "j-1-first-family": "(j) Data 64 updates old, learning rate 1e-4",
    "j-2-second-family": "(j) The same, second family",
    "j-7-lag-64": "(j) Data 64 updates old, searched settings",
    "j-7-lag-16": "(j) Data 16 updates old, searched settings",
    "j-7-lag-04": "(j) Data 4 updates old, searched settings",
    "j-7-lag-01": "(j) Data at most an update old, searched settings",
    "j-8-second-lag-64": "(j) The second family, data 64 updates old, searched settings",
    "j-8-second-lag-16": "(j) The second family, data 16 updates old, searched settings",
    "j-8-second-lag-04": "(j) The second family, data 4 updates old, searched settings",
    "j-8-second-lag-01": "(j) The second family, data at most an update old, searched settings",
    "j-8-others-lag-64": "(j) The other methods, data 64 updates old, searched settings, learning rate 1e-4",
    "j-8-second-others-64": "(j) The same on the second family",
    "j-8-sequence-lag-64": "(j) GSPO's ratio with other trust regions, data 64 updates old",
    "j-8-second-sequence-64": "(j) The same on the second family",
    "j-9-engine": "(j) Data 16 updates old from a sampler in bfloat16, whole and truncated",
    "k-rates": "(k) SmolLM2-135M-Instruct on word problems: learning rates, validation problems",
    "k-words": "(k) SmolLM2-135M-Instruct on word problems",
    "k-code": "(k) SmolLM2-135M-Instruct on functions of one line",
    "k-gemma-rates": "(k) Gemma 3 270M on word problems: learning rates, validation problems",
    "k-gemma": "(k) Gemma 3 270M on word problems, 8 updates a batch",
    "k-vllm-lag-8": "(j) SmolLM2-135M-Instruct on word problems, from a vLLM server up to 8 updates behind",
    "l-step-back": "(l) A bound on the network, learning rate 3e-4, validation problems",
    "l-step-back-second-family": "(l) The same on the second family, test problems",
    "l-step-back-longer": "(l) The same on the longer task, learning rate 1e-4, test problems",
    "quick-a": "Small version of (a)",
    "quick-b": "Small version of (b)",
    "quick-c": "Small version of (c)",
    "search": "The search for settings, 16 updates a batch, validation problems",
    "search-64": "The same settings at 64 updates a batch, learning rate 3e-4, validation problems",
    "search-longer": "Settings on the longer task, 64 updates a batch, validation problems",
    "g-optimizer-search": "SGD's learning rates, validation problems",
    "j-3-search": "Settings for data 64 updates old, validation problems",
    "j-4-search-others": "The same for the other methods, validation problems",
    "j-5-search-lag-04": "Settings for data 4 updates old, validation problems",
    "j-5-search-lag-01": "Settings for data at most an update old, validation problems",
}

# One or two seeds a setting: for choosing, not for a method's own page.
_SEARCHES = (
    "search", "search-64", "search-longer", "g-optimizer-search", "j-3-search", "j-4-search-others",
    "j-5-search-lag-04", "j-5-search-lag-01", "k-rates", "k-gemma-rates",
)  # fmt: skip

# Rows of a method that a page shows unfolded.
_SHOWN_AT_ONCE = 10

_LABELS = {"TROLL": "troll", "clip": "ppo_clip", "no": "unclipped"}
_NOTE = (
    "In parentheses 95 % bootstrap intervals over seeds, which are too narrow for five. Verdicts are those "
    "of permutation tests at the 5 % level, not corrected for the number of comparisons."
)


def results_page() -> str:
    """Every table of every study that has finished runs."""
    parts = [
        "# Results of the studies",
        f"Written from the {run_count():,} kept runs; what they mean is on the page of "
        "[the studies](studies.md). Success on 400 problems, in %. " + _NOTE,
    ]
    for study, title in STUDIES.items():
        table = _table(study)
        if table is not None:
            parts += [f"## {title}", *_points(table)]
    return "\n\n".join(parts) + "\n"


def run_count() -> int:
    """How many runs the studies' tables hold; more with every `make study-...`."""
    found = set()
    for table in TABLES.glob("*.csv"):
        with table.open(newline="", encoding="utf-8") as file:
            found |= {(table.stem, row["grid"], row["run"]) for row in csv.DictReader(file)}
    return len(found)


def results_of(method: str) -> str:
    """A method's rows of every study that has any, searches apart; folded where they are many."""
    found: dict[str, list[str]] = {}
    for study, title in STUDIES.items():
        table = _table(study)
        if study in _SEARCHES or table is None:
            continue
        for row in table["rows"]:
            if method_of(row["method"]) == method:
                cells = [row["point"], *_cells(row, table["baseline"])]
                found.setdefault(title, []).append(_line(cells))
    if not found:
        return "Nothing yet: no finished run of a [study](../studies.md) has this method."
    fold = "???" if sum(map(len, found.values())) > _SHOWN_AT_ONCE else "???+"
    parts = []
    for title, lines in found.items():
        rows = textwrap.indent("\n".join([*_head(["at", *_COLUMNS]), *lines]), "    ")
        parts.append(f'{fold} note "{title} ({len(lines)} row{"s" * (len(lines) > 1)})"\n\n{rows}')
    return "\n\n".join([*parts, f"{_NOTE} See [the studies](../studies.md)."])


def method_of(label: str) -> str:
    """The loss behind a label such as ``TROLL kl_bound=0.2``.

    >>> method_of("TROLL kl_bound=0.2"), method_of("no trust region"), method_of("vespo")
    ('troll', 'unclipped', 'vespo')
    """
    first = label.split()[0]
    return _LABELS.get(first, first)


_COLUMNS = ["setting", "seeds", "final success", "over training", "less the baseline", "better", "verdict"]


def _table(grid: str) -> dict[str, Any] | None:
    """The comparison of a grid's finished runs; None if it has none."""
    return comparisons().get(grid)


@functools.cache
def comparisons() -> dict[str, dict[str, Any]]:
    """Grid -> the comparison of its finished runs, made from the tables under benchmarks/results/studies."""
    found = {}
    here = Path.cwd()
    os.chdir(ROOT)  # the grids name their files from there
    try:
        for file in sorted(GRIDS.rglob("*.yaml")):
            config = read_grid(file)
            comparison = finished_runs(config)
            if comparison.finished:
                metric, rows = rows_of(config, comparison)
                baseline = baseline_label(config, comparison)
                found[grid_name(config)] = comparison_data(metric, rows, baseline)
    finally:
        os.chdir(here)
    return found


def _points(table: dict[str, Any]) -> Iterator[str]:
    """A table a point of the grid, methods by success."""
    points: dict[str, list[dict[str, Any]]] = {}
    for row in table["rows"]:
        points.setdefault(row["point"], []).append(row)
    yield f"Baseline: {table['baseline'] or 'not run yet'}."
    for point, rows in points.items():
        rows.sort(key=lambda row: -row["final"]["value"])
        lines = "\n".join([*_head(_COLUMNS), *(_line(_cells(row, table["baseline"])) for row in rows)])
        yield f"**{point}**\n\n{lines}" if point else lines


def _cells(row: dict[str, Any], baseline: str | None) -> list[str]:
    against = row["against"]
    if against is None:
        tested = ["", "", "baseline" if row["method"] == baseline else "none yet"]
    else:
        verdict = f"{row['verdict']}, p {against['p_value']:.3f}"
        tested = [_percent(against["difference"], sign="+"), f"{against['better']['value']:.2f}", verdict]
    success = [_percent(row["final"]), _percent(row["over_training"])]
    return [row["method"], str(len(row["seeds"])), *success, *tested]


def _percent(interval: dict[str, float], sign: str = "") -> str:
    value, low, high = (f"{100 * interval[name]:{sign}.1f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _head(columns: list[str]) -> list[str]:
    return [_line(columns), _line(["---"] * len(columns))]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
