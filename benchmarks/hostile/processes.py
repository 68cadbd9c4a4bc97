"""Other processes, of the host and of the sandbox, and other machines."""

from __future__ import annotations

from benchmarks.hostile.program import CTYPES, HOLD, Hostile, attempt, numbers, refused

PROGRAMS: dict[str, Hostile] = {
    "signal the parent": Hostile(
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('alive')", ("ok", "error")
    ),
    "signal everything": Hostile("import os, signal\nos.kill(-1, signal.SIGKILL)", ("ok", "killed", "error")),
    "signal the group": Hostile("import os, signal\nos.killpg(0, signal.SIGKILL)", ("killed",)),
    "signal the host": attempt(
        "os.kill(HOST, 9)\nos.kill(HOST, 0)\nos.kill(SENTINEL, 9)\nos.killpg(SENTINEL, 9)\n"
        "signal.pidfd_send_signal(os.pidfd_open(1), 0)",
        "import os, signal\n",
    ),
    "signal every number": Hostile(
        "import os\nfor n in range(3, 40000):\n    try: os.kill(n, 0); print('ESCAPED', n)\n"
        "    except ProcessLookupError: pass"
    ),
    "stop its first process": Hostile(
        "import os, signal\nos.kill(1, signal.SIGSTOP)\nos.kill(1, signal.SIGALRM)\nprint('still here')",
        ("ok", "killed", "error"),
    ),
    "exit from a child that goes on": Hostile(
        "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(3600)"
    ),
    "daemon by two forks": Hostile(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    for n in range(3): os.close(n)\n    time.sleep(3600)\ntime.sleep(.1)"
    ),
    "outlive the parent's death": Hostile(
        "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "if os.fork() == 0: time.sleep(3600)"
    ),
    "a name of the kernel": Hostile(
        "import ctypes\nctypes.CDLL(None).prctl(15, b'[kthreadd]', 0, 0, 0)\nwhile True: pass", ("timeout",)
    ),
    "join other groups": attempt(
        "os.setpgid(0, 1)\nos.setpgid(HOST, 0)\nos.getsid(HOST)\nos.waitpid(HOST, 0)\nos.tcsetpgrp(0, 1)"
    ),
    "trace": refused(
        "libc.ptrace(0, 0, 0, 0)\nlibc.ptrace(16, 1, 0, 0)\nlibc.ptrace(0x4206, 1, 0, 0)\n"
        "libc.ptrace(16, HOST, 0, 0)"
    ),
    "memory of other processes": refused(
        "libc.process_vm_readv(1, None, 0, None, 0, 0)\nlibc.process_vm_writev(1, None, 0, None, 0, 0)\n"
        "libc.syscall(440, 0, None, 0, 0, 0)\nlibc.syscall(448, 0, 0)"
    ),
    "descriptors of processes": numbers("434, 1, 0", "434, HOST, 0", "438, 0, 0, 0", "424, 0, 0, None, 0"),
    "comparing processes": numbers("312, 1, 2, 1, 0, 0", "312, 2, 2, 0, 0, 1"),
    "new namespaces by clone": Hostile(
        CTYPES
        + "for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):\n"
        "    n = libc.syscall(56, flag | 17, 0, 0, 0, 0)\n"
        "    if n == 0: os._exit(0)\n    if n > 0: print('ESCAPED', hex(flag))"
    ),
    "threads with descriptors apart": refused(
        "libc.syscall(56, 0x10000 | 0x800 | 0x100, 0, 0, 0, 0)\nlibc.syscall(56, 0x10000, 0, 0, 0, 0)\n"
        "libc.syscall(436, 3, 100, 2)\nlibc.unshare(0x400)"
    ),
    "namespaces of others": refused(
        "libc.unshare(0x10000000)\nlibc.unshare(0x20000)\nlibc.unshare(0x40000000)\nlibc.unshare(0x80)\n"
        "libc.setns(0, 0)\nlibc.syscall(435, None, 0)\nlibc.syscall(435, b'\\0' * 88, 88)"
    ),
    "sockets": attempt(
        "socket.create_connection(('127.0.0.1', PORT), 1)\nsocket.socket(socket.AF_UNIX)\n"
        "socket.socket(socket.AF_UNIX).connect('CANARY.sock')\n"
        "socket.socket(socket.AF_UNIX).connect(chr(0) + 'ABSTRACT')\n"
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nsocket.socket(socket.AF_INET6)\n"
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\n"
        "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nsocket.getaddrinfo('example.com', 80)\n"
        "import urllib.request; urllib.request.urlopen('http://example.com', timeout=1)",
        "import socket\n",
    ),
    "sockets of every family": Hostile(
        CTYPES + "for family in range(64):\n    for kind in (1, 2, 3, 5):\n"
        "        if libc.socket(family, kind, 0) != -1: print('ESCAPED', family, kind)"
    ),
    "a pair of sockets to an abstract name": attempt(
        "socket.socketpair()[0].sendto(b'x', chr(0) + 'ABSTRACT')\n"
        "socket.socketpair()[0].sendto(b'x', 'CANARY.sock')\n"
        "socket.socketpair()[0].connect('CANARY.sock')\nsocket.socketpair()[0].bind('/tmp/s')\n"
        "socket.socketpair()[0].listen()\nsocket.socketpair()[0].accept()",
        "import socket\n",
    ),
    "everything at once": Hostile(
        "import os, threading\ndef each():\n    x = []\n    while True:\n        try:\n"
        "            os.fork(); os.pipe()\n"
        "            x.append(b'x' * 2**20); os.write(1, b'x')\n        except OSError: pass\n"
        "threading.Thread(target=each).start(); each()" + HOLD,
        ("memory", "timeout", "killed", "error"),
    ),
}
