"""A program to run and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tether.errors import InvalidInputError

Status = Literal["ok", "error", "timeout", "memory", "killed"]
"""How a program ended; see `Execution.status`."""

_LEAST_MEMORY = 32 * 2**20


@dataclass(frozen=True)
class Program:
    """Python source and the conditions it runs under.

    >>> Program("print(1)").time_limit
    5.0
    >>> Program("print(1)", memory_limit=0)
    Traceback (most recent call last):
    tether.errors.InvalidInputError: memory_limit is 0 bytes, but an interpreter needs 33554432. Raise it.
    """

    code: str
    """Python source."""
    stdin: str = ""
    """What the program finds on standard input."""
    time_limit: float = 5.0
    """Seconds on the clock, counted from the program's start; CPU seconds are limited a little above it."""
    memory_limit: int = 512 * 2**20
    """Bytes, for each process's address space and for all the machine holds for it, files and buffers too."""

    def __post_init__(self) -> None:
        if not isinstance(self.code, str) or not isinstance(self.stdin, str):
            raise InvalidInputError(
                f"code and stdin must be text, but are {type(self.code).__name__} and "
                f"{type(self.stdin).__name__}. Decode bytes first."
            )
        if not (math.isfinite(self.time_limit) and 0 < self.time_limit <= 86_400):
            raise InvalidInputError(f"time_limit is {self.time_limit} s; give more than 0, at most a day.")
        if self.memory_limit < _LEAST_MEMORY:
            raise InvalidInputError(
                f"memory_limit is {self.memory_limit} bytes, but an interpreter needs {_LEAST_MEMORY}. "
                "Raise it."
            )


@dataclass(frozen=True)
class Execution:
    """What came of running a program.

    >>> Execution("ok", "42\\n", "", 0.1, 0).ok
    True
    """

    status: Status
    """``ok``: ended with code 0. ``error``: ended with another code. ``timeout``: reached a limit of time.
    ``memory``: reached the limit of memory. ``killed``: ended by a signal, or stopped for what it wrote."""
    stdout: str
    """What it wrote, up to the sandbox's output limit; undecodable bytes are replaced."""
    stderr: str
    """The same of standard error."""
    seconds: float
    """Time on the clock from the program's start to the end of its last process."""
    exit_code: int | None
    """The program's code, above 128 for a signal as a shell tells it; None where the sandbox stopped it."""
    detail: str = ""
    """Why the sandbox stopped it, in words."""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself, with code 0."""
        return self.status == "ok"
