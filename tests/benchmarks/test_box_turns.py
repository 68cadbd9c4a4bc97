"""Success of Box Pushing by turns: how far they are from half a turn, counts, the table on the page."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks import box_turns, robot_progress
from tether.episodic.curves import markdown_table


def _contexts(yaws: np.ndarray, telling: str) -> np.ndarray:
    """Starts whose box and target are turned by yaws [N, 2]."""
    still = np.zeros((len(yaws), 7))
    poses = []
    for yaw in yaws.T:
        nothing = np.zeros_like(yaw)
        quaternion = np.cos(yaw / 2), nothing, nothing, np.sin(yaw / 2)
        turn = quaternion if telling == "quaternion" else (np.cos(yaw), np.sin(yaw), nothing)
        poses.append(np.stack([nothing, nothing, nothing, *turn], 1))
    return np.concatenate([still, *poses], 1)


@pytest.mark.parametrize("telling", ["quaternion", "direction"])
def test_a_start_counts_by_the_turn_that_is_nearer_to_half_a_turn(telling: str) -> None:
    yaws = np.array([[3.0, 0.1], [-0.2, -2.9], [1.0, -1.5]])
    found = box_turns.seam_distances(_contexts(yaws, telling))
    np.testing.assert_allclose(found, [np.pi - 3.0, np.pi - 2.9, np.pi - 1.5])


def test_mean_motions_are_counted_in_the_place_of_an_earlier_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(box_turns, "KEPT", tmp_path / "turns.csv")
    box_turns.KEPT.write_text(",".join(box_turns.COLUMNS))
    yaws = np.array([[3.0, 0.0], [3.0, 0.0], [0.3, 0.0], [2.5, 0.0]])
    each = tmp_path / "each.csv"
    for success in ((1, 1, 1, 1), (1, 0, 1, 0)):
        with each.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["policy", *(f"context_{i}" for i in range(21)), "success"])
            for policy in ("deterministic", "stochastic"):
                for context, succeeded in zip(_contexts(yaws, "quaternion"), success, strict=True):
                    rows.writerow([policy, *context, succeeded])
        box_turns.add("a run", "20", each)
    counts = [(row["from"], row["starts"], row["succeeded"]) for row in box_turns.kept()]
    assert counts == [("0.0", "2", "1"), ("0.4", "1", "0"), ("0.8", "0", "0"), ("1.2", "1", "1")]


def test_the_page_shows_what_was_counted() -> None:
    page = robot_progress.PAGE.read_text(encoding="utf-8")
    assert markdown_table(box_turns.table(box_turns.kept())) in page
