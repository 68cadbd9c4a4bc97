"""What the speed of robots' training is read off: the later iterations of a real one."""

from __future__ import annotations

import json

import pytest

from benchmarks import robot_progress, robot_speed
from tether.episodic.curves import markdown_table


def test_the_later_half_of_a_training_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"episodes": 4, "evaluation_episodes": 2}
    monkeypatch.setitem(robot_speed.CASES, "jump", ("hopper-jump-quick", small, 3600, 1.0))
    rows = robot_speed.measure("jump", 7)
    assert len(rows) == 3
    for row in rows:
        parts = row["sampling_seconds"] + row["policy_seconds"] + row["critic_seconds"]
        assert 0 < parts < row["seconds"]
        assert row["processor"] > 0
    found = robot_speed.summary("jump", [rows, [row | {"seconds": 2.0} for row in rows]])
    assert found["hours"][1] == pytest.approx(2.0)
    assert found["policy_seconds"] == pytest.approx(sum(row["policy_seconds"] for row in rows) / 3)


def test_the_page_shows_what_was_measured() -> None:
    measured = json.loads(robot_speed.RESULTS.read_text(encoding="utf-8"))
    assert measured.keys() == robot_speed.CASES.keys()
    page = robot_progress.PAGE.read_text(encoding="utf-8")
    assert markdown_table(robot_speed.table(measured)) in page
