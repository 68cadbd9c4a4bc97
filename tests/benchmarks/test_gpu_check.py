"""`make gpu-check` without a GPU: all of it in small, and what it says when something is wrong."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.bench.sections import SECTIONS
from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.outcome import Figure, NotHere, Outcome, page
from benchmarks.gpu_check.pieces import PIECES, Piece
from benchmarks.gpu_check.plan import Plan, make_plan

from tether.llm.config import TrainConfig


def test_the_dry_run_goes_through_every_piece(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dry-run", "--output", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "cpu--dry-run.json").read_text())
    assert [piece["piece"] for piece in numbers["pieces"]] == list(PIECES)
    needs = {"kernels": sys.platform == "linux"}
    for piece in numbers["pieces"]:
        assert piece["status"] == ("ran" if needs.get(piece["piece"], True) else "not run"), piece["words"]
        assert all(figure["met"] for figure in piece["figures"])
        assert any(figure["bar"] is not None for figure in piece["figures"]) or piece["status"] == "not run"
    text = (tmp_path / "cpu--dry-run.md").read_text()
    for line in (
        "Bars missed: 0. Pieces that failed: none.",
        "| TROLL: steps with finite loss and gradient | 4 | >= 4 | met |",
        "| largest divergence that the loss saw / bound | 1 | <= 1.001 | met |",
        "| tests of the kernels that fail | 0 | <= 0 | met |",
        "| sections that failed or had no time | 0 | <= 0 | met |",
    ):
        assert line in text
    assert "failed or below a bar: nothing" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_check.main(["--output", str(tmp_path)]) == 2
    assert "needs a CUDA device" in (said := capsys.readouterr().err)
    assert "--dry-run" in said
    assert not list(tmp_path.iterdir())


def _raise(error: BaseException) -> list[Figure]:
    raise error


def test_a_missed_bar_or_a_failure_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = {
        "breaks": lambda plan: _raise(RuntimeError("the device is gone")),
        "leaves": lambda plan: _raise(SystemExit("gradient off by 1")),
        "lacks": lambda plan: _raise(NotHere("there is one GPU.")),
        "slow": lambda plan: [
            Figure("a / b", 1.2, 1.1),
            Figure("c", math.nan, 1.0),
            Figure("d", 3.0, 3, True),
        ],
    }
    monkeypatch.setattr(gpu_check, "PIECES", {name: Piece(run, 1) for name, run in pieces.items()})
    assert gpu_check.main(["--dry-run", "--output", str(tmp_path)]) == 1
    text = (tmp_path / "cpu--dry-run.md").read_text()
    assert "Bars missed: 2. Pieces that failed: breaks, leaves." in text
    for line in (
        "RuntimeError: the device is gone",
        "SystemExit: gradient off by 1",
        "## lacks: not run",
        "there is one GPU.",
        "| a / b | 1.2 | <= 1.1 | **MISSED** |",
        "| c | nan | <= 1 | **MISSED** |",
        "| d | 3 | >= 3 | met |",
    ):
        assert line in text
    assert "NaN" not in (tmp_path / "cpu--dry-run.json").read_text()  # which is not JSON
    monkeypatch.setattr(gpu_check, "PIECES", {"lacks": Piece(pieces["lacks"], 1)})
    assert gpu_check.main(["--dry-run", "--output", str(tmp_path)]) == 0  # no failure


def test_a_piece_that_hangs_or_dies_costs_no_more_than_its_time() -> None:
    late = gpu_check.run_apart("training", None, 0.2, dry=True)
    assert (late.status, late.words) == ("failed", "not done after 0.2 s")
    assert late.seconds < 60


def test_a_piece_whose_process_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    dead = gpu_check.run_apart("kernels", None, 60, dry=True)
    assert dead.status == "failed"
    assert dead.words.startswith("its process ended with 1")


def test_a_section_of_the_benchmark_that_fails_is_named_and_the_others_are_kept() -> None:
    plan = replace(make_plan(dry=True, model=None), bench=("root_search", "no_such_section"))
    figures = PIECES["bench"].run(plan)
    assert not figures[0].met
    assert "no_such_section (python -m benchmarks.bench: error: argument --only" in figures[0].name
    assert any(figure.name.startswith("Newton / published") for figure in figures[1:])
    late = PIECES["bench"].run(replace(plan, bench_seconds=0))
    assert [figure.value for figure in late] == [2]


def test_outcomes_survive_their_way_between_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file that the piece's process writes and the other reads."""
    monkeypatch.setattr(gpu_check, "PIECES", {"one": Piece(lambda plan: [Figure("a", 2.0, 1.0)], 1)})
    target = tmp_path / "outcome.json"
    assert gpu_check.main(["--dry-run", "--piece", "one", "--output", str(target)]) == 0
    read = Outcome.read(json.loads(target.read_text()))
    assert (read.piece, read.status, read.figures) == ("one", "ran", [Figure("a", 2.0, 1.0)])
    assert not read.good
    outcome = Outcome("piece", "ran", 1.5, [Figure("a", 2.0, 3.0, unit="s"), Figure("b", math.inf)], "words")
    assert Outcome.read(json.loads(json.dumps(outcome.as_json()))) == outcome
    assert "| a | 2 s | <= 3 | met |" in page({"device": "GPU"}, [outcome], "command")


def test_on_a_gpu_all_pieces_together_take_less_than_half_an_hour() -> None:
    plan = make_plan(dry=False, model=None)
    assert isinstance(plan, Plan)
    assert sum(piece.minutes for piece in PIECES.values()) < 30
    assert plan.bench_seconds < 60 * PIECES["bench"].minutes
    assert plan.training["steps"] == 20
    for method in ("troll", "clip"):  # which refuses what cannot be trained
        TrainConfig(**plan.training, method=method, rollouts="vllm", eval_every=0, save_every=0)
    assert set(plan.bench) <= set(SECTIONS)
