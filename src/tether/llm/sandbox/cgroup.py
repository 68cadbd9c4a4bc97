"""Where the host hands control groups down (version 2), the kernel itself holds a program to its memory."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tether.errors import SandboxError

_HELPERS = 4  # bubblewrap or the launcher, process 1, and what starts them
# What the helpers hold, beside the program's own memory.
_HELPERS_MEMORY = 32 * 2**20
_END_SECONDS = 10.0


class Group:
    """A control group of one program: its processes die together when they reach `memory` bytes."""

    def __init__(self, parent: Path, memory: int, processes: int) -> None:
        self._folder = parent / f"tether-{os.getpid()}-{secrets.token_hex(4)}"
        self._folder.mkdir()
        self._set("memory.max", memory + _HELPERS_MEMORY)
        self._set("memory.oom.group", 1)
        self._set("pids.max", processes + _HELPERS)
        if (self._folder / "memory.swap.max").exists():  # not where the kernel does not swap
            self._set("memory.swap.max", 0)

    def enter(self, command: list[str]) -> list[str]:
        """The command line that runs `command` in this group."""
        return ["/bin/sh", "-c", 'echo 0 >"$0" && exec "$@"', str(self._folder / "cgroup.procs"), *command]

    def exhausted(self) -> bool:
        """Whether the kernel ended the program for its memory."""
        events = (self._folder / "memory.events").read_text(encoding="ascii").split()
        return int(events[events.index("oom_kill") + 1]) > 0

    def close(self) -> None:
        """End what is left in the group and remove it."""
        self._set("cgroup.kill", 1)
        deadline = time.monotonic() + _END_SECONDS
        while True:
            try:
                self._folder.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SandboxError(f"The control group {self._folder} could not be removed.") from error
                time.sleep(0.001)
            else:
                return

    def _set(self, name: str, value: int) -> None:
        (self._folder / name).write_text(str(value), encoding="ascii")


@contextlib.contextmanager
def group(memory: int, processes: int) -> Iterator[Group | None]:
    """A group for the length of a with block, or None where the host hands none down."""
    parent = delegated()
    if parent is None:
        yield None
        return
    one = Group(parent, memory, processes)
    try:
        yield one
    finally:
        one.close()


@functools.cache
def delegated() -> Path | None:
    """The nearest group above this process in which it may make others and limit them."""
    for folder in _above():
        try:
            controllers = (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
            if {"memory", "pids"} <= set(controllers) and os.access(folder / "cgroup.procs", os.W_OK):
                trial = Group(folder, 2**26, 8)
                entered = subprocess.run(
                    trial.enter(["/bin/sh", "-c", ":"]), capture_output=True, check=False
                )
                trial.close()
                if entered.returncode == 0:
                    return folder
        except OSError:  # what cannot be read, made or set is not handed down
            continue
    return None


def _above() -> list[Path]:
    """This process's group of version 2 and those above it, as folders; empty where there are none."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines())
    mounted = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"]
    groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = [line.removeprefix("0::/") for line in groups if line.startswith("0::/")]
    if not mounted or not own or ".." in own[0]:
        return []
    folder = mounted[0] / own[0]
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mounted[0]))]
