"""What a hostile program is: code that prints ESCAPED where it gets what it must not, and how it may end."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

SECRET = "a-secret-of-the-host"
HIDDEN_SECRET = f"{SECRET[::-1]!r}[::-1]"
"""An expression that is the secret, so that a program can look for it without holding it."""

CTYPES = "import ctypes, errno, os; libc = ctypes.CDLL(None, use_errno=True)\n"
HOLD = "\nimport time\nwhile True: time.sleep(1)\n"
"""Keep what was gathered until the end."""


@dataclass(frozen=True)
class Hostile:
    """Python source and the statuses of a contained end."""

    code: str
    statuses: tuple[str, ...] = ("ok",)


def attempt(body: str, header: str = "import os\n") -> Hostile:
    """Run each line on its own; a line that does not raise is an escape."""
    tried = "".join(
        f"try:\n    {line}\n    print('ESCAPED:', {line!r})\n"
        "except (OSError, ValueError, ImportError): pass\n"
        for line in body.strip().splitlines()
    )
    return Hostile(header + tried)


def refused(body: str) -> Hostile:
    """Call C functions, one a line; one that does not return -1 is an escape."""
    return Hostile(
        CTYPES
        + "".join(f"if {line} != -1: print('ESCAPED:', {line!r})\n" for line in body.strip().splitlines())
    )


def numbers(*calls: str) -> Hostile:
    """Make system calls by number, each given as the arguments of syscall(2), and demand that all fail."""
    return refused("\n".join(f"libc.syscall({call})" for call in calls))


def children(count: int, body: str, *statuses: str) -> Hostile:
    """Run `body`, lines that gather memory, in `count` processes at once; all hold what they got."""
    code = (
        f"import os, time\nfor number in range({count}):\n    if os.fork() == 0:\n        try:\n"
        + textwrap.indent(body.strip("\n"), " " * 12)
        + "\n        except (OSError, MemoryError, RuntimeError): pass\n        while True: time.sleep(1)"
    )
    return Hostile(code + HOLD, statuses or ("memory", "timeout"))
