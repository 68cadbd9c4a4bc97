"""The host that hostile programs would like to reach, and what must be true of them and of it afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hostile.program import SECRET, Hostile

import tether
from tether.llm.sandbox import Execution, Program, Sandbox

MEMORY = 192 * 2**20


@dataclass
class Host:
    """What a hostile program would like to reach; names in capitals in a program's source stand for it."""

    canary: Path
    sentinel: subprocess.Popen[bytes]
    tcp: socket.socket
    unix: socket.socket
    abstract: socket.socket

    def fill_in(self, code: str) -> str:
        """Put this host's paths and numbers into a program's source."""
        values = {
            "CANARY": str(self.canary),
            "ABSTRACT": f"tether-{os.getpid()}",
            "HOST": str(os.getpid()),
            "SENTINEL": str(self.sentinel.pid),
            "SOURCE": str(Path(tether.__file__).parents[1]),
            "PORT": str(self.tcp.getsockname()[1]),
        }
        return re.sub(rf"\b({'|'.join(values)})\b|({'|'.join(values)})", lambda found: values[found[0]], code)

    def harm(self) -> list[str]:
        """What happened to this host that must not."""
        found = []
        if self.canary.read_text() != SECRET:
            found.append("the canary was changed")
        if sorted(path.name for path in self.canary.parent.iterdir()) != ["canary", "canary.sock"]:
            found.append("its folder was changed")
        if self.sentinel.poll() is not None:
            found.append("another process was ended")
        for listening in (self.tcp, self.unix, self.abstract):
            with contextlib.suppress(BlockingIOError):
                listening.recv(1) if listening is self.abstract else listening.accept()
                found.append("a socket was reached")
        for path in ("/tether-was-here", "/usr/lib/tether-was-here", "/dev/shm/tether-was-here"):
            if Path(path).exists():
                found.append(f"{path} was made")
        return found


@contextlib.contextmanager
def host(folder: Path) -> Iterator[Host]:
    """Set up a host in an empty folder: a file, a process, sockets and an environment to be reached."""
    (folder / "canary").write_text(SECRET)
    os.environ["TETHER_TEST_SECRET"] = SECRET
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.pop, "TETHER_TEST_SECRET")
        sentinel = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        stack.callback(sentinel.wait)
        stack.callback(sentinel.kill)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(folder / "canary.sock"))
        unix.listen()
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        abstract.bind(f"\0tether-{os.getpid()}")
        for opened in (tcp, unix, abstract):
            opened.setblocking(False)
        yield Host(folder / "canary", sentinel, tcp, unix, abstract)


def run(
    sandbox: Sandbox, host: Host, programs: Mapping[str, Hostile], seconds: float
) -> dict[str, Execution]:
    """Run programs against `host`, each for at most `seconds`."""
    wanted = [
        Program(host.fill_in(one.code), time_limit=seconds, memory_limit=MEMORY) for one in programs.values()
    ]
    return dict(zip(programs, sandbox.run_many(wanted), strict=True))


def escape(hostile: Hostile, done: Execution, seconds: float) -> str | None:
    """Say in which way a program was not contained, or None."""
    if "ESCAPED" in done.stdout:
        return done.stdout[done.stdout.index("ESCAPED") :][:300]
    if SECRET in done.stdout + done.stderr:
        return "it found the secret"
    if done.status not in hostile.statuses:
        return f"it ended with {done.status} ({done.detail or done.stderr[-300:]}), not {hostile.statuses}"
    # Ending 32 busy processes on a loaded machine takes its time.
    if done.seconds > seconds + 5:
        return f"it took {done.seconds:.1f} s"
    return None
