"""`tether llm train --rollouts vllm-async` in a process of its own, and which of its processes is which."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tether.experiments import RunFolder

SETTINGS = {
    "rollouts": "vllm-async", "max-lag": 4, "task": "chained", "steps": 6, "updates-per-rollout": 1,
    "prompts-per-rollout": 4, "responses-per-prompt": 4, "eval-every": 0, "eval-problems": 8,
    "save-every": 2, "learning-rate": 1e-3, "device": "cpu", "threads": 1, "preflight": "off",
}  # fmt: skip


def command(output: Path, *more: str) -> list[str]:
    options = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "tether", "llm", "train", "--output", str(output), *options, *more]


def finish(output: Path, *more: str) -> str:
    """Run it to its end; returns what it printed."""
    finished = subprocess.run(
        command(output, *more), env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=550, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-3000:]
    return finished.stdout + finished.stderr  # progress goes to the latter


def steps(output: Path) -> int:
    return len(RunFolder.open(output).metrics()) if (output / "metrics.jsonl").is_file() else 0


@contextlib.contextmanager
def started(output: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A run that is under way; nothing of it is left afterwards."""
    with (output.parent / "printed.txt").open("w") as printed:
        process = subprocess.Popen(
            command(output, *more), env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=printed,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def printed(output: Path) -> str:
    return (output.parent / "printed.txt").read_text()


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """How long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, what
        time.sleep(0.1)
    return time.monotonic() - began


def wait_for_step(output: Path, step: int, run: subprocess.Popen[str]) -> None:
    def there() -> bool:
        assert run.poll() is None, printed(output)[-3000:]
        return steps(output) >= step

    wait_until(there, 400, f"step {step}")


def processes_of(run: subprocess.Popen[str], word: str) -> list[psutil.Process]:
    """Those under a run whose command line holds a word."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in " ".join(process.cmdline()) or word in process.name():
                found.append(process)
    return found


def server_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The server, not what started it, and all that it has started."""
    (server,) = [p for p in processes_of(run, "api_server") if "serve_child" not in " ".join(p.cmdline())]
    return [server, *server.children(recursive=True)]


def worker_of(run: subprocess.Popen[str]) -> psutil.Process:
    (worker,) = [p for p in psutil.Process(run.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    return worker


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
