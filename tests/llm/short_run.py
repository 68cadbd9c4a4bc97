"""A short training run of the embedded model, in this process or its own, and how to compare two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from tether.experiments.peak_memory import MEMORY_METRICS
from tether.llm.config import TrainConfig

SETTINGS = {
    "task": "arithmetic",
    "steps": 16,
    "updates_per_rollout": 4,
    "prompts_per_rollout": 4,
    "responses_per_prompt": 4,
    "eval_every": 8,
    "eval_problems": 12,
    "save_every": 4,
    "learning_rate": 1e-3,
    "threads": 1,
    "device": "cpu",
}


def config(output: Path, **changes: object) -> TrainConfig:
    return TrainConfig(output=output, **{**SETTINGS, **changes})


def command(output: Path, *more: str) -> list[str]:
    options = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "tether", "llm", "train", "--output", str(output), *options, *more]


def start(output: Path, *more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(output, *more), stdout=subprocess.DEVNULL, env=environment)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def steps_logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def record(folder: Path) -> dict[str, object]:
    """Everything a run wrote that should not depend on the clock or on what else the process holds."""

    def lines(path: Path) -> list[dict[str, object]]:
        of_the_machine = ("time_s", "step_seconds", "processor_seconds", *MEMORY_METRICS)
        return [
            {name: value for name, value in json.loads(line).items() if name not in of_the_machine}
            for line in path.read_text().splitlines()
        ]

    return {
        "metrics": lines(folder / "metrics.jsonl"),
        "eval": lines(folder / "eval.jsonl"),
        "samples": {path.name: lines(path) for path in sorted((folder / "samples").iterdir())},
    }


def assert_same_run(folder: Path, reference: Path) -> None:
    assert record(folder) == record(reference)
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, reference))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
