"""Hostile programs: every one contained, nothing of the host read or changed, the pool alive afterwards.

A program prints ESCAPED where it gets somewhere it must not. What the host sees is checked besides: a
file that must not change, folders that must not grow, a process and sockets that must not be reached.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tether.llm.sandbox import Backend, Execution, Program, Sandbox
from tether.llm.sandbox.backends import BACKENDS

SECRET = "a-secret-of-the-host"
MEMORY = 192 * 2**20
INSTALLED = [name for name in BACKENDS if name == "namespaces" or shutil.which("bwrap")]

CTYPES = "import ctypes, errno, os; libc = ctypes.CDLL(None, use_errno=True)\n"


@dataclass(frozen=True)
class Hostile:
    code: str
    statuses: tuple[str, ...]


def attempt(body: str, header: str = "import os\n") -> str:
    """Run each line on its own; a line that does not raise is an escape."""
    tried = "".join(
        f"try:\n    {line}\n    print('ESCAPED:', {line!r})\nexcept (OSError, ValueError): pass\n"
        for line in body.strip().splitlines()
    )
    return header + tried


def refused_by_kernel(body: str) -> str:
    """Call C functions, one a line; one that does not return -1 is an escape."""
    return CTYPES + "".join(
        f"if {line} != -1: print('ESCAPED:', {line!r})\n" for line in body.strip().splitlines()
    )


HOSTILE: dict[str, Hostile] = {
    # Too much of something.
    "fork bomb": Hostile(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ("timeout",)
    ),
    "fork bomb of orphans": Hostile(
        "import os, signal, time\n"
        "for number in range(1, 32):\n    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)\n"
        "while True:\n    try:\n        if os.fork() == 0:\n            os.setsid()\n"
        "    except OSError: time.sleep(.001)",
        ("timeout",),
    ),
    "thread bomb": Hostile(
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
        ("error", "timeout", "memory"),
    ),
    "memory bomb": Hostile("x = b'x' * 2**20\nwhile True: x += x", ("memory",)),
    "memory bomb of a list": Hostile("x = []\nwhile True: x.append(bytes(2**20))", ("memory",)),
    "memory bomb in children": Hostile(
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = [b'x' * 2**20 for _ in range(60)]\n        time.sleep(60)\ntime.sleep(60)",
        ("memory", "timeout"),
    ),
    "memory bomb of shared maps": Hostile(
        "import mmap\nx = []\nwhile True:\n    m = mmap.mmap(-1, 2**24)\n    m[:] = b'x' * 2**24\n"
        "    x.append(m)",
        ("error", "memory", "timeout"),
    ),
    "memory held by no process": Hostile(
        refused_by_kernel(
            "libc.memfd_create(b'x', 0)\nlibc.shmget(0, 2**24, 0o1600)\n"
            "libc.msgget(0, 0o1600)\nlibc.semget(0, 1, 0o1600)\nlibc.mlockall(3)"
        ),
        ("ok",),
    ),
    "full disk": Hostile(
        "n = 0\nwhile True:\n    with open(f'/tmp/{n}', 'wb') as f: f.write(b'x' * 2**23)\n    n += 1",
        ("error",),
    ),
    "large file": Hostile(
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "with open('/tmp/f', 'wb') as f:\n    f.write(b'x' * 2**25)\nprint('ESCAPED')",
        ("error",),
    ),
    "a million files": Hostile("for n in range(10**6): open(f'/tmp/{n}', 'x').close()", ("error", "timeout")),
    "endless output": Hostile("while True: print('x' * 1000)", ("killed",)),
    "endless errors": Hostile("import sys\nwhile True: sys.stderr.write('x' * 1000)", ("killed",)),
    "endless output of children": Hostile(
        "import os\nos.fork(); os.fork()\nwhile True: os.write(1, b'x' * 65536)", ("killed",)
    ),
    "endless computation": Hostile("while True: pass", ("timeout",)),
    "a huge number": Hostile("print(len(str(9**9**9)))", ("timeout", "memory", "error")),
    "endless recursion in C": Hostile(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", ("killed", "memory", "timeout")
    ),
    "sleep": Hostile("import time\ntime.sleep(3600)", ("timeout",)),
    "sleep without streams": Hostile(
        "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(3600)", ("timeout",)
    ),
    "deaf to signals": Hostile(
        "import signal, time\nfor n in range(1, 32):\n"
        "    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)",
        ("timeout",),
    ),
    "raised limits": Hostile(
        attempt(
            "\n".join(
                f"resource.setrlimit(resource.{name}, (10**9, 10**9))"
                for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE")
            ),
            "import resource\n",
        ),
        ("ok",),
    ),
    # The host's files, environment and processes.
    "read the home": Hostile(
        attempt(f"print(os.listdir({str(Path.home())!r} + '/.ssh/..'))\nopen('CANARY').read()"), ("ok",)
    ),
    "read the environment": Hostile(
        "import os, glob\nfound = ' '.join(os.environ.values())\n"
        "for path in glob.glob('/proc/*/environ'): found += open(path, errors='replace').read()\n"
        f"print('ESCAPED' if {SECRET[::-1]!r}[::-1] in found else 'nothing')",
        ("ok",),
    ),
    "read other processes": Hostile(
        attempt("os.listdir('/proc/1')\nopen('/proc/1/mem', 'rb')\nopen('/proc/HOST/environ').read()"),
        ("ok",),
    ),
    "read passwords": Hostile(attempt("open('/etc/passwd').read()\nopen('/etc/shadow').read()"), ("ok",)),
    "open disks": Hostile(
        attempt("open('/dev/sda', 'rb')\nopen('/dev/vda', 'rb')\nopen('/dev/mem', 'rb')\nopen('/dev/tty')"),
        ("ok",),
    ),
    "write outside": Hostile(
        attempt(
            "open('CANARY', 'w').write('x')\nopen('/usr/lib/tether-was-here', 'w')\n"
            "os.mkdir('/tether-was-here')\nopen('/etc/ld.so.cache', 'r+b')\nopen(os.__file__, 'r+')\n"
            "open('/dev/shm/tether-was-here', 'w')\n"
            "os.chmod(os.__file__, 0o777)\nos.remove(os.__file__)"
        ),
        ("ok",),
    ),
    "write through links": Hostile(
        attempt(
            "os.symlink('CANARY', '/tmp/link'); open('/tmp/link', 'w').write('x')\n"
            "os.link(os.__file__, '/tmp/hard'); open('/tmp/hard', 'r+')\n"
            "os.symlink('/../../..' + 'CANARY', '/tmp/up'); open('/tmp/up').read()\n"
            "os.symlink(os.path.dirname('CANARY'), '/tmp/folder'); os.listdir('/tmp/folder')\n"
            "os.rename('/tmp', '/tmp2')\nos.symlink('/tmp', '/usr/lib/tether-was-here')"
        ),
        ("ok",),
    ),
    "leave the root": Hostile(
        attempt(
            "os.chroot('/tmp')\nos.open('..', os.O_RDONLY, dir_fd=99)\nos.fchdir(3)\n"
            "os.mknod('/tmp/n', 0o600)"
        ),
        ("ok",),
    ),
    "inherited descriptors": Hostile(
        "import os\nfor n in range(3, 1024):\n    try: os.fstat(n); print('ESCAPED', n)\n"
        "    except OSError: pass",
        ("ok",),
    ),
    "signal the parent": Hostile(
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('alive')", ("ok", "error")
    ),
    "signal everything": Hostile("import os, signal\nos.kill(-1, signal.SIGKILL)", ("ok", "killed", "error")),
    "signal the group": Hostile("import os, signal\nos.killpg(0, signal.SIGKILL)", ("killed",)),
    "signal the host": Hostile(attempt("os.kill(HOST, 9)\nos.kill(HOST, 0)\nos.kill(SENTINEL, 9)"), ("ok",)),
    "stop its first process": Hostile(
        "import os, signal\nos.kill(1, signal.SIGSTOP)\nos.kill(1, signal.SIGALRM)\nprint('still here')",
        ("ok", "killed", "error"),
    ),
    # Networks.
    "sockets": Hostile(
        attempt(
            "socket.create_connection(('127.0.0.1', PORT), 1)\nsocket.socket(socket.AF_UNIX)\n"
            "socket.socket(socket.AF_UNIX).connect('CANARY.sock')\n"
            "socket.socket(socket.AF_UNIX).connect(chr(0) + 'ABSTRACT')\n"
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\n"
            "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nsocket.getaddrinfo('example.com', 80)",
            "import socket\n",
        ),
        ("ok",),
    ),
    "a socket pair to an abstract name": Hostile(
        attempt(
            "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', chr(0) + 'ABSTRACT')\n"
            "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', 'CANARY.sock')",
            "import socket\n",
        ),
        ("ok",),
    ),
    # The kernel, by hand.
    "system calls by ctypes": Hostile(
        refused_by_kernel(
            "libc.socket(2, 1, 0)\nlibc.ptrace(16, 1, 0, 0)\nlibc.unshare(0x10000000)\nlibc.setns(0, 0)\n"
            "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)\nlibc.umount2(b'/tmp', 2)\nlibc.setuid(0)\n"
            "libc.setresuid(0, 0, 0)\nlibc.chroot(b'/tmp')\nlibc.pivot_root(b'/tmp', b'/tmp')\n"
            "libc.sethostname(b'x', 1)\nlibc.personality(0xffffffff)\nlibc.swapon(b'/tmp', 0)\n"
            "libc.klogctl(3, None, 0)\nlibc.reboot(0)\n"
            "libc.ioctl(0, 0x5412, b'x')\nlibc.process_vm_readv(1, None, 0, None, 0, 0)\n"
            "libc.init_module(None, 0, b'')\nlibc.clock_settime(0, b'x' * 16)\n"
            "libc.syscall(425, 8, None)\nlibc.syscall(321, 0, None, 0)\n"
            "libc.syscall(298, None, 0, -1, -1, 0)\n"
            "libc.syscall(435, None, 0)\nlibc.syscall(428, -100, b'/', 0)\n"
            "libc.syscall(442, -100, b'/', 0, 0, 0)"
        ),
        ("ok",),
    ),
    "new namespaces by clone": Hostile(
        CTYPES + "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000):\n"
        "    n = libc.syscall(56, flag | 17, 0, 0, 0, 0)\n"
        "    if n == 0: os._exit(0)\n    if n > 0: print('ESCAPED', hex(flag))",
        ("ok",),
    ),
    "crash": Hostile("import ctypes\nctypes.string_at(0)", ("killed",)),
    "more rights by exec": Hostile(
        attempt(
            "os.execv('/usr/bin/sudo', ['sudo', 'id'])\nos.execv('/bin/su', ['su'])\n"
            "os.setgid(0)\nos.setgroups([0])"
        ),
        ("ok",),
    ),
    "exit early": Hostile("import os\nos._exit(0)", ("ok",)),
    "exit from a child that goes on": Hostile(
        "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(3600)", ("ok",)
    ),
    "search memory for the answer": Hostile(
        "import gc, sys\nframe, seen = sys._getframe(), []\n"
        "while frame: seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "seen += [repr(o) for o in gc.get_objects() if isinstance(o, (str, list, dict))]\n"
        f"print('ESCAPED' if any({SECRET[::-1]!r}[::-1] in s for s in seen) else 'nothing')",
        ("ok",),
    ),
    "not Python": Hostile("this is not Python\x00", ("error",)),
    "half characters": Hostile("print('\ud800')", ("error",)),
}
if platform.machine() == "x86_64":
    HOSTILE["32-bit system calls"] = Hostile(
        "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
        "code[:12] = bytes.fromhex('b814000000cd80c390909090')\n"  # mov eax, getpid; int 0x80; ret
        "call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\n"
        "print('ESCAPED', call())",
        ("killed",),
    )


@dataclass
class Host:
    """What a hostile program would like to reach."""

    canary: Path
    sentinel: subprocess.Popen[bytes]
    tcp: socket.socket
    unix: socket.socket
    abstract: socket.socket

    def fill_in(self, code: str) -> str:
        for name, value in {
            "CANARY": str(self.canary),
            "ABSTRACT": f"tether-{os.getpid()}",
            "HOST": str(os.getpid()),
            "SENTINEL": str(self.sentinel.pid),
            "PORT": str(self.tcp.getsockname()[1]),
        }.items():
            code = code.replace(name, value)
        return code

    def check(self) -> None:
        assert self.canary.read_text() == SECRET
        assert sorted(path.name for path in self.canary.parent.iterdir()) == ["canary", "canary.sock"]
        assert self.sentinel.poll() is None
        for listening in (self.tcp, self.unix, self.abstract):
            with pytest.raises(BlockingIOError):
                listening.recv(1) if listening is self.abstract else listening.accept()
        for path in ("/tether-was-here", "/usr/lib/tether-was-here", "/dev/shm/tether-was-here"):
            assert not Path(path).exists()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("TETHER_TEST_SECRET", SECRET)
    (tmp_path / "canary").write_text(SECRET)
    sentinel = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    tcp = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "canary.sock"))
    unix.listen()
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    abstract.bind(f"\0tether-{os.getpid()}")
    for opened in (tcp, unix, abstract):
        opened.setblocking(False)
    yield Host(tmp_path / "canary", sentinel, tcp, unix, abstract)
    for opened in (tcp, unix, abstract):
        opened.close()
    sentinel.kill()
    sentinel.wait()


def run_hostile(sandbox: Sandbox, host: Host, time_limit: float = 1.5) -> dict[str, Execution]:
    programs = [
        Program(host.fill_in(hostile.code), time_limit=time_limit, memory_limit=MEMORY)
        for hostile in HOSTILE.values()
    ]
    return dict(zip(HOSTILE, sandbox.run_many(programs), strict=True))


def check_contained(executions: dict[str, Execution], time_limit: float) -> None:
    for name, done in executions.items():
        assert done.status in HOSTILE[name].statuses, (name, done)
        assert "ESCAPED" not in done.stdout, (name, done.stdout)
        assert SECRET not in done.stdout + done.stderr, name
        assert done.seconds < time_limit + 5, (name, done.seconds)


def test_every_hostile_program_is_contained_and_the_pool_lives(host: Host) -> None:
    with Sandbox(workers=2, backend="namespaces") as sandbox:
        check_contained(run_hostile(sandbox, host), 1.5)
        host.check()
        assert sandbox.run("print(6 * 7)").stdout == "42\n"
    host.check()


@pytest.mark.slow
@pytest.mark.parametrize("backend", INSTALLED)
@pytest.mark.parametrize("repetition", range(3))
def test_every_hostile_program_is_contained_again(backend: Backend, repetition: int, host: Host) -> None:
    with Sandbox(backend=backend) as sandbox:
        check_contained(run_hostile(sandbox, host, time_limit=3.0), 3.0)
        host.check()
        assert sandbox.run("print(6 * 7)").stdout == "42\n"


@pytest.mark.slow
def test_500_mixed_programs_end_in_five_minutes_with_right_verdicts(host: Host) -> None:
    rng = random.Random(0)
    names = [rng.choice(list(HOSTILE)) if number % 5 == 0 else "" for number in range(500)]
    programs = [
        Program(host.fill_in(HOSTILE[name].code), time_limit=2.0, memory_limit=MEMORY)
        if name
        else Program("print(int(input()) ** 2)", stdin=str(number), time_limit=20.0)
        for number, name in enumerate(names)
    ]
    started = time.monotonic()
    with Sandbox(workers=2) as sandbox:
        executions = sandbox.run_many(programs)
    seconds = time.monotonic() - started
    for number, (name, done) in enumerate(zip(names, executions, strict=True)):
        if name:
            check_contained({name: done}, 2.0)
        else:
            assert (done.status, done.stdout) == ("ok", f"{number**2}\n")
    host.check()
    assert seconds < 300
