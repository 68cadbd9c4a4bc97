"""The two ways to isolate a process, and finding out by trial which one works here."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Literal

from tether.errors import ConfigError
from tether.llm.sandbox.visible import Visible, interpreter

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
