"""The example of what a robot needs besides a policy runs, and shows what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import load_script
from tether.episodic.plans import MotionLimits


def test_it_draws_limits_via_points_and_replanning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_script("examples/robot_motion.py")
    example.LIMITS = MotionLimits(velocity=0.05)  # for a policy that has hardly learned to move
    example.main(tmp_path, iterations=2)
    said = capsys.readouterr().out
    slower, speed = re.search(r"([\d.]+) times slower: ([\d.]+) m/s", said).groups()
    assert float(slower) > 1
    assert float(speed) == 0.05
    assert "Or refused: The motion is too fast for the robot" in said
    assert float(re.search(r"miss it by (\S+) m", said)[1]) < 0.01  # which lies 0.15 m off
    assert float(re.search(r"the next step is (\S+) m off", said)[1]) < 0.01
    differences = re.findall(r"(torch|ONNX Runtime) differs by (\S+) m", said)
    assert [name for name, _ in differences] == ["torch", "ONNX Runtime"]
    assert all(float(difference) < 1e-6 for _, difference in differences)
    assert (tmp_path / "motion.png").stat().st_size > 10_000
