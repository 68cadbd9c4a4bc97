"""vLLM in the trainer's process, on a CPU; each training has a process of its own, as an engine stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parent / "colocated_worker.py"

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


@pytest.fixture
def environment() -> dict[str, str]:
    """Of a process that starts an engine."""
    return {**os.environ, **ENVIRONMENT}


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """train(case, setting=..., ...) -> what `colocated_worker.py` says of a training."""

    def run(case: str = "plain", **settings: Any) -> dict[str, Any]:
        out = tmp_path / f"{case}.json"
        finished = subprocess.run(
            [sys.executable, str(WORKER), case, json.dumps(settings), str(tmp_path), str(out)],
            env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert out.is_file(), finished.stdout[-3000:] + finished.stderr[-3000:]
        result: dict[str, Any] = json.loads(out.read_text())
        return result

    return run
