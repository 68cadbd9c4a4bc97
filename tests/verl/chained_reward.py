"""The chained task's check as verl's custom reward function."""

from __future__ import annotations

from typing import Any

from tether.llm.tasks.chained import ChainedTask

_TASK = ChainedTask()


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    return _TASK.verify(solution_str, ground_truth).reward
