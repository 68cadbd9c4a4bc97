"""Finding out by trial what can isolate a program here, and refusing when nothing can."""

from __future__ import annotations

import json
import os
from typing import Any

from tether.errors import SandboxError

PROCESSES = 4
"""How many the program that tries to get out may start."""

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

REMEDY = (
    "Install bubblewrap (apt-get install bubblewrap, or dnf install bubblewrap), or allow unprivileged user "
    "namespaces (sysctl -w user.max_user_namespaces=15000; on Ubuntu 24.04 also "
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; in a container, run it with "
    "--security-opt seccomp=unconfined --cap-add SYS_ADMIN --cap-add SYS_PTRACE). Code "
    "tasks do not run without a sandbox."
)


def try_to_escape(sandbox: Any) -> str | None:
    """Run a program that tries to get out of a started `Sandbox` for `PROCESSES` processes."""
    host: dict[str, object] = {
        "process": os.getpid(),
        "folder": os.path.expanduser("~/.ssh/.."),
        "secret": next(iter(set(os.environ) - {"HOME", "TMPDIR", "PATH", "LANG", "LC_CTYPE"}), "USER"),
        "processes": PROCESSES,
    }
    beside = {path.split("/")[2] for path in sandbox.files.readable if path.startswith("/tmp/")}
    host["expected"] = ["program.py", *beside]
    try:
        done = sandbox.run(_ESCAPES, json.dumps(host), time_limit=30.0)
    except SandboxError as error:
        return str(error)
    if not done.ok:
        return f"a program ended with {done.status} ({(done.detail or done.stderr).strip()[-300:]})"
    escapes = json.loads(done.stdout)
    return f"a program could {', '.join(escapes)}" if escapes else None
