"""Runs a server that ends with whoever asked for it: ``python serve_child.py COMMAND ...``, stdin a pipe.

The pipe closes when the process that holds its other end has ended, in whatever way; then the server and all
that it started are ended too. Nothing is imported but the standard library, so that it starts at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import NoReturn

#: Seconds a server has to end by itself.
_GRACE = 10.0


def main(command: list[str]) -> NoReturn:
    """Run until the server ends, the pipe closes or a signal comes; end with the server's exit code."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _end(server))
    threading.Thread(target=_wait_for_the_end_of_input, args=(server,), daemon=True).start()
    code = server.wait()
    _signal_all(server, signal.SIGKILL)  # what a killed server may have left
    sys.exit(code if code >= 0 else 128 - code)  # of a signal, as a shell has it


def _wait_for_the_end_of_input(server: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):
        pass
    _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and make it."""
    _signal_all(server, signal.SIGTERM)
    timer = threading.Timer(_GRACE, _signal_all, (server, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _signal_all(server: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(server.pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main(sys.argv[1:])
