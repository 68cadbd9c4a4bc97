"""The example of what a robot needs besides a policy runs, and shows what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import load_script


def test_it_draws_limits_via_points_and_replanning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_script("examples/robot_motion.py").main(tmp_path, iterations=2)
    said = capsys.readouterr().out
    slower, speed = re.search(r"([\d.]+) times slower: ([\d.]+) m/s", said).groups()
    assert float(slower) > 1
    assert 0 < float(speed) <= 1.0  # the limit, unless that of the acceleration is met first
    assert float(re.search(r"differs by (\S+) m", said)[1]) < 1e-6
    assert (tmp_path / "motion.png").stat().st_size > 10_000
