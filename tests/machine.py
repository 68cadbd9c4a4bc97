"""What the tests need of the machine, tried before the first of them runs; what is missing is said at once.

Nothing is skipped for what is missing: the tests that need it could not tell a defect from its absence.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import multiprocessing
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[1]
OPEN_FILES, FREE_BYTES = 256, 2**30


def open_files() -> str | None:
    """Run folders, worker processes and sandboxes hold some hundred at a time."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit >= OPEN_FILES or limit == resource.RLIM_INFINITY:
        return None
    return f"A process may open {limit} files, and {OPEN_FILES} are needed: ulimit -n {OPEN_FILES}."


def disk() -> str | None:
    """Checkpoints of tiny models, some hundred of them."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free >= FREE_BYTES:
        return None
    return f"{folder} has {free / 1e9:.1f} GB free, and 1 GB is needed: set TMPDIR to a folder elsewhere."


def loopback() -> str | None:
    """Two processes that train together talk over it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return f"No connection over 127.0.0.1 ({error}): ip link set lo up, or let the container have one."
    return None


def shared_memory() -> str | None:
    """Worker processes are told of work through semaphores."""
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as error:
        return f"No semaphores between processes ({error}): mount a tmpfs on /dev/shm that can be written to."
    return None


def opengl() -> str | None:
    """Films are taken without a screen."""
    if sys.platform != "linux" or ctypes.util.find_library("EGL") or ctypes.util.find_library("OSMesa"):
        return None
    return "No OpenGL without a screen: apt-get install libegl1 libgl1-mesa-dri, or libosmesa6."


def sandbox() -> str | None:
    """Programs that a model wrote run isolated or not at all."""
    from tether.errors import TetherError
    from tether.llm.sandbox import Sandbox

    try:
        with Sandbox():
            return None
    except TetherError as error:
        return str(error)


def packages(*extras: str) -> Callable[[], str | None]:
    """That the packages of these extras are installed, whatever their version."""

    def check() -> str | None:
        try:
            needed = [Requirement(text) for text in importlib.metadata.requires("tether-rl") or ()]
        except importlib.metadata.PackageNotFoundError:
            return "Tether is not installed: make test, or pip install --editable '.[llm,episodic,dev]'."
        names = {
            one.name
            for one in needed
            if one.name != "tether-rl"
            and one.marker is not None
            and any(one.marker.evaluate({"extra": extra}) for extra in extras)
        }
        missing = sorted(name for name in names if not _installed(name))
        if not missing:
            return None
        install = f"pip install --editable '.[{','.join(extras)}]', or make test"
        return f"Not installed: {', '.join(missing)}. {install}."

    return check


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


#: Folders of tests, and what those in them need; "" is all of them.
NEEDS: dict[str, tuple[Callable[[], str | None], ...]] = {
    "": (open_files, disk, loopback, shared_memory),
    "tests/projection": (packages("test"),),
    "tests/ops": (packages("test"),),
    "tests/losses": (packages("test"),),
    "tests/experiments": (packages("cli", "test"),),
    "tests/integrations": (packages("cli", "llm", "test"),),
    "tests/llm": (packages("cli", "llm", "test", "dev"), sandbox),
    "tests/episodic": (packages("cli", "episodic", "test", "dev"), opengl),
}


def missing(asked: Iterable[str]) -> list[str]:
    """What the tests in these files and folders need and the machine lacks, with the remedy of each."""
    paths = [Path(one.partition("::")[0]).resolve() for one in asked]
    found = []
    for folder, checks in NEEDS.items():
        whole = REPOSITORY / folder
        if not folder or any(path.is_relative_to(whole) or whole.is_relative_to(path) for path in paths):
            found += [message for check in checks if (message := check()) is not None]
    return list(dict.fromkeys(found))
