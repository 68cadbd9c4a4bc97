"""Scores answers to any of several data sets of reasoning-gym, for a judge in tests: one server serves all.

It runs in the judge's process and imports the task's scorer by path, so that torch is not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

SCORES = Path(__file__).parents[2] / "src" / "tether" / "llm" / "tasks" / "reasoning_gym_scores.py"


def scorers(names: list[str]) -> Callable[[str, str, str], float | None]:
    """What the task's scorers give, at default settings, for a data set's name, a problem and an answer."""
    spec = importlib.util.spec_from_file_location("reasoning_gym_scores", SCORES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = {name: module.scorer(name, "{}") for name in names}
    return lambda name, problem, answer: made[name](problem, answer)
