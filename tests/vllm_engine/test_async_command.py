"""`tether llm train --rollouts vllm-async` with a real vLLM, and what becomes of it when a part is killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_run import (
    finish,
    gone,
    printed,
    processes_of,
    server_of,
    started,
    steps,
    wait_for_step,
    wait_until,
    worker_of,
)

from tether.experiments import RunFolder
from tether.llm.models import load_model_and_tokenizer


def _rows(output: Path) -> list[dict[str, Any]]:
    return list(RunFolder.open(output).metrics())


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0.0, 1e-4), ("bfloat16", 1e-4, 0.05)])
def test_trains_around_what_the_server_reports(tmp_path: Path, dtype: str, least: float, most: float) -> None:
    output = tmp_path / "run"
    said = finish(output, "--vllm-dtype", dtype, "--learning-rate", "1e-2")
    assert "vLLM answers" in said
    rows = _rows(output)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    found = [row["sampler_mismatch"] for row in rows]
    assert max(found) < most, found
    assert found[0] >= least, found  # later the policy may be all but sure of a token, however it is rounded
    assert all(row["lag"] <= 4 for row in rows)
    assert max(row["lag"] for row in rows) >= 1
    assert max(row["kl_max"] for row in rows) > 10 * max(found)  # the network moved away from its sampler
    assert [line["step"] for line in RunFolder.open(output).evals()] == [0, 6]
    load_model_and_tokenizer(output / "model")
    assert not [p for p in psutil.process_iter() if str(output) in " ".join(_command_line(p))]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def test_the_clip_trains_by_the_same_command(tmp_path: Path) -> None:
    finish(tmp_path / "run", "--method", "clip", "--steps", "2")
    rows = _rows(tmp_path / "run")
    assert all("kl_mean" in row and "clipped" in row for row in rows)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_killed_or_stops_is_named_and_the_run_resumes(
    tmp_path: Path, how: signal.Signals
) -> None:
    output = tmp_path / "run"
    with started(output, "--steps", "400") as run:
        wait_for_step(output, 5, run)
        server = server_of(run)
        for process in server:
            process.send_signal(how)
        took = wait_until(lambda: "did not answer" in printed(output), 90, printed(output)[-2000:])
        assert took < 60
        assert run.wait(60) == 1
        assert "What writes the responses has stopped" in printed(output)
        assert "Then continue with --resume" in printed(output)
        wait_until(lambda: gone(server), 30, "the server is still there")
    _goes_on(output)


def test_a_killed_worker_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with started(output, "--steps", "400") as run:
        wait_for_step(output, 5, run)
        server = server_of(run)
        worker_of(run).kill()
        assert run.wait(90) == 1
        assert "has ended" in printed(output)
        wait_until(lambda: gone(server), 30, "the server is still there")
    _goes_on(output)


def test_nothing_outlives_a_killed_trainer_and_the_run_resumes(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with started(output, "--steps", "400") as run:
        wait_for_step(output, 5, run)
        left = [*server_of(run), *processes_of(run, "serve_child"), worker_of(run)]
        run.kill()
        wait_until(lambda: gone(left), 40, str(left))
    _goes_on(output)


def _goes_on(output: Path) -> None:
    """From the last checkpoint, two updates."""
    before = RunFolder.open(output).checkpoints()[-1].step
    assert before >= 4
    finish(output, "--resume", "--steps", str(before + 2))
    assert steps(output) == before + 2
    assert RunFolder.open(output).finished
