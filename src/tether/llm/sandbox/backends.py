"""The two ways to isolate a process, and finding out by trial which one works here."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from tether.errors import ConfigError

Backend = Literal["bubblewrap", "namespaces"]
"""How programs are isolated: by the program bubblewrap, or by this package's own launcher."""

BACKENDS: tuple[Backend, ...] = ("bubblewrap", "namespaces")
"""In order of preference."""

LAUNCHER = Path(__file__).with_name("launcher.py")
_LAUNCHER_INSIDE = "/launcher.py"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_CAP_SYS_ADMIN = 21
# Users systemd sets aside for short-lived services (61184-65519). A root process runs programs as one of
# them: root itself is exempt from limits on the number of processes.
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


@functools.cache
def interpreter() -> str:
    """The interpreter underneath any virtual environment, as a real path."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def default_readable() -> list[str]:
    """Folders and files a program must be able to read: the interpreter, its library, shared libraries."""
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    if sys.base_prefix != "/usr":
        library.append(f"{sys.base_prefix}/lib")
    wanted = [*_SYSTEM, interpreter(), *map(os.path.realpath, library)]
    if interpreter().startswith("/nix/store/"):
        wanted.append("/nix/store")
    return without_nested(path for path in wanted if os.path.lexists(path))


def without_nested(paths: Iterable[str]) -> list[str]:
    """Drop paths that lie in another one, keeping links, which are made again rather than mounted.

    >>> without_nested(["/usr/lib/python3", "/usr/lib", "/opt/x"])
    ['/opt/x', '/usr/lib']
    """
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def drop_to(slot: int) -> int | None:
    """Which user a program becomes: one of its own under root, None under an ordinary user."""
    if os.geteuid() != 0 or not _has_admin():
        return None
    return _FIRST_USER + (os.getpid() * 61 + slot) % _USERS


def _has_admin() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def command(
    backend: Backend, job_file: int, status: int, readable: list[str], folder_size: int, root_user: bool
) -> list[str]:
    """The command line that starts the launcher, isolated by `backend` or about to isolate itself.

    Raises:
        ConfigError: `backend` is neither of the two.
    """
    python = [interpreter(), "-I", "-S", "-B"]
    descriptors = [str(job_file), str(status)]
    if backend == "namespaces":
        return [*python, str(LAUNCHER), *descriptors]
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
    # Parents bubblewrap makes by itself may be closed to the user the program becomes.
    for parent in sorted({str(folder) for path in readable for folder in Path(path).parents} - {"/", "/tmp"}):
        arguments += ["--perms", "0755", "--dir", parent]
    for path in readable:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind", path, path]
    for device in DEVICES:
        arguments += ["--dev-bind", device, device]
    arguments += ["--ro-bind", str(LAUNCHER), _LAUNCHER_INSIDE]
    arguments += ["--remount-ro", "/", "--chdir", "/tmp"]
    return [*arguments, "--", *python, _LAUNCHER_INSIDE, *descriptors]
