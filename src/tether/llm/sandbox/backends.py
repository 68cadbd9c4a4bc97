"""The two ways to isolate a process, and which of the host's files one sees."""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tether.errors import ConfigError

Backend = Literal["bubblewrap", "namespaces"]
"""How programs are isolated: by the program bubblewrap, or by this package's own launcher."""

BACKENDS: tuple[Backend, ...] = ("bubblewrap", "namespaces")
"""In order of preference."""

LAUNCHER = Path(__file__).with_name("launcher.py")
_START = (
    "import json, os, sys; job = json.load(os.fdopen(int(sys.argv[1]), encoding='utf-8')); "
    "names = {'__name__': 'launcher'}; exec(job.pop('launcher'), names); names['main'](job, int(sys.argv[2]))"
)
# Not /dev/zero: memory mapped from it is shared, belongs to no file, and outlives its mappings uncounted.
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_CAP_SYS_ADMIN = 21
# Users systemd sets aside for short-lived services (61184-65519). A root process runs programs as one of
# them: root itself is exempt from limits on the number of processes. Drawn at random, since trainers in two
# containers may be alike in everything else.
_FIRST_USER, _USERS = 61_184, 4_336

ENVIRONMENT = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
}
"""All a program finds in its environment. The fixed hash seed makes a set's order, and a verdict that hangs
on it, repeat."""


def drop_to() -> int | None:
    """Which user a program becomes: one of its own under root, None under an ordinary user."""
    if os.geteuid() != 0 or not _has_admin() or not _maps(_FIRST_USER, _USERS):
        return None
    return _FIRST_USER + secrets.randbelow(_USERS)


def _maps(first: int, count: int) -> bool:
    """Whether this process's user namespace knows users; an ordinary user's may know its root alone."""
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    known = [(int(start), int(length)) for start, _, length in map(str.split, lines)]
    return any(start <= first and first + count <= start + length for start, length in known)


def _has_admin() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def command(
    backend: Backend, job_file: int, status: int, files: Visible, folder_size: int, root_user: bool
) -> list[str]:
    """The command line that starts the launcher, isolated by `backend` or about to isolate itself."""
    start = [interpreter(), "-I", "-S", "-B", "-c", _START, str(job_file), str(status)]
    if backend == "namespaces":
        return start
    if backend != "bubblewrap":
        raise ConfigError(f"Unknown sandbox backend {backend!r}. Use one of: {', '.join(BACKENDS)}.")
    bwrap = shutil.which("bwrap") or "bwrap"
    arguments = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--die-with-parent", "--hostname", "sandbox", "--clearenv"]
    arguments += ["--cap-drop", "ALL"]
    if root_user:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    # First, since an interpreter may itself live in a temporary folder.
    arguments += ["--perms", "1777", "--size", str(folder_size), "--tmpfs", "/tmp"]
    arguments += ["--perms", "0755", "--dir", "/dev"]
    arguments += _shown(files.readable)
    for folder in files.hidden:
        arguments += ["--perms", "0755", "--size", "4096", "--tmpfs", folder]
    arguments += _shown(files.added)
    for device in DEVICES:
        arguments += ["--dev-bind", device, device]
    for folder in [*files.hidden, "/"]:
        arguments += ["--remount-ro", folder]
    return [*arguments, "--chdir", "/tmp", "--", *start]


def _shown(paths: list[str]) -> list[str]:
    """Arguments that make bubblewrap show `paths` read-only."""
    arguments: list[str] = []
    # Parents bubblewrap makes by itself may be closed to the user the program becomes.
    for parent in sorted({str(folder) for path in paths for folder in Path(path).parents} - {"/", "/tmp"}):
        arguments += ["--perms", "0755", "--dir", parent]
    for path in paths:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind", path, path]
    return arguments


_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
_PACKAGES = ("site-packages", "dist-packages")
_TETHER = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Visible:
    """Folders and files of the host, as absolute paths, in the order in which they are shown and hidden."""

    readable: list[str]
    """Shown read-only; none lies in another."""
    hidden: list[str]
    """Folders among those that are shown empty: where packages are installed."""
    added: list[str]
    """Shown read-only over all that, because the sandbox was told to."""


def visible(added: Sequence[str | Path] = ()) -> Visible:
    """What programs see, given what the sandbox was told to show besides."""
    readable = _default_readable()
    hidden = _hidden()
    wanted = without_nested(os.path.realpath(path) for path in added)
    return Visible(
        readable=list(readable),
        hidden=list(hidden),
        added=[path for path in wanted if not _within(path, readable) or _within(path, hidden)],
    )


@functools.cache
def interpreter() -> str:
    """The interpreter underneath any virtual environment, as a real path."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def without_nested(paths: Iterable[str]) -> list[str]:
    """Drop paths that lie in another one, keeping links, which are made again rather than mounted.

    >>> without_nested(["/usr/lib/python3", "/usr/lib", "/opt/x"])
    ['/opt/x', '/usr/lib']
    """
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not _within(path, kept):
            kept.append(path)
    return kept


@functools.cache
def _default_readable() -> tuple[str, ...]:
    """The interpreter, its standard library, and the folders of shared libraries."""
    wanted = ["/etc/ld.so.cache", interpreter(), *map(os.path.realpath, _standard_library())]
    for folder in _LIBRARIES:
        wanted += _of_this_architecture(folder)
    if sys.base_prefix != "/usr":
        wanted.append(os.path.realpath(f"{sys.base_prefix}/lib"))
    if interpreter().startswith("/nix/store/"):
        asked = ["nix-store", "--query", "--requisites", interpreter()]
        wanted += subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return tuple(without_nested(path for path in wanted if os.path.lexists(path)))


def _standard_library() -> list[str]:
    base = {"installed_base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    return [sysconfig.get_path("stdlib", vars=base), sysconfig.get_path("platstdlib", vars=base)]


def _of_this_architecture(folder: str) -> list[str]:
    """Of a folder of libraries, the part with shared ones, where the distribution keeps them apart."""
    own = f"{folder}/{sysconfig.get_config_var('MULTIARCH')}"
    if os.path.islink(folder) or not os.path.isdir(own):
        return [folder]
    return [own, f"{folder}/locale"]


@functools.cache
def _hidden() -> tuple[str, ...]:
    """Folders of packages in what is readable: those so named, and those that this process imports from."""
    readable = _default_readable()
    found = {os.path.realpath(path) for root in readable for path in _folders_of_packages(root)}
    library = [os.path.realpath(path) for path in _standard_library()]
    for entry in {*map(os.path.realpath, filter(None, sys.path)), _TETHER}:
        of_library = entry in library or os.path.basename(entry) == "lib-dynload"
        if os.path.isdir(entry) and not of_library and not any(_within(path, [entry]) for path in library):
            found.add(entry)
    return tuple(without_nested(path for path in found if _within(path, readable)))


def _folders_of_packages(folder: str) -> Iterator[str]:
    if os.path.islink(folder) or not os.path.isdir(folder):
        return
    try:
        entries = list(os.scandir(folder))
    except PermissionError:  # closed to the program as well, which has no more rights
        return
    for entry in entries:
        if entry.name in _PACKAGES:
            yield entry.path
        elif entry.is_dir(follow_symlinks=False):
            yield from _folders_of_packages(entry.path)


def _within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
