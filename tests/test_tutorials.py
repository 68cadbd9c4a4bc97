"""The tutorials run as they stand, each within seconds."""

from __future__ import annotations

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from scripts import REPOSITORY

TUTORIALS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.py"))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_draws(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(plt, "show", lambda: drawn.extend(plt.get_fignums()))
    plt.switch_backend("agg")
    runpy.run_path(str(path))
    plt.close("all")
    assert drawn
    printed = capsys.readouterr().out
    assert printed.strip()
    assert "nan" not in printed


def test_there_are_six() -> None:
    assert len(TUTORIALS) == 6
