"""Several training runs at a time, each in a process of its own, watched through their run folders."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.errors import TetherError
from tether.experiments.progress import SeveralRuns
from tether.experiments.runs import RunFolder

_SECONDS_BETWEEN_LOOKS = 0.5
_LINES_OF_A_FAILURE = 15


class RunFailedError(TetherError, RuntimeError):
    """A training process ended before its run was finished."""


@dataclass(frozen=True)
class Job:
    """A command that trains into a run folder and continues what it finds there."""

    name: str
    """What the display calls it."""
    command: tuple[str, ...]
    """Program and arguments."""
    folder: Path
    """The run folder it writes."""
    steps: int
    """How many steps it will do."""

    @property
    def log(self) -> Path:
        """Where its output goes: beside the run folder."""
        return self.folder.with_name(self.folder.name + ".log")

    def finished(self) -> bool:
        """Whether its run is complete."""
        return (self.folder / "config.json").is_file() and RunFolder.open(self.folder).finished


def run_jobs(jobs: Sequence[Job], *, at_once: int, environment: Mapping[str, str] | None = None) -> None:
    """Run what is not finished yet, `at_once` at a time, and show how far each is.

    If one fails or the caller is interrupted, the others are asked to save and stop before the
    error is raised; the same call continues them.

    Args:
        jobs: what to run, in this order; finished runs are skipped.
        at_once: processes at a time.
        environment: variables for the processes, besides the present ones.

    Raises:
        RunFailedError: naming the run, with the last lines it printed.
    """
    waiting = [job for job in jobs if not job.finished()]
    running: dict[Job, subprocess.Popen[bytes]] = {}
    with SeveralRuns({job.name: (job.folder, job.steps) for job in jobs}) as display:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    running[job] = _start(job, environment or {})
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                display.look()
                for job in [job for job, process in running.items() if process.poll() is not None]:
                    _check_end(job, running.pop(job).returncode)
        finally:
            _stop(running.values())
        display.look()


def _start(job: Job, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C reaches only us; we pass it on, once
        )


def _check_end(job: Job, code: int) -> None:
    if code == 0 and job.finished():
        return
    lines = job.log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = "\n".join(lines[-_LINES_OF_A_FAILURE:])
    raise RunFailedError(
        f"The run {job.name} in {job.folder} ended with exit code {code} before it was finished. Its last "
        f"lines:\n{last}\nAll of them are in {job.log}. The same command continues where it stopped."
    )


def _stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    remaining = list(processes)
    for process in remaining:
        process.terminate()
    for process in remaining:
        process.wait()
