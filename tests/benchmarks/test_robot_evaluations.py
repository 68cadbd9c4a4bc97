"""Evaluations of long robot runs: the page has their table, and another is kept beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import robot_evaluations, robot_progress
from tether.episodic.curves import markdown_table


def test_the_page_shows_every_evaluation_of_a_known_run() -> None:
    page = robot_progress.PAGE.read_text(encoding="utf-8")
    assert markdown_table(robot_evaluations.rows(robot_evaluations.kept())) in page
    runs = robot_progress.measured()
    for one in robot_evaluations.kept():
        run = runs[one["grid"].partition(", rates")[0], one["run"]]
        assert one["env"] == run.config.settings["env_id"]
        assert one["episodes"] == 304


def test_one_more_is_kept_in_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = robot_evaluations.kept()[0]
    monkeypatch.setattr(robot_evaluations, "KEPT", tmp_path / "evaluations.json")
    robot_evaluations.KEPT.write_text("[]")
    evaluation = {name: value for name, value in first.items() if name != "grid"}
    for step, episodes in ((20, 16), (3, 16), (20, 304)):
        robot_evaluations.add("b", {**evaluation, "step": step, "episodes": episodes})
    robot_evaluations.add("a", {**evaluation, "run": "tce-seed10", "step": 3})
    robot_evaluations.add("a", {**evaluation, "run": "tce-seed2", "step": 3})
    found = [(one["grid"], one["run"], one["step"], one["episodes"]) for one in robot_evaluations.kept()]
    assert found == [
        ("a", "tce-seed2", 3, 304), ("a", "tce-seed10", 3, 304),
        ("b", first["run"], 3, 16), ("b", first["run"], 20, 304),
    ]  # fmt: skip
