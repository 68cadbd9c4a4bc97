"""What the task refuses is what the audit of reasoning-gym's scorers found."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from benchmarks import reasoning_gym_audit as audit
from tether.llm.tasks import ReasoningGymTask
from tether.llm.tasks.reasoning_gym import _audit

SAMPLE = ["chain_sum", "coin_flip", "complex_arithmetic", "game_of_life_halting", "mini_sudoku", "puzzle24"]


def _results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((audit.RESULTS / "audit.json").read_text(encoding="utf-8"))
    return found


def test_the_task_reads_what_the_audit_of_every_data_set_found() -> None:
    results = _results()
    rows = results["data_sets"]
    assert set(rows) == set(DATASETS)
    assert _audit() == {
        "version": results["version"],
        "refused": audit.refused(rows),
        "no_partial_credit": audit.no_partial_credit(rows),
    }


def test_the_audited_version_is_the_one_the_tests_run_with() -> None:
    assert _results()["version"] == importlib.metadata.version("reasoning-gym")


def test_what_is_offered_pays_its_own_answer_and_no_wrong_one() -> None:
    rows = _results()["data_sets"]
    offered = {name: row for name, row in rows.items() if name not in _audit()["refused"]}
    assert all(row["own"] in (1.0, None) and row["wrong"][0] < 1 for row in offered.values())
    assert len(offered) > 90
    for name in offered:
        ReasoningGymTask(name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SAMPLE)
def test_the_audit_repeats(name: str) -> None:
    row, recorded = audit.audit(name), _results()["data_sets"][name]
    for found in (row, recorded):
        found.pop("stopped")  # depends on the machine's speed
    assert row == recorded


def test_the_page_shows_the_results() -> None:
    page = (audit.RESULTS / "README.md").read_text(encoding="utf-8")
    assert audit.table(_results()["data_sets"]) in page
