"""Checking mathematical answers with math-verify, under a time limit that holds in any thread."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import queue
import subprocess
import sys
import threading
from pathlib import Path

from tether.errors import InvalidInputError, MissingDependencyError

_log = logging.getLogger(__name__)

_START_SECONDS = 120.0


def last_boxed(text: str) -> str | None:
    r"""Give what the last complete ``\boxed{...}`` of a text holds, or None.

    >>> last_boxed(r"so \boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> last_boxed(r"\boxed{unfinished") is None
    True
    """
    opening = r"\boxed{"
    start = text.rfind(opening)
    while start >= 0:
        inside = start + len(opening)
        depth = 1
        for position in range(inside, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[inside:position]
        start = text.rfind(opening, 0, start)
    return None


class MathVerifier:
    """Decide whether a response's mathematical answer equals a reference, within a time limit.

    Some expressions keep a computer-algebra system busy for ever. math-verify guards against that with
    signals, which only a main thread may use; here the check runs in a process of its own that is ended
    when it takes too long, so any thread may ask. The process starts with the first check and is shared
    by all threads, one check at a time.

    Args:
        seconds: Time limit of one check.

    Raises:
        InvalidInputError: `seconds` is not positive.
        MissingDependencyError: (from `check`) math-verify cannot be imported.

    >>> with MathVerifier() as verifier:
    ...     verifier.check(r"\\boxed{0.5}", "1/2")
    True
    """

    def __init__(self, seconds: float = 5.0) -> None:
        if not seconds > 0:
            raise InvalidInputError(f"The time limit is {seconds} s; give a positive one.")
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def check(self, response: str, answer: str) -> bool:
        """Say whether `response` gives `answer`; a check that does not end in time counts as wrong."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the worker died: noticed below as an empty answer
                process.stdin.write(json.dumps([response, answer]) + "\n")
                process.stdin.flush()
            line = self._read(self.seconds)
            if line:
                return bool(json.loads(line))
            _log.warning(
                "Checking an answer against %r %s; it counts as wrong.",
                answer,
                f"took longer than {self.seconds:g} s" if line is None else "ended math-verify's process",
            )
            self._stop()
            return False

    def close(self) -> None:
        """End the process; a later check starts another."""
        with self._lock:
            self._stop()

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        worker = Path(__file__).with_name("math_worker.py")
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=_pump, args=(self._process, self._answers), daemon=True).start()
        atexit.register(self._stop)
        if not self._read(_START_SECONDS):
            self._stop()
            raise MissingDependencyError(
                "math-verify's process did not start; `python -c 'import math_verify'` shows why. "
                "Install tether-rl[llm]."
            )
        return self._process

    def _read(self, seconds: float) -> str | None:
        """The worker's next line, "" when it has ended, None when it is late."""
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError, OSError):
                    stream.close()


def _pump(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    """Move the worker's lines to a queue, and "" after the last."""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            answers.put(line)
    except ValueError:
        _log.debug("math-verify's process was stopped while it answered.")
    answers.put("")
