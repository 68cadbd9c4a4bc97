"""Becomes a command that is asked to end once whoever started it is gone.

``python job_child.py PARENT COMMAND ...``. Nothing is imported but the standard library, so that it starts at
once. Only Linux tells of a parent's end; elsewhere the command is just run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # prctl(2); what it asks for outlives exec


def main(parent: int, command: list[str]) -> NoReturn:
    """Run the command in this process; end instead where the parent has gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
