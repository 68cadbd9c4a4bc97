"""How many runs and rivals the page of the studies speaks of, beside the tables they are kept in."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import study_tables  # noqa: E402

STUDIES = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")


def test_the_page_of_results_says_how_many_runs_the_tables_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text("grid,run,step\na,clip,0\na,clip,8\na-tuned,clip,0\n")
    (tmp_path / "b.csv").write_text("grid,run,step\na,clip,0\n")
    monkeypatch.setattr(study_tables, "TABLES", tmp_path)
    monkeypatch.setattr(study_tables, "comparisons", dict)
    assert study_tables.run_count() == 3
    assert "Written from the 3 kept runs" in study_tables.results_page()


def test_the_studies_do_not_speak_of_more_runs_than_there_are() -> None:
    quoted = re.search(r"more than ([\d,]+) runs", STUDIES)
    assert quoted is not None
    assert 0 <= study_tables.run_count() - int(quoted[1].replace(",", "")) < 1000


def test_every_rival_that_the_studies_speak_of_has_five_seeds() -> None:
    seeds: dict[tuple[str, str], set[str]] = {}
    for table in study_tables.TABLES.glob("*.csv"):
        with table.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                seeds.setdefault((row["grid"], row["label"]), set()).add(row["seed"])
    methods: dict[str, int] = {}  # the most seeds of one of its settings
    for (_, label), found in seeds.items():
        name = study_tables.method_of(label.replace(",", ""))
        methods[name] = max(methods.get(name, 0), len(found))
    rivals = {name: most for name, most in methods.items() if name not in ("troll", "ppo_clip", "unclipped")}
    assert {name: most for name, most in rivals.items() if most < 5} == {}
    assert len(rivals) == 19
    assert "nineteen published rivals" in STUDIES
