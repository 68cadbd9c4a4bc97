"""Several training runs at a time, each in a process of its own, watched through their run folders."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import TypeAlias

from tether.errors import ConfigError, TetherError
from tether.experiments import job_child
from tether.experiments.progress import Displayed, SeveralRuns
from tether.experiments.runs import RunFolder

_SECONDS_BETWEEN_REFRESHES = 0.5
_LINES_OF_A_FAILURE = 15


def usable_cores() -> int:
    """How many processor cores this process may use: `taskset` or a cluster's allotment can lower it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    weight: float = 1.0
    """How long it takes relative to others; what the time left is estimated from."""
    in_part: bool = False
    """Whether a checkpoint of its last step completes it, though the run itself goes on."""

    @property
    def log(self) -> Path:
        """Where its output goes: beside the run folder."""
        return self.folder.with_name(self.folder.name + ".log")

    def finished(self) -> bool:
        """Whether its run is complete."""
        if not (self.folder / "config.json").is_file():
            return False
        run = RunFolder.open(self.folder)
        last = run.latest_checkpoint() if self.in_part else None
        return run.finished or (last is not None and last.step >= self.steps)


def run_jobs(
    jobs: Sequence[Job],
    *,
    at_once: int,
    environment: Mapping[str, str] | None = None,
    keep_going: bool = False,
    seconds: float | None = None,
    on_finished: Callable[[Job], None] | None = None,
    preloaded: Sequence[str] = (),
    displayed: Displayed | None = None,
) -> list[Job]:
    """Run what is not finished yet, `at_once` at a time, and show how far it all is.

    If one fails or the caller is interrupted, the others are asked to save and stop before the
    error is raised; the same call continues them.

    Args:
        jobs: what to run, in this order; finished runs are skipped.
        at_once: processes at a time.
        environment: variables for the processes, besides the present ones.
        keep_going: after a failure go on with the others and raise at the end. If two runs fail and none
            has been finished, the cause is likely theirs all, and nothing more is started.
        seconds: after this long, ask those running to save and stop, and start no more.
        on_finished: called with each job as soon as its run is complete.
        preloaded: modules that every job imports. If given, a server imports them once and the jobs are
            forked from it, which saves runs of seconds a third of their time. Only for ``python -m`` commands
            that use no accelerator, whose driver does not survive a fork.
        displayed: which numbers of the runs are shown, and how.

    Returns:
        The jobs that are not finished because the time was up; empty otherwise.
    """
    if preloaded:
        preload(preloaded, environment or {})
    queue = _Queue(jobs, at_once, environment or {}, on_finished, ForkedProcess if preloaded else _start)
    deadline = None if seconds is None else time.monotonic() + seconds
    with SeveralRuns(
        {job.name: (job.folder, job.steps) for job in jobs},
        weights={job.name: job.weight for job in jobs},
        displayed=displayed,
    ) as display:
        try:
            while queue.unfinished:
                if deadline is not None and time.monotonic() >= deadline:
                    break
                queue.start()
                time.sleep(_SECONDS_BETWEEN_REFRESHES)
                display.refresh([job.name for job in queue.running])
                queue.collect()
                hopeless = len(queue.failures) > 1 and not queue.succeeded
                if queue.failures and (hopeless or not keep_going):
                    break
        finally:
            queue.stop()
        display.refresh([job.name for job in jobs])
    if queue.failures:
        raise RunFailedError("\n\n".join(queue.failures))
    return queue.unfinished


_Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"


class _Queue:
    """Jobs that wait, run or have ended."""

    def __init__(
        self,
        jobs: Sequence[Job],
        at_once: int,
        environment: Mapping[str, str],
        on_finished: Callable[[Job], None] | None,
        start: Callable[[Sequence[str], Path, Mapping[str, str]], _Process],
    ) -> None:
        self._waiting = [job for job in jobs if not job.finished()]
        self._at_once = at_once
        self._environment = environment
        self._on_finished = on_finished
        self._start = start
        self.running: dict[Job, _Process] = {}
        self.failures: list[str] = []
        self.succeeded = False
        if on_finished is not None:
            for job in jobs:
                if job not in self._waiting:
                    on_finished(job)

    @property
    def unfinished(self) -> list[Job]:
        return [*self.running, *self._waiting]

    def start(self) -> None:
        while self._waiting and len(self.running) < self._at_once:
            job = self._waiting.pop(0)
            job.log.parent.mkdir(parents=True, exist_ok=True)
            self.running[job] = self._start(job.command, job.log, self._environment)

    def collect(self) -> None:
        for job in [job for job, process in self.running.items() if process.poll() is not None]:
            self._note_end(job, self.running.pop(job).wait())

    def stop(self) -> None:
        """Ask what runs to save and stop; whatever was finished by then counts."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait()
        for job in list(self.running):
            if job.finished():
                self._note_end(job, self.running.pop(job).wait())

    def _note_end(self, job: Job, code: int) -> None:
        failure = _failure(job, code)
        if failure is not None:
            self.failures.append(failure)
            return
        self.succeeded = True
        if self._on_finished is not None:
            self._on_finished(job)


def _start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-IS", job_child.__file__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C reaches only us; we pass it on, once
        )


class ForkedProcess:
    """A ``python -m MODULE ...`` command in a fork, with what a queue uses of `subprocess.Popen`.

    Not where an accelerator is used: its driver does not survive a fork.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        if tuple(command[:2]) != (sys.executable, "-m") or len(command) < 3:
            raise ConfigError(
                f"Only python -m MODULE can be forked, got {' '.join(command[:3])!r}. Run it without preload."
            )
        context = multiprocessing.get_context("forkserver")
        variables = {**os.environ, **environment}
        self._process = context.Process(target=_run_module, args=(tuple(command[2:]), str(log), variables))
        self._process.start()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Ask it to save and stop."""
        if self._process.is_alive():
            self._process.terminate()

    def wait(self) -> int:
        """Wait until it has ended; its exit code."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def preload(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the server of forks, which imports these modules first, with `environment` besides ours."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r} to preload.", name=module)
    forkserver.set_forkserver_preload(list(modules))
    before = dict(os.environ)
    os.environ.update(environment)
    # A closed terminal tells its processes alike. Without the server we could not ask its forks to stop.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.clear()
        os.environ.update(before)


def _run_module(command: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """In the fork: become what `_start` would have started."""
    os.setsid()  # Ctrl-C reaches only the parent, which passes it on, once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    threading.Thread(target=_stop_after_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    output, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((output, 1), (output, 2), (nothing, 0)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    sys.argv = list(command)
    sys.path.insert(0, os.getcwd())  # as python -m has it
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _stop_after_parent() -> None:
    """Ask this process to save and stop once the one that wanted it, not the server, has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _failure(job: Job, code: int) -> str | None:
    """What to say of a process that ended before its run was finished."""
    if code == 0 and job.finished():
        return None
    lines = job.log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = "\n".join(lines[-_LINES_OF_A_FAILURE:])
    return (
        f"The run {job.name} in {job.folder} ended with exit code {code} before it was finished. Its last "
        f"lines:\n{last}\nAll of them are in {job.log}. The same command continues where it stopped."
    )
