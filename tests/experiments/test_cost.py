"""What methods cost beside a baseline: by hand, seed with seed, and only where it can be said."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tether.experiments.comparison import Entry, compare_methods, comparison_tables, write_comparison
from tether.experiments.cost import cost_of, format_bytes
from tether.experiments.report import write_report
from tether.experiments.run_data import RunData
from tether.experiments.study_table import load_runs

Measure = Callable[..., list[RunData]]


@pytest.fixture
def measured(make_run: Callable[..., Path]) -> Measure:
    """Runs of a method: a seed for each pair of seconds a step and bytes at the peak."""

    def make(
        label: str, *costs: tuple[float, float], name: str = "resident_bytes_max", place: str = ""
    ) -> list[RunData]:
        runs = []
        for seed, (seconds, peak) in enumerate(costs):
            lines = [
                {"step_seconds": 0.5 * seconds, "processor_seconds": seconds, name: peak / 2},
                {"step_seconds": 1.5 * seconds, "processor_seconds": 3 * seconds, name: peak},
            ]
            evals = [{"step": 0, "success": 0.4}, {"step": 2, "success": 0.5}]
            path = make_run(f"{label}{place}-{name}-{seed}", lines, evals, label=label, seed=seed)
            runs += load_runs([path])
        return runs

    return make


def test_cost_by_hand(measured: Measure) -> None:
    clip = measured("clip", (1.0, 100e6), (3.0, 200e6), (2.0, 300e6))
    ours = measured("TROLL", (1.1, 150e6), (3.0, 300e6), (2.8, 480e6))
    cost = cost_of(ours, clip)
    assert cost.step_seconds == pytest.approx((1.1 + 3.0 + 2.8) / 3)
    assert cost.step_ratio == pytest.approx(1.1)  # of 1.1, 1.0, 1.4: each seed beside its own
    assert cost.processor_seconds == pytest.approx(2 * cost.step_seconds)
    assert cost.processor_ratio == pytest.approx(1.1)
    assert cost.memory_bytes == pytest.approx(310e6)
    assert cost.memory_ratio == pytest.approx(1.5)
    assert cost.memory_of == "resident_bytes_max"
    assert cost_of(clip, None).step_ratio is None


def test_seeds_only_one_has_and_memory_of_another_kind_are_not_compared(measured: Measure) -> None:
    ours = measured("TROLL", (2.0, 100e6), (9.0, 900e6))
    assert cost_of(ours, measured("clip", (1.0, 50e6))).step_ratio == pytest.approx(2.0)
    elsewhere = cost_of(ours, measured("clip", (1.0, 50e6), name="device_bytes_max"))
    assert elsewhere.memory_ratio is None
    assert elsewhere.step_ratio == pytest.approx(2.0)
    mixed = cost_of([*ours, *measured("TROLL", (1.0, 1e6), name="device_bytes_max")], None)
    assert (mixed.memory_of, mixed.memory_bytes) == (None, None)


def entries(point: str, runs: Sequence[RunData]) -> list[Entry]:
    return [Entry(run.config.label, point, run) for run in runs]


def shown(rows: Sequence[object], baseline: str | None) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    for table in comparison_tables("success", rows, baseline):  # type: ignore[arg-type]
        console.print(table)
    return " ".join(console.export_text().split())


def test_table_json_and_page_show_it(measured: Measure, tmp_path: Path) -> None:
    clip, ours = measured("clip", (1.0, 1e9)), measured("TROLL", (1.25, 1.5e9))
    entries_ = [*entries("", ours), *entries("", clip)]
    metric, rows = compare_methods(entries_, "clip")
    text = shown(rows, "clip")
    assert "Cost of a step" in text
    assert "TROLL 1.25 1.25 2.5 1.25 1.5 GB 1.5" in text
    assert "clip 1 1 2 1 1 GB 1" in text
    assert "resident set of the process" in text
    data = json.loads(write_comparison(tmp_path / "comparison.json", metric, rows, "clip").read_text())
    assert data["rows"][0]["cost"] == {
        "step_seconds": pytest.approx(1.25), "step_ratio": pytest.approx(1.25), "memory_bytes": 1.5e9,
        "processor_seconds": pytest.approx(2.5), "processor_ratio": pytest.approx(1.25),
        "memory_of": "resident_bytes_max", "memory_ratio": pytest.approx(1.5),
    }  # fmt: skip
    folders = [entry.run.path for entry in entries_]
    page = write_report(folders, tmp_path / "report", comparison=(metric, rows, "clip")).read_text()
    assert "1.5 GB" in page
    assert "x 1.50" in page


def test_over_a_grid_multiples_are_averaged_as_factors(measured: Measure) -> None:
    ours = {"a": (2.0, 1e9), "b": (8.0, 4e9)}
    grid = [
        entry
        for point, cost in ours.items()
        for label, one in (("TROLL", cost), ("clip", (1.0, 1e9)))
        for entry in entries(point, measured(label, one, place=point))
    ]
    text = shown(compare_methods(grid, "clip")[1], "clip")
    assert "TROLL 2 to 8 4 4 to 16 4 1 GB to 4 GB 2" in text  # sqrt(2 * 8), sqrt(1 * 4)
    assert "2 points of the grid" in text


def test_runs_that_measured_nothing_have_no_table_and_dashes(make_run: Callable[..., Path]) -> None:
    paths = [
        make_run(label, [{"loss": 1.0}], [{"step": 1, "success": 0.5}], label=label)
        for label in ("TROLL", "clip")
    ]
    runs = load_runs(paths)
    rows = compare_methods(entries("", runs), "clip")[1]
    assert "Cost of a step" not in shown(rows, "clip")
    assert rows[0].cost.memory_bytes is None


def test_sizes_in_words() -> None:
    assert [format_bytes(value) for value in (512, 999e6, 4.67e9)] == ["0.512 kB", "999 MB", "4.67 GB"]
