"""Scores many answers to one problem in one call of the judge, for `benchmarks.reasoning_gym_audit`.

It runs in the judge's process and is imported by path, so that torch is not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable


def scorer(file: str, dataset: str, options: str) -> Callable[[str, list[str]], list[float]]:
    """The function that scores a list of answers: 0 also where the task would refuse or the scorer raises.

    Args:
        file: The path of Tether's own module of scores, whose ``scorer`` is used.
        dataset: The data set's name.
        options: Its settings, as that ``scorer`` takes them.
    """
    spec = importlib.util.spec_from_file_location("reasoning_gym_scores", file)
    assert spec is not None
    assert spec.loader is not None
    scores = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scores)
    score = scores.scorer(dataset, options)

    def one(problem: str, answer: str) -> float:
        try:
            return float(score(problem, answer) or 0.0)
        except Exception:  # noqa: BLE001 - what the task takes for a score of 0
            return 0.0

    return lambda problem, answers: [one(problem, answer) for answer in answers]
