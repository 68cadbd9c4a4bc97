"""The sandbox itself: a context manager that runs programs, and a pool of them."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import logging
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tether.errors import ConfigError, InvalidInputError, MissingDependencyError, SandboxError
from tether.experiments.jobs import usable_cores
from tether.llm.sandbox.backends import (
    BACKENDS,
    DEVICES,
    ENVIRONMENT,
    LAUNCHER,
    Backend,
    Visible,
    command,
    drop_to,
    interpreter,
    visible,
)
from tether.llm.sandbox.cgroup import Group, group
from tether.llm.sandbox.programs import Execution, Program
from tether.llm.sandbox.supervise import Supervisor
from tether.llm.sandbox.syscalls import compiled_filter
from tether.llm.sandbox.trial import PROCESSES, REMEDY, try_to_escape

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
_NONE_OF = ("RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO")


class Sandbox:
    """Run Python programs nobody has read, so that they can harm neither the host nor each other.

    Every program runs in a process tree of its own: without network, seeing a read-only root that holds
    the interpreter and shared libraries only, with an empty private ``/tmp``, a fixed environment, no
    descriptor but its three streams, and limits on time, memory, processes, files and output. When it
    ends, for whatever reason, the kernel ends every process it started before `run` returns.

    Where bubblewrap is installed it isolates the programs, elsewhere Tether's own launcher does with Linux
    namespaces; both with a filter of system calls. Which one works is found out by trial, once. Where
    neither does, opening the sandbox fails.

    Args:
        workers: Programs that run at a time; by default one a usable processor.
        backend: ``"bubblewrap"`` or ``"namespaces"``; by default the first that works.
        processes: Processes and threads of one program, its first one included.
        file_size: Bytes of one file.
        folder_size: Bytes of all files of one program. They live in memory and count as such.
        open_files: Descriptors of one process.
        output_limit: Bytes of standard output, and of standard error, before a program is stopped.
        readable: More files and folders that programs may read, such as a folder of packages.

    Raises:
        ConfigError: An unknown backend, or a limit below its least.
        MissingDependencyError: (on opening) nothing here can isolate a program; says what to install.

    >>> with Sandbox(workers=2) as sandbox:
    ...     [done.status for done in sandbox.run_many(["print(1)", "1 / 0"])]
    ['ok', 'error']
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        backend: Backend | None = None,
        processes: int = 32,
        file_size: int = 16 * 2**20,
        folder_size: int = 64 * 2**20,
        open_files: int = 64,
        output_limit: int = 2**20,
        readable: Sequence[str | Path] = (),
    ) -> None:
        workers = usable_cores() if workers is None else workers
        least = {
            "workers": (workers, 1),
            "processes": (processes, 1),
            "file_size": (file_size, 2**16),
            "folder_size": (folder_size, 2**20),
            "open_files": (open_files, 16),
            "output_limit": (output_limit, 1),
        }
        for name, (value, minimum) in least.items():
            if value < minimum:
                raise ConfigError(f"{name} is {value}, below its least, {minimum}. Raise it.")
        if backend is not None and backend not in BACKENDS:
            raise ConfigError(f"Unknown sandbox backend {backend!r}. Use one of: {', '.join(BACKENDS)}.")
        self.workers = workers
        self.backend = backend
        self.output_limit = output_limit
        self._processes = processes
        self._file_size = file_size
        self._folder_size = folder_size
        self._open_files = open_files
        self._added = list(readable)
        self._stop = threading.Event()
        self._slots: queue.Queue[int] = queue.Queue()
        self._pool: ThreadPoolExecutor | None = None
        self._root: tempfile.TemporaryDirectory[str] | None = None
        self.files = Visible([], [], [])

    def open(self) -> Sandbox:
        """Get ready to run programs; entering the context does this.

        Raises:
            MissingDependencyError: Nothing here can isolate a program; says what to install.
        """
        if self._pool is not None:
            return self
        self.backend = check_backend(self.backend)
        self.start_workers()
        return self

    def start_workers(self) -> None:
        """Get ready without trying the backend, which is how a backend is tried."""
        self.files = visible(self._added)
        self._root = tempfile.TemporaryDirectory(prefix="tether-sandbox-")
        os.chmod(self._root.name, 0o755)
        self._stop = threading.Event()
        self._slots = queue.Queue()
        for slot in range(self.workers):
            self._slots.put(slot)
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="tether-sandbox")

    def close(self) -> None:
        """End every running program and free what the sandbox holds; `open` makes it usable again."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        self._stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        for _ in range(self.workers):  # programs that other threads run
            self._slots.get()
        if self._root is not None:
            self._root.cleanup()

    def __enter__(self) -> Sandbox:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self, code: str, stdin: str = "", time_limit: float = 5.0, memory_limit: int = 512 * 2**20
    ) -> Execution:
        """Run one program and wait for its end; any thread may call this.

        Args:
            code: Python source. It runs on the interpreter underneath Tether's own, without Tether's
                packages.
            stdin: What it finds on standard input.
            time_limit: Seconds on the clock from its start.
            memory_limit: Bytes the machine may hold for it, and of each process's address space.

        Returns:
            How it ended, what it wrote, and the seconds it took. What the program does, however hostile,
            never raises.

        Raises:
            InvalidInputError: A limit or an argument that makes no sense.
            SandboxError: The sandbox is not open, or the system refused to start the program three times.

        >>> with Sandbox() as sandbox:
        ...     sandbox.run("while True: pass", time_limit=0.2).status
        'timeout'
        """
        return self._run(Program(code, stdin, time_limit, memory_limit))

    def run_many(self, programs: Sequence[Program | str]) -> list[Execution]:
        """Run programs on all workers and give what came of them, in the programs' order.

        Raises:
            InvalidInputError: Something that is neither a `Program` nor source text.
            SandboxError: As for `run`.

        >>> with Sandbox() as sandbox:
        ...     done = sandbox.run_many([Program("print(input())", stdin=str(n)) for n in range(3)])
        ...     [one.stdout.strip() for one in done]
        ['0', '1', '2']
        """
        wanted = [Program(program) if isinstance(program, str) else program for program in programs]
        for program in wanted:
            if not isinstance(program, Program):
                raise InvalidInputError(f"run_many takes programs or text, not {type(program).__name__}.")
        if self._pool is None:
            raise SandboxError("The sandbox is not open. Use it in a with statement, or call open().")
        return list(self._pool.map(self._run, wanted))

    def _run(self, program: Program) -> Execution:
        if self._pool is None:
            raise SandboxError("The sandbox is not open. Use it in a with statement, or call open().")
        slot = self._slots.get()
        try:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return self._run_once(program)
                except (SandboxError, OSError) as error:
                    if attempt == _ATTEMPTS or self._stop.is_set():
                        raise _as_sandbox_error(error) from error
                    _log.warning("Starting a sandboxed program failed, trying again: %s", error)
                    time.sleep(0.5 * attempt)
            raise AssertionError("unreachable")
        finally:
            self._slots.put(slot)

    def _run_once(self, program: Program) -> Execution:
        with group(program.memory_limit, self._processes) as held:
            process, status = self._start(program, held)
            done = Supervisor(process, status, program, self.output_limit, self._stop).follow()
            if held is not None and held.exhausted():
                told = f"it reached {program.memory_limit} bytes"
                return replace(done, status="memory", exit_code=None, detail=told)
            return done

    def _start(self, program: Program, held: Group | None) -> tuple[subprocess.Popen[bytes], int]:
        """Start the launcher; give it and the reading end of the pipe it reports on."""
        assert self._root is not None
        assert self.backend is not None
        user = drop_to()
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, status_write)
            job_file = os.memfd_create("tether-job")
            stack.callback(os.close, job_file)
            try:
                _write_all(job_file, json.dumps(self._job(program, user)).encode())
                line = command(
                    self.backend, job_file, status_write, self.files, self._folder_size, user is not None
                )
                process = subprocess.Popen(
                    line if held is None else held.enter(line),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=(job_file, status_write),
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
            except BaseException:
                os.close(status_read)
                raise
        return process, status_read

    def _job(self, program: Program, user: int | None) -> dict[str, Any]:
        assert self._root is not None
        seconds = math.ceil(program.time_limit) + 1
        most = {
            "RLIMIT_AS": program.memory_limit,
            "RLIMIT_NPROC": self._processes,
            "RLIMIT_FSIZE": self._file_size,
            "RLIMIT_NOFILE": self._open_files,
            "RLIMIT_SIGPENDING": 256,  # timers count as well
            "RLIMIT_STACK": 8 * 2**20,
            **dict.fromkeys(_NONE_OF, 0),
        }
        limits = [
            ("RLIMIT_CPU", seconds, seconds + 1),
            *((name, value, value) for name, value in most.items()),
        ]
        return {
            "isolate": self.backend == "namespaces",
            "root": self._root.name,
            "launcher": LAUNCHER.read_text(encoding="utf-8"),
            "readable": self.files.readable,
            "hidden": self.files.hidden,
            "added": self.files.added,
            "devices": DEVICES,
            "folder_size": self._folder_size,
            "drop_to": user,
            "time_limit": program.time_limit,
            "limits": limits,
            "filter": base64.b64encode(compiled_filter()).decode(),
            "command": [interpreter(), "-s", "-P", "-B", "/tmp/program.py"],
            "environment": ENVIRONMENT,
            "code": program.code,
        }


def available_backend() -> Backend:
    """Say which backend works here: the first that contains a program trying to get out.

    Raises:
        MissingDependencyError: None does; the message says why each failed and what to install.

    >>> available_backend() in ("bubblewrap", "namespaces")
    True
    """
    return check_backend(None)


def check_backend(backend: Backend | None) -> Backend:
    """Give `backend`, or the first that works when it is None, after trying it once in this process."""
    reasons = {}
    for candidate in BACKENDS if backend is None else (backend,):
        reason = try_backend(candidate)
        if reason is None:
            return candidate
        reasons[candidate] = reason
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise MissingDependencyError(f"Programs cannot be isolated here ({told}). {REMEDY}")


@functools.cache
def try_backend(backend: Backend) -> str | None:
    """Why a backend does not contain a program here; None if it does.

    Raises:
        MissingDependencyError: The filter of system calls cannot be made.
    """
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    sandbox = Sandbox(1, backend=backend, processes=PROCESSES)
    sandbox.start_workers()
    try:
        return try_to_escape(sandbox)
    finally:
        sandbox.close()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)


def _as_sandbox_error(error: Exception) -> SandboxError:
    if isinstance(error, SandboxError):
        return error
    return SandboxError(f"A sandboxed program could not be started ({error}). Check the host's limits.")
