"""The process behind `tether.llm.tasks.judge`; started by path, needs Python's standard library alone.

It imports one function, then answers batches of calls. Each call runs in a child of its own, forked from
the process that has everything imported, under limits of time and memory. Requests and answers are lines
of JSON. The process is single-threaded, so forking is safe, and it ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1  # prctl(2)
_WATCH_SECONDS = 1.0
_LONGEST_ANSWER = 2**24

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def main() -> None:
    """Import the function, say so, and answer until the parent closes the pipe or is gone."""
    parent = int(sys.argv[1])
    # The starting thread waits for the import; after that it may end, which would set the signal off.
    end_with(parent)
    requests, answers = _private_streams()
    reader = _Lines(requests, parent)
    try:
        check = load(**json.loads(reader.next()))
    except BaseException as error:
        _send(answers, json.dumps({"failed": describe(error)}).encode())
        raise SystemExit(1) from error
    _watch_instead()
    _silence()
    gc.collect()
    gc.freeze()  # else the children's collections would copy every page
    _send(answers, b'{"ready": true}')
    while True:
        Batch(check, answers, reader, **json.loads(reader.next())).run()


def load(function: str, setup: list[Any] | None, path: list[str]) -> Callable[..., Any]:
    """The function to be called: the one named, or what it gives for the arguments `setup`.

    It is named as ``package.module:name``, or by the path of a file, ``/folder/file.py:name``.
    """
    sys.path[:] = path
    place, _, name = function.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    found = getattr(module, name)
    if setup is not None:
        found = found(*setup)
    if not callable(found):
        raise TypeError(f"{function} is a {type(found).__name__}, not a function")
    called: Callable[..., Any] = found
    return called


def end_with(parent: int) -> None:
    """Let the kernel end this process when its parent is gone, also when it already is."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def describe(error: BaseException) -> dict[str, str]:
    """An exception's class, message and place: the last line in the file that was called."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(os.path.abspath(__file__))
    outside = [
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen ")
        and frame.filename != importlib.__file__
        and not (os.path.dirname(frame.filename) == ours and frame.filename.endswith("_worker.py"))
    ]
    called = [frame for frame in outside if frame.filename == outside[0].filename]
    where = f"{called[-1].filename}, line {called[-1].lineno}" if called else ""
    return {"error": type(error).__name__, "message": str(error)[:1000], "where": where}


@dataclass
class Running:
    """A call in progress."""

    number: int
    process: int
    deadline: float
    answer: bytes = b""


class Batch:
    """Calls to be answered, a few at a time."""

    def __init__(
        self,
        check: Callable[..., Any],
        answers: int,
        reader: _Lines,
        calls: list[list[Any]],
        seconds: float,
        memory_limit: int,
        parallel: int,
    ) -> None:
        self.check = check
        self.answers = answers
        self.reader = reader
        self.seconds = seconds
        self.memory_limit = memory_limit
        self.parallel = parallel
        self.waiting = deque(enumerate(calls))
        self.running: dict[int, Running] = {}

    def run(self) -> None:
        """Answer every call; stop them all when nobody waits for the answers any more."""
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.parallel:
                self._start(*self.waiting.popleft())
            soonest = min(call.deadline for call in self.running.values()) - time.monotonic()
            wait = min(max(soonest, 0.0), _WATCH_SECONDS)
            ready, _, _ = select.select([self.reader.source, *self.running], [], [], wait)
            if self.reader.source in ready or self.reader.orphaned():  # nothing is due before the answers
                for call in self.running.values():
                    _end(call.process)
                raise SystemExit
            for pipe in ready:
                self._read(pipe)
            now = time.monotonic()
            for pipe in [pipe for pipe, call in self.running.items() if call.deadline <= now]:
                self._finish(pipe, late=True)

    def _start(self, number: int, arguments: list[Any]) -> None:
        reading, writing = os.pipe()
        server = os.getpid()
        process = os.fork()
        if process == 0:
            os.close(self.answers)
            os.close(self.reader.source)
            answer_call(self.check, arguments, writing, server, self.seconds, self.memory_limit)
        os.close(writing)
        _own_group(process)
        self.running[reading] = Running(number, process, time.monotonic() + self.seconds)

    def _read(self, pipe: int) -> None:
        call = self.running[pipe]
        block = os.read(pipe, 2**16)
        call.answer += block
        if not block or block.endswith(b"\n") or len(call.answer) > _LONGEST_ANSWER:
            self._finish(pipe)

    def _finish(self, pipe: int, late: bool = False) -> None:
        call = self.running.pop(pipe)
        os.close(pipe)
        status = _end(call.process)
        ending = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""
        if late or ending == "SIGXCPU":
            outcome = b'{"failure": "timeout"}'
        elif call.answer.endswith(b"\n"):
            outcome = call.answer.strip()
        else:
            message = f"its process was ended by {ending}" if ending else "its process ended unasked"
            outcome = json.dumps({"failure": "crash", "reason": {"message": message}}).encode()
        _send(self.answers, b'{"number": %d, "outcome": %b}' % (call.number, outcome))


def answer_call(
    check: Callable[..., Any], arguments: list[Any], pipe: int, server: int, seconds: float, memory: int
) -> NoReturn:
    """In the child: call, and write one line of JSON."""
    try:
        end_with(server)
        _own_group(0)
        _limit(seconds, memory)
        answer = {"value": check(*arguments)}
        line = json.dumps(answer)
    except (MemoryError, RecursionError) as error:  # what an answer can bring about in sound code
        line = json.dumps({"failure": "crash", "reason": describe(error)})
    except BaseException as error:  # noqa: BLE001 - told to the asking process, which raises it
        line = json.dumps({"failure": "raised", "reason": describe(error)})
    try:
        _write(pipe, line.encode() + b"\n")
    finally:
        os._exit(0)


def _limit(seconds: float, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu = math.ceil(seconds) + 1  # the clock on the wall comes first; this is for when the server is gone
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))


def _own_group(process: int) -> None:
    """Give a child a process group, so that ending it ends what it has started; done from both sides."""
    try:
        os.setpgid(process, process)
    except (PermissionError, ProcessLookupError):
        return  # it has ended


def _end(process: int) -> int:
    try:
        os.killpg(process, signal.SIGKILL)
    except (PermissionError, ProcessLookupError):
        os.kill(process, signal.SIGKILL)  # not yet waited for, so the number is still its own
    return os.waitpid(process, 0)[1]


class _Lines:
    """Lines of a pipe; ends the process when the pipe ends or the parent is gone."""

    def __init__(self, source: int, parent: int) -> None:
        self.source = source
        self.parent = parent

    def orphaned(self) -> bool:
        return os.getppid() != self.parent

    def next(self) -> bytes:
        blocks: list[bytes] = []
        while not blocks or not blocks[-1].endswith(b"\n"):
            while not select.select([self.source], [], [], _WATCH_SECONDS)[0]:
                if self.orphaned():
                    raise SystemExit
            blocks.append(os.read(self.source, 2**20))
            if not blocks[-1]:
                raise SystemExit
        return b"".join(blocks)


def _watch_instead() -> None:
    """The parent's death is noticed by looking from now on: the kernel's signal follows a thread's."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def _private_streams() -> tuple[int, int]:
    """Where requests come from and answers go, out of reach of what libraries read and print."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, answers


def _silence() -> None:
    """From here on what a call prints is dropped; a model may have written it."""
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.close(nothing)


def _send(answers: int, message: bytes) -> None:
    try:
        _write(answers, message + b"\n")
    except BrokenPipeError:
        raise SystemExit from None  # nobody reads


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


if __name__ == "__main__":
    main()
