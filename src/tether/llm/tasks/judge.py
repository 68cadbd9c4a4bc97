"""Checks that a model's text could drag out or crash, each in a process that is stopped when it must be."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from tether.errors import InvalidInputError, JudgeFailedError, JudgeTimeoutError, MissingDependencyError
from tether.experiments.jobs import usable_cores

_log = logging.getLogger(__name__)

_START_SECONDS = 120.0
_GRACE_SECONDS = 60.0  # what a loaded machine may add before the judge itself is taken for stuck
_PARALLEL = 2

Failure = Literal["timeout", "crash", "raised"]
"""Why a check gave no value: stopped in time; out of memory, too deep or ended; an exception."""


@dataclass(frozen=True)
class Outcome:
    """What came of one check: a value, or why there is none.

    >>> Outcome(value=3).get()
    3
    """

    value: Any = None
    """What the function gave."""
    failure: Failure | None = None
    """None where it gave something."""
    reason: str = ""
    """What failed and in which line, in words."""

    def get(self) -> Any:
        """The value.

        Raises:
            JudgeTimeoutError: The check was stopped at its time limit.
            JudgeFailedError: The function raised, or its process ended.
        """
        if self.failure is None:
            return self.value
        raise (JudgeTimeoutError if self.failure == "timeout" else JudgeFailedError)(self.reason)


class Judge:
    """Calls of one function, in a process of their own, each stopped at its time limit.

    Some checks of a model's answer take for ever or all memory, or end the process they run in. Here a
    server process imports the function once and forks a child for every call, so a call costs
    milliseconds, changes nothing for the next one, and can be ended. Any thread may ask, also in a fork
    of this process. Judges of the same function and setup share their server; it ends with the last of
    them, and with this process however that ends.

    Args:
        function: ``"package.module:name"``, or ``"/folder/file.py:name"``, imported by the server on this
            process's ``sys.path``, not here. Arguments and values are what JSON can hold, with NaN and
            infinities; integers above 4,300 digits must travel as text. What it prints is dropped.
        seconds: Time limit of one call, from its start; waiting for the server does not count.
        memory_limit: Bytes a call may take beyond what is loaded already.
        setup: None, or arguments: then the function is called with them once, in the server, and gives the
            function to be asked.

    Raises:
        InvalidInputError: A limit that is not positive.
        MissingDependencyError: (when first asked, or from `start`) the function cannot be imported, or the
            system cannot fork; says why.

    >>> with Judge("operator:truediv", seconds=10) as judge:
    ...     judge.ask(3, 4)
    0.75
    """

    def __init__(
        self,
        function: str,
        *,
        seconds: float = 2.0,
        memory_limit: int = 2 * 2**30,
        setup: Sequence[Any] | None = None,
    ) -> None:
        if not 0 < seconds < float("inf"):
            raise InvalidInputError(f"The time limit is {seconds} s; give a positive one.")
        if memory_limit < 1:
            raise InvalidInputError(f"The memory limit is {memory_limit} bytes; give a positive one.")
        self.function = function
        self.seconds = seconds
        self.memory_limit = memory_limit
        self.setup = None if setup is None else list(setup)
        self._server: _Server | None = None

    def start(self) -> None:
        """Start the server now, so that a function that cannot be imported is refused at once."""
        self._shared().start()

    def ask(self, *arguments: Any) -> Any:
        """Call the function.

        Raises:
            JudgeTimeoutError: It took longer than the limit.
            JudgeFailedError: It raised (the message says what, and in which line), or its process ended.
            InvalidInputError: JSON cannot hold the arguments.
        """
        return self.ask_many([arguments])[0].get()

    def ask_many(self, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Call the function with each of `calls`, a few at a time; the outcomes, in order."""
        if not calls:
            return []
        try:
            encoded = [json.dumps(list(arguments)) for arguments in calls]
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"JSON cannot hold the arguments of {self.function}: {error}.") from error
        outcomes = self._shared().judge(encoded, self.seconds, self.memory_limit)
        return [self._in_words(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Let go of the server, which ends when no other judge uses it; a later call starts another."""
        self._server = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _shared(self) -> _Server:
        if self._server is None:
            self._server = _server(self.function, self.setup)
        return self._server

    def _in_words(self, outcome: dict[str, Any]) -> Outcome:
        failure, reason = outcome.get("failure"), outcome.get("reason", {})
        if failure is None:
            return Outcome(outcome["value"])
        if failure == "timeout":
            return Outcome(None, failure, f"{self.function} took longer than {self.seconds:g} s.")
        return Outcome(None, failure, f"{self.function} gave no verdict: {_in_words(reason)}.")


def _in_words(reason: dict[str, str]) -> str:
    error, message, where = (reason.get(part, "") for part in ("error", "message", "where"))
    return ": ".join(filter(None, [error, message])) + (f" ({where})" if where else "")


class _Server:
    """One process that has imported one function; it answers one batch at a time."""

    def __init__(self, function: str, setup: list[Any] | None, path: list[str]) -> None:
        self.function = function
        self._job = {"function": function, "setup": setup, "path": path}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_at_exit: weakref.finalize[Any, Any] | None = None
        self._pending = b""

    def start(self) -> None:
        with self._conversation():
            self._running()

    def judge(self, calls: list[str], seconds: float, memory_limit: int) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        with self._conversation():
            for _ in range(2):  # once more where the server itself was ended, by whatever
                waiting = [number for number in range(len(calls)) if number not in found]
                if waiting:
                    self._converse(calls, waiting, found, seconds, memory_limit)
        lost = {"failure": "crash", "reason": {"message": "the process that runs the calls was ended, twice"}}
        return [found.get(number, lost) for number in range(len(calls))]

    def forget(self) -> None:
        """In a fork of the process that started the server: leave it to that one."""
        self._lock = threading.Lock()
        if self._process is not None:
            _close_pipes(self._process)
            self._process.returncode = 0  # not a child of this process
        if self._stop_at_exit is not None:
            self._stop_at_exit.detach()
        self._process = None

    def _converse(
        self,
        calls: list[str],
        waiting: list[int],
        found: dict[int, dict[str, Any]],
        seconds: float,
        memory_limit: int,
    ) -> None:
        """Send the waiting calls and collect outcomes until all are in or the server ends."""
        process = self._running()
        parallel = min(_PARALLEL, usable_cores())
        limits = json.dumps({"seconds": seconds, "memory_limit": memory_limit, "parallel": parallel})
        batch = ", ".join(calls[number] for number in waiting)
        request = f'{limits[:-1]}, "calls": [{batch}]}}\n'
        _write(process, request)
        for _ in waiting:
            line = self._line(seconds + _GRACE_SECONDS)
            if not line:
                self._stop()
                return
            answer = json.loads(line)
            found[waiting[answer["number"]]] = answer["outcome"]

    @contextlib.contextmanager
    def _conversation(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except BaseException:
                self._stop()  # cut off: the next one must not read the rest of this one's answers
                raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        if not hasattr(os, "fork"):
            raise MissingDependencyError(
                f"{self.function} is run in forked processes, which {sys.platform} lacks. Use Linux or macOS "
                "(on Windows: WSL)."
            )
        with tempfile.TemporaryFile() as errors:
            self._process = _launch(errors)
            # Ends the process when this object goes, and at exit.
            self._stop_at_exit = weakref.finalize(self, _end, self._process)
            _write(self._process, json.dumps(self._job) + "\n")
            line = self._line(_START_SECONDS)
            answer = json.loads(line) if line else {}
            if "ready" in answer:
                return self._process
            self._stop()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 1000))
            tail = errors.read().decode(errors="replace").strip()
        if "failed" in answer:
            reason = _in_words(answer["failed"])
        else:
            reason = (
                f"not ready in {_START_SECONDS:g} s" if line is None else tail or "its process ended unasked"
            )
        raise MissingDependencyError(f"{self.function} cannot be used: {reason}.")

    def _line(self, seconds: float) -> bytes | None:
        """The server's next line; nothing when it has ended, None when it is late."""
        assert self._process is not None
        source = _pipe(self._process.stdout).fileno()
        deadline = time.monotonic() + seconds
        blocks = [self._pending]
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while b"\n" not in blocks[-1]:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    _log.warning("The process that runs %s did not answer; it is ended.", self.function)
                    return None
                blocks.append(os.read(source, 2**20))
                if not blocks[-1]:
                    return b""
        line, _, self._pending = b"".join(blocks).partition(b"\n")
        return line

    def _stop(self) -> None:
        self._pending = b""
        self._process = None
        if self._stop_at_exit is not None:
            self._stop_at_exit()


_servers: weakref.WeakValueDictionary[str, _Server] = weakref.WeakValueDictionary()
_servers_lock = threading.Lock()


def _server(function: str, setup: list[Any] | None) -> _Server:
    path = [entry or os.getcwd() for entry in sys.path]
    key = json.dumps([function, setup, path, os.getcwd()])
    with _servers_lock:
        found = _servers.get(key)
        if found is None:
            found = _servers[key] = _Server(function, setup, path)
        return found


def _forget_servers() -> None:
    global _servers_lock
    _servers_lock = threading.Lock()  # another thread may have held it at the moment of the fork
    for server in list(_servers.values()):
        server.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_servers)


def _launch(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("judge_worker.py")), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,  # a fork of this process must not have half a message to write
        env={**os.environ, **one_thread},  # a process with threads must not fork
        start_new_session=True,  # Ctrl-C is for this process to handle
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _close_pipes(process)


def _write(process: subprocess.Popen[bytes], text: str) -> None:
    """Send the server something; that it has ended is noticed where its answer is read."""
    unsent = memoryview(text.encode())
    with contextlib.suppress(BrokenPipeError):
        while unsent:
            unsent = unsent[os.write(_pipe(process.stdin).fileno(), unsent) :]


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
