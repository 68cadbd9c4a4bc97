"""Processes for runs of seconds: forked from a server that has done the imports, which else take as long."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from tether.errors import ConfigError

_PYTHON_MODULE = (sys.executable, "-m")


class ForkedProcess:
    """A ``python -m MODULE ...`` command in a fork, with what a queue of jobs uses of `subprocess.Popen`.

    Not where an accelerator is used: its driver does not survive a fork.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        if tuple(command[:2]) != _PYTHON_MODULE or len(command) < 3:
            raise ConfigError(
                f"Only python -m MODULE can be forked, got {' '.join(command[:3])!r}. Run it without preload."
            )
        variables = {**os.environ, **environment}
        context = multiprocessing.get_context("forkserver")
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
    """Start the server, which imports these before the first fork. Does nothing if it runs."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r} to preload.", name=module)
    forkserver.set_forkserver_preload(list(modules))
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_module(command: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """In the fork: become what `subprocess.Popen` would have started."""
    os.setsid()  # Ctrl-C reaches only the parent, which passes it on, once
    os.environ.clear()
    os.environ.update(environment)
    _redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1, 2)
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = list(command)
    sys.path.insert(0, os.getcwd())  # as python -m has it
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _redirect(source: int, *targets: int) -> None:
    for target in targets:
        os.dup2(source, target)
    os.close(source)
