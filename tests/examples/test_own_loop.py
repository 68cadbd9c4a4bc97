"""The example a researcher starts from runs, learns, and stays in the region."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import REPOSITORY, load_script

EXAMPLE = REPOSITORY / "examples" / "own_loop.py"


@pytest.fixture(scope="module")
def own_loop() -> object:
    return load_script(EXAMPLE)


def test_the_loop_learns_well_beyond_guessing(own_loop, capsys):
    accuracies = own_loop.train(rollouts=70)
    chance = 1 / own_loop.DIGITS
    assert accuracies[0] == pytest.approx(chance, abs=0.05)
    assert sum(accuracies[-5:]) / 5 > 2 * chance
    assert "projected" in capsys.readouterr().out


def test_it_needs_nothing_but_torch_and_the_core():
    code = (
        f"import runpy, sys; runpy.run_path({str(EXAMPLE)!r})['train'](rollouts=1);"
        "heavy = {'transformers', 'trl', 'datasets', 'matplotlib', 'scipy', 'gymnasium'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
