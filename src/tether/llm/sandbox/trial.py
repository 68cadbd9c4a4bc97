"""Finding out by trial what can isolate a program here, and refusing when nothing can."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys

from tether.errors import MissingDependencyError, SandboxError
from tether.llm.sandbox.backends import BACKENDS, Backend
from tether.llm.sandbox.sandbox import Sandbox

_PROCESSES = 4

# Tries what a sandboxed program must not be able to do, and says what it could do all the same.
_ESCAPES = """
import errno, json, os, signal, socket, sys, threading
host = json.loads(input())
escapes = []

def refused(name, action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return
    escapes.append(name)

refused("open a socket", socket.socket)
refused("write to its root", os.mkdir, "/probe")
refused("write to its libraries", os.mkdir, os.path.dirname(os.__file__) + "/probe")
# The host may be process 1 itself, of a container's; here it is the first process of the sandbox.
if (os.getpid(), os.getppid()) != (2, 1):
    escapes.append("see the host's processes")
elif host["process"] > 2:
    refused("signal the host", os.kill, host["process"], 0)
refused("see the host's files", os.listdir, host["folder"])
if os.getuid() == 0:
    escapes.append("be root")
if host["secret"] in os.environ:
    escapes.append("read the environment")
if set(os.listdir("/tmp")) != set(host["expected"]):
    escapes.append("see other files in /tmp")
children = []
reading, writing = os.pipe()
try:
    while len(children) < 4 * host["processes"]:
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        children.append(child)
except OSError:
    pass
os.close(writing)
for child in children:
    os.waitpid(child, 0)
if len(children) >= host["processes"]:
    escapes.append("start more processes than it may")
if not children:
    escapes.append("start no process at all, though it may")
print(json.dumps(escapes))
"""

_REMEDY = (
    "Install bubblewrap (apt-get install bubblewrap, or dnf install bubblewrap), or allow unprivileged user "
    "namespaces (sysctl -w user.max_user_namespaces=15000; on Ubuntu 24.04 also "
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; in a container, run it with "
    "--security-opt seccomp=unconfined --cap-add SYS_ADMIN --cap-add SYS_PTRACE). Code "
    "tasks do not run without a sandbox."
)


def available_backend() -> Backend:
    """Say which backend works here: the first that contains a program trying to get out.

    Raises:
        MissingDependencyError: None does; the message says why each failed and what to install.

    >>> available_backend() in ("bubblewrap", "namespaces")
    True
    """
    return check_backend(None)


def check_backend(backend: Backend | None) -> Backend:
    """Give `backend`, or the first that works when it is None, after trying it once in this process.

    Raises:
        MissingDependencyError: It does not work, or none does.
    """
    reasons = {}
    for candidate in BACKENDS if backend is None else (backend,):
        reason = try_backend(candidate)
        if reason is None:
            return candidate
        reasons[candidate] = reason
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise MissingDependencyError(f"Programs cannot be isolated here ({told}). {_REMEDY}")


@functools.cache
def try_backend(backend: Backend) -> str | None:
    """Run a program that tries to get out; None if it is contained, else the reason why it is not.

    Raises:
        MissingDependencyError: The filter of system calls cannot be made.
    """
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    sandbox = Sandbox(1, backend=backend, processes=_PROCESSES)
    host: dict[str, object] = {
        "process": os.getpid(),
        "folder": os.path.expanduser("~/.ssh/.."),
        "secret": next(iter(set(os.environ) - {"HOME", "TMPDIR", "PATH", "LANG", "LC_CTYPE"}), "USER"),
        "processes": _PROCESSES,
    }
    sandbox._open()
    beside = {path.split("/")[2] for path in sandbox._files.readable if path.startswith("/tmp/")}
    host["expected"] = ["program.py", *beside]
    try:
        done = sandbox.run(_ESCAPES, json.dumps(host), time_limit=30.0)
    except SandboxError as error:
        return str(error)
    finally:
        sandbox.close()
    if not done.ok:
        return f"a program ended with {done.status} ({(done.detail or done.stderr).strip()[-300:]})"
    escapes = json.loads(done.stdout)
    return f"a program could {', '.join(escapes)}" if escapes else None
