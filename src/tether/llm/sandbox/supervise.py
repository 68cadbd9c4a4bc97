"""Watching one sandboxed program from outside: feeding, reading, limits, and its end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from typing import IO

from tether.errors import SandboxError
from tether.llm.sandbox.memory_watch import MemoryWatch, first_child
from tether.llm.sandbox.programs import Execution, Program, Status

_TICK = 0.02
_LAUNCH_SECONDS = 60.0
_END_SECONDS = 10.0
_CHUNK = 65_536
_SEEING = "As root in a container, run it with --cap-add SYS_PTRACE."


class Supervisor:
    """Follow a started launcher until the program's last process is gone, whatever the program does.

    It never waits for the program: streams are read and written as far as they go at once, and every
    20 ms the clock and the memory of all the program's processes are looked at. Too late, too large or
    too talkative, and process 1 of the program's namespace is killed, which makes the kernel end all
    others; the launcher ends after the last of them. The pipe it reports on is closed here, and `stop`, set
    from another thread, ends the program at once.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        status: int,
        program: Program,
        output_limit: int,
        stop: threading.Event,
    ) -> None:
        self._process = process
        self._program = program
        self._output_limit = output_limit
        self._stop = stop
        self._outputs = {"status": bytearray(), "stdout": bytearray(), "stderr": bytearray()}
        self._input = memoryview(program.stdin.encode("utf-8", "surrogatepass"))
        self._memory = MemoryWatch(process.pid, program.memory_limit)
        self._started: float | None = None
        self._verdict: tuple[Status, str] | None = None
        self._selector = selectors.DefaultSelector()
        self._status: IO[bytes] = os.fdopen(status, "rb", buffering=0)

    def follow(self) -> Execution:
        """Watch until the end and say what came of the program."""
        exited = os.pidfd_open(self._process.pid)
        try:
            self._register(exited)
            self._watch(exited)
        finally:
            self._end()
            ended = time.monotonic()
            self._drain()
            self._selector.close()
            os.close(exited)
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr, self._status):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        return self._result(ended)

    def _register(self, exited: int) -> None:
        streams = {"stdout": self._process.stdout, "stderr": self._process.stderr, "status": self._status}
        for name, stream in streams.items():
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, name)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._selector.register(self._process.stdin, selectors.EVENT_WRITE, "stdin")
        self._selector.register(exited, selectors.EVENT_READ, "exited")

    def _watch(self, exited: int) -> None:
        launch_deadline = time.monotonic() + _LAUNCH_SECONDS
        next_look = 0.0
        while self._verdict is None:
            for key, _ in self._selector.select(_TICK):
                if key.fd == exited:
                    return
                self._move(key)
            now = time.monotonic()
            if self._stop.is_set():
                self._verdict = ("killed", "the sandbox was closed")
            elif self._started is None:
                if now > launch_deadline:
                    self._verdict = ("killed", f"it did not start within {_LAUNCH_SECONDS:g} s")
            elif now - self._started > self._program.time_limit:
                self._verdict = ("timeout", f"it ran longer than {self._program.time_limit:g} s")
            elif now >= next_look:
                next_look = now + _TICK
                self._check_memory()

    def _move(self, key: selectors.SelectorKey) -> None:
        """Write or read as much as one stream takes or has at once; leave it when it is closed."""
        if key.data == "stdin":
            try:
                self._input = (
                    self._input[os.write(key.fd, self._input[:_CHUNK]) :] if self._input else self._input
                )
                open_still = bool(self._input)
            except BlockingIOError:
                open_still = True
            except BrokenPipeError:
                open_still = False
        else:
            open_still = self._read(key.fd, key.data)
        if not open_still:
            self._selector.unregister(key.fileobj)
            if key.data == "stdin":
                with contextlib.suppress(BrokenPipeError):
                    key.fileobj.close()  # type: ignore[union-attr]

    def _read(self, descriptor: int, name: str) -> bool:
        """Read once; say whether more may come."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        kept = self._outputs[name]
        if name == "status":
            kept += chunk
            if self._started is None and kept == b"ready":
                self._started = time.monotonic()
            return bool(chunk)
        room = self._output_limit - len(kept)
        kept += chunk[:room]
        if len(chunk) > room and self._verdict is None:
            self._verdict = ("killed", f"it wrote more than {self._output_limit} bytes to {name}")
        return bool(chunk)

    def _check_memory(self) -> None:
        """Stop the program when it holds more memory than it may."""
        try:
            over = self._memory.verdict()
        except PermissionError as error:
            self._verdict = ("killed", f"its memory could not be seen ({error}). {_SEEING}")
            return
        if over is not None:
            self._verdict = ("memory", over)

    def _end(self) -> None:
        """End what still runs and wait until the last process is gone."""
        if self._process.poll() is None:
            init = first_child(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                if init is None:
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    os.kill(init, signal.SIGKILL)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_END_SECONDS)

    def _drain(self) -> None:
        """Take what the pipes still hold; nobody is left to write more."""
        for name, stream in (
            ("status", self._status),
            ("stdout", self._process.stdout),
            ("stderr", self._process.stderr),
        ):
            assert stream is not None
            before = -1
            while before != (before := len(self._outputs[name])):
                if not self._read(stream.fileno(), name):
                    break

    def _result(self, ended: float) -> Execution:
        status_text = self._outputs["status"].decode(errors="replace")
        stderr = self._outputs["stderr"].decode(errors="replace")
        if status_text != "ready" or self._started is None or self._stop.is_set():
            detail = self._verdict[1] if self._verdict else ""
            reason = status_text.removeprefix("ready") or detail or stderr.strip()[-500:] or "no reason given"
            raise SandboxError(
                f"A sandboxed program could not be run (code {self._process.returncode}): {reason}. If it "
                "happens again, look at the limits on processes and memory this one runs under."
            )
        code = self._process.returncode
        verdict = self._verdict or _verdict_of(code, stderr)
        return Execution(
            status=verdict[0],
            stdout=self._outputs["stdout"].decode(errors="replace"),
            stderr=stderr,
            seconds=max(0.0, ended - self._started),
            exit_code=None if self._verdict else code,
            detail=verdict[1],
        )


def _verdict_of(code: int, stderr: str) -> tuple[Status, str]:
    """Judge a program that ended by itself."""
    if code == 0:
        return "ok", ""
    if code == 128 + signal.SIGXCPU:
        return "timeout", "it used up its CPU time"
    if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return "memory", "it was refused memory"
    if code < 0 or 128 < code <= 128 + signal.NSIG:
        return "killed", f"signal {abs(code) % 128}"
    return "error", ""
