"""The folder of an evaluation: whose answers it holds, and that one command at a time writes there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.errors import CheckpointError
from tether.experiments import RunFolder, find_runs
from tether.llm.eval_config import EvalConfig
from tether.llm.evaluate import evaluate
from tether.llm.models import embedded_model_path


def settings(folder: Path, **changes: Any) -> EvalConfig:
    few = {"task": ("arithmetic",), "problems": 2, "samples": 1, "greedy": False, "token_scores": False}
    return EvalConfig(**{**few, "threads": 1, "device": "cpu", "output": folder, **changes})


def test_answers_of_the_model_that_was_there_before_are_not_taken_for_the_new_ones(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "eval"
    shutil.copytree(embedded_model_path(), model)
    config = settings(folder, model=str(model))
    evaluate(config)
    (model / "README.md").write_text("the same model, another card")
    shutil.copytree(model, tmp_path / "copy")
    shutil.rmtree(model)
    evaluate(config)  # everything is answered
    (tmp_path / "copy").rename(model)
    evaluate(config)

    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=rf"answers of another model: the files of {model} have"):
        evaluate(config)

    written = json.loads((folder / "config.json").read_text())
    del written["fingerprints"]
    (folder / "config.json").write_text(json.dumps(written))  # as an earlier version wrote it
    assert evaluate(config)[0].summaries["model"].problems == 2


def test_two_commands_do_not_measure_into_one_folder(tmp_path: Path) -> None:
    """The second would cut the first one's answers back to the batches that were whole when it began."""
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(CheckpointError, match="being written by another process"):
            evaluate(settings(tmp_path))
        other.communicate(b"\n")
    assert not (tmp_path / "config.json").exists()
    evaluate(settings(tmp_path))


def test_an_evaluation_among_runs_is_no_run(tmp_path: Path) -> None:
    """Nor is a saved model, whose configuration has the same name; a run whose file is damaged is named."""
    runs, measured, damaged = (tmp_path / name for name in ("runs", "runs/eval", "runs/damaged"))
    RunFolder.create(runs / "a", kind="llm", label="x", seed=0, settings={}).close()
    evaluate(settings(measured))
    shutil.copytree(embedded_model_path(), runs / "model")
    assert find_runs([runs]) == [runs / "a"]
    with pytest.raises(CheckpointError, match=rf"{measured} is an evaluation, .*its page is report\.html"):
        RunFolder.open(measured)
    with pytest.raises(CheckpointError, match=r"config\.json is not a run's configuration"):
        RunFolder.open(runs / "model")
    shutil.rmtree(runs / "a")
    with pytest.raises(CheckpointError, match=r"not a run folder.* Give the folder a training command wrote"):
        find_runs([runs])
    damaged.mkdir()
    (damaged / "config.json").write_text("{")
    assert find_runs([runs]) == [damaged]
