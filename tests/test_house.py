"""What the house promises of itself: the objective, each default and each range check stand in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tether"
# A rival with a bound of its own, from its own paper.
OF_RIVALS = {"losses/trm.py"}


def places(pattern: str) -> list[str]:
    """The files of the package in which a pattern occurs, once for each time it does."""
    return [
        name
        for file in sorted(SOURCE.rglob("*.py"))
        if (name := file.relative_to(SOURCE).as_posix()) not in OF_RIVALS
        for _ in re.findall(pattern, file.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(
    "declaration",
    [
        r"kl_bound: float = 0\.05",
        r"alpha: float = 1\.0",
        r"top_k: int = 64",
        r"mass: float = 1 - 1e-5",
        r'support: \w+ = "exact"',
        r'region: \w+ = "token"',
    ],
)
def test_a_default_of_troll_is_written_down_once(declaration: str) -> None:
    assert places(declaration) == ["settings.py"]


@pytest.mark.parametrize(
    "refusal",
    [
        "positive number of nats",
        "alpha must not be negative",
        "integer of at least 1, got {",
        r"mass must lie in",
    ],
)
def test_a_range_of_troll_is_checked_once(refusal: str) -> None:
    assert places(re.escape(refusal)) == ["settings.py"]


def test_the_objective_of_troll_is_written_down_once() -> None:
    assert places(r"\+ (\w+\.)?(troll_)?alpha \* ") == ["losses/troll.py"]
