"""Runs in the smallest environment: the command that makes them, and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tether.cli import main
from tether.experiments import RunFolder

POINT = "tether/PointReach-v0"
TIMES = {"time_s", "sampling_seconds", "critic_seconds", "policy_seconds"}


def tether(*arguments: str) -> int:
    """The command line; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def content(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics and evaluations without the times."""
    folder = RunFolder.open(run)
    lines = folder.metrics(), folder.evals()
    metrics, evals = ([{k: v for k, v in row.items() if k not in TIMES} for row in rows] for rows in lines)
    return metrics, evals
