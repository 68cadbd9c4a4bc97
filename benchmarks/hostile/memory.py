"""Memory by every door: what a program may make the machine hold without its own pages showing it."""

from __future__ import annotations

from benchmarks.hostile.program import CTYPES, HOLD, Hostile, attempt, children, numbers, refused

# A loaded machine may give too little time to gather much.
_HOARD = ("memory", "timeout", "error")
# A loop that gathers until it is refused and then keeps what it has.
_UNTIL_REFUSED = "while True:\n    try:\n        {}\n    except (OSError, MemoryError): break" + HOLD
_MAP = (
    CTYPES + "libc.mmap.restype = ctypes.c_void_p\n"
    "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]\n"
    "libc.mprotect.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]\n"
    "libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\n"
)

PROGRAMS: dict[str, Hostile] = {
    "memory bomb": Hostile("x = b'x' * 2**20\nwhile True: x += x", ("memory",)),
    "memory bomb of a list": Hostile("x = []\nwhile True: x.append(bytes(2**20))", ("memory",)),
    "memory bomb in children": children(8, "x = [b'x' * 2**20 for _ in range(60)]"),
    "memory bomb of all processes at once": children(31, "x = b'x' * (100 * 2**20)"),
    "memory copied on write": Hostile(
        "import os\nx = bytearray(b'x' * (80 * 2**20))\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        for n in range(0, len(x), 4096): x[n] = 1" + HOLD.replace("\n", "\n        ") + HOLD,
        ("memory", "timeout"),
    ),
    "memory by brk": children(
        6,
        "import ctypes\nlibc = ctypes.CDLL(None); libc.sbrk.restype = ctypes.c_void_p\n"
        "while True:\n    p = libc.sbrk(2**20)\n    ctypes.memset(p, 1, 2**20)",
        "memory",
        "timeout",
    ),
    "memory by growing a map": children(
        6,
        "import mmap\nm = mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE)\n"
        "while True:\n    n = len(m); m.resize(n + 2**20); m[n:] = b'x' * 2**20",
    ),
    "compressed bomb": Hostile(
        "import zlib\nx = zlib.compress(bytes(2**22))\nx = [zlib.decompress(x) for _ in range(100)]",
        ("memory", "timeout"),
    ),
    "shared maps": Hostile(
        "import mmap\nx = []\n"
        + _UNTIL_REFUSED.format("x.append(mmap.mmap(-1, 2**20)); x[-1][:] = b'x' * 2**20"),
        _HOARD,
    ),
    "shared maps let go": children(
        6,
        "import mmap\nx = []\nwhile True:\n    x.append(mmap.mmap(-1, 2**20)); x[-1][:] = b'x' * 2**20\n"
        "    x[-1].madvise(mmap.MADV_DONTNEED)",
    ),
    "shared maps given back but for a page": Hostile(
        _MAP + "while True:\n    p = libc.mmap(None, 2**20, 3, 0x21, -1, 0)\n    ctypes.memset(p, 1, 2**20)\n"
        "    libc.munmap(p, 2**20 - 4096)",
        ("memory", "timeout"),
    ),
    "shared maps handed on by fork and exit": Hostile(
        "import mmap, os, time\nif os.fork(): time.sleep(60)\nx = []\nwhile True:\n"
        "    for _ in range(8): x.append(mmap.mmap(-1, 2**20)); x[-1][:] = b'x' * 2**20\n"
        "    if os.fork(): os._exit(0)\n    for m in x: m.madvise(mmap.MADV_DONTNEED)",
        ("memory", "timeout"),
    ),
    "pages handed on by fork and exit": Hostile(
        "import os, time\nif os.fork(): time.sleep(60)\nx = []\nwhile True:\n    x.append(b'x' * 2**23)\n"
        "    if os.fork(): os._exit(0)",
        ("memory", "timeout"),
    ),
    "pages shared with children that come and go": Hostile(
        "import os\nfor number in range(5):\n    if os.fork() == 0:\n        x = b'x' * (120 * 2**20)\n"
        "        while True:\n            try:\n                if os.fork() == 0: os._exit(0)\n"
        "                os.waitpid(-1, os.WNOHANG)\n            except OSError: pass" + HOLD,
        ("memory", "timeout"),
    ),
    "a large shared map": attempt(
        "mmap.mmap(-1, 2**24)\nmmap.mmap(-1, 2**20 + 1)\nopen('/dev/zero', 'r+b')", "import mmap\n"
    ),
    "large pages from the pool": refused(
        "ctypes.c_long(libc.mmap(None, 2**21, 3, 0x40022, -1, 0) or 0).value"
    ),
    "huge pages let go but for a page": Hostile(
        _MAP
        + "while True:\n    p = libc.mmap(None, 2**22, 3, 0x22, -1, 0)\n    q = (p + 2**21 - 1) >> 21 << 21\n"
        "    libc.madvise(q, 2**21, 14)\n    ctypes.memset(q, 1, 2**21)\n    libc.munmap(p, q - p)\n"
        "    libc.munmap(q + 4096, p + 2**22 - q - 4096)",
        ("memory", "killed", "timeout"),
    ),
    "huge pages allowed again": refused("libc.prctl(41, 0, 0, 0, 0)"),
    "memory of a process whose first thread ended": children(
        8,
        "import ctypes, threading\ndef hoard():\n    x = b'x' * (60 * 2**20)\n    time.sleep(60)\n"
        "threading.Thread(target=hoard).start()\nctypes.CDLL(None).syscall(60, 0)",
    ),
    "memory of processes that are not dumpable": children(
        8,
        "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\nx = b'x' * (60 * 2**20)\ntime.sleep(60)",
    ),
    "memory of orphans adopted by a subreaper": Hostile(
        "import ctypes, os\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\nfor _ in range(8):\n"
        "    if os.fork() == 0:\n        if os.fork(): os._exit(0)\n        x = b'x' * (60 * 2**20)"
        + HOLD.replace("\n", "\n        ")
        + HOLD,
        ("memory", "timeout"),
    ),
    "memory of siblings made by clone": Hostile(
        CTYPES + "for _ in range(8):\n    if libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0:\n"
        "        x = b'x' * (60 * 2**20)" + HOLD.replace("\n", "\n        ") + HOLD,
        ("memory", "timeout"),
    ),
    "page tables": children(
        8,
        _MAP + "for n in range(1, 20000):\n    p = libc.mmap(n << 32, 4096, 1, 0x22, -1, 0)\n"
        "    ctypes.string_at(p, 1)",
    ),
    "many mappings": children(
        8,
        _MAP + "p = libc.mmap(None, 2**27, 0, 0x22, -1, 0)\n"
        "for n in range(0, 2**27, 8192): libc.mprotect(p + n, 4096, 1)",
    ),
    "stacks of threads": children(
        6,
        "import ctypes, sys, threading\nthreading.stack_size(2**23)\n"
        "def fill():\n    x = (ctypes.c_char * 2**20)(); sys.setrecursionlimit(10**6); deep(9000)\n"
        "def deep(n): return n and len(repr(sorted([n], key=lambda _: deep(n - 1))))\n"
        "for _ in range(4): threading.Thread(target=fill).start()",
        *_HOARD,
        "killed",
    ),
    "a large stack": Hostile(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return sorted([n], key=lambda _: f(n + 1))\n"
        "f(0)",
        ("killed", "memory", "timeout", "error"),
    ),
    "arguments of programs": children(
        30,
        "import sys\nos.execv(sys.executable, [sys.executable, '-Sc', 'import time; time.sleep(60)'"
        "] + ['x' * 100_000] * 19)",
        "memory",
        "timeout",
    ),
    "files": Hostile(
        "x = b'x' * (140 * 2**20)\nfor n in range(7):\n"
        "    with open(f'/tmp/{n}', 'wb') as f: f.write(x[:2**23])" + HOLD,
        ("memory", "timeout"),
    ),
    "deleted files that are open": Hostile(
        "import os\nx = b'x' * (140 * 2**20)\nopened = []\nfor n in range(7):\n"
        "    opened.append(open('/tmp/f', 'wb'))\n    os.remove('/tmp/f')\n"
        "    opened[-1].write(x[:2**23]); opened[-1].flush()" + HOLD,
        ("memory", "timeout"),
    ),
    "deleted files that are mapped": Hostile(
        "import mmap, os\nfor _ in range(2):\n    if os.fork() == 0: break\nx = b'x' * (60 * 2**20)\n"
        "maps = []\n"
        "for n in range(3):\n    with open(f'/tmp/{os.getpid()}', 'w+b') as f:\n        f.truncate(2**22)\n"
        "        maps.append(mmap.mmap(f.fileno(), 2**22))\n    os.remove(f.name); maps[-1][:] = x[:2**22]\n"
        "    maps[-1].madvise(mmap.MADV_DONTNEED)" + HOLD,
        ("memory", "timeout"),
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
    "a million files": Hostile(
        "for n in range(10**6): open(f'/tmp/{n}', 'x').close()", ("error", "timeout", "memory")
    ),
    "files of long names": Hostile(
        "for n in range(10**6): open('/tmp/' + f'{n:x<250}', 'x').close()", ("error", "timeout", "memory")
    ),
    "long links": Hostile(
        "import os\nfor n in range(10**6): os.symlink('x' * 4000, f'/tmp/{n}')",
        ("error", "timeout", "memory"),
    ),
    "deep folders": Hostile(
        "import os\nfor n in range(10**6): os.mkdir('d'); os.chdir('d')", ("error", "timeout", "memory")
    ),
    "links in a circle": attempt(
        "os.symlink('/tmp/b', '/tmp/a'); os.symlink('/tmp/a', '/tmp/b'); open('/tmp/a')\n"
        "os.symlink('/tmp/l/l', '/tmp/l'); os.stat('/tmp/l')"
    ),
    "names that do not exist": Hostile(
        "import os\nn = 0\nwhile True: os.path.exists(f'/tmp/{n}'); n += 1", ("timeout",)
    ),
    "extended attributes": attempt(
        "os.setxattr('/tmp', 'user.x', b'x')\nos.setxattr('/tmp/program.py', 'user.x', b'x' * 60000)"
    ),
    "full pairs of sockets": children(
        31,
        "import socket\npairs = []\nfor _ in range(28):\n    pairs.append(socket.socketpair())\n"
        "    for one in pairs[-1]:\n        one.setblocking(False)\n        try:\n"
        "            while True: one.send(b'x' * 65536)\n        except BlockingIOError: pass",
    ),
    "pairs of sockets that keep messages": attempt(
        "socket.socketpair(type=socket.SOCK_DGRAM)\nsocket.socketpair(type=socket.SOCK_SEQPACKET)\n"
        "socket.socketpair(socket.AF_INET)\nsocket.socketpair(30)",
        "import socket\n",
    ),
    "larger buffers of sockets": attempt(
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)\n"
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, 32, 2**30)",
        "import socket\n",
    ),
    "descriptors in a message": attempt(
        "socket.socketpair()[0].sendmsg([b'x'], [(1, 1, array.array('i', [0]))])\n"
        "socket.socketpair()[0].sendmsg([b'x'])\nsocket.send_fds(socket.socketpair()[0], [b'x'], [0])",
        "import array, socket\n",
    ),
    "full pipes": children(
        31,
        "pipes = [os.pipe() for _ in range(30)]\nfor _, one in pipes:\n    os.set_blocking(one, False)\n"
        "    try:\n        while True: os.write(one, b'x' * 65536)\n    except BlockingIOError: pass",
    ),
    "larger pipes": attempt("fcntl.fcntl(os.pipe()[1], 1031, 2**20)", "import fcntl, os\n"),
    "pages in pipes": attempt(
        "os.splice(os.open('/tmp/program.py', 0), os.pipe()[1], 10)\nos.sendfile(os.pipe()[1], 0, 0, 1)\n"
        "os.sendfile(os.pipe()[1], os.open('/tmp/program.py', 0), 0, 10)"
    ),
    "pages in pipes by number": numbers(
        "275, 0, None, 1, None, 1, 0", "276, 0, 1, 1, 0", "278, 1, None, 0, 8"
    ),
    "watches of epoll": attempt("select.epoll()", "import select\n"),
    "counters and clocks": children(
        31,
        "import ctypes\nlibc = ctypes.CDLL(None)\nfor n in range(64):\n"
        "    libc.timerfd_create(0, 0)\n    libc.eventfd(0, 0)",
        "timeout",
        "memory",
    ),
    "timers": children(
        8,
        CTYPES + "t = ctypes.c_void_p()\nfor n in range(10**6):\n"
        "    if libc.timer_create(0, None, ctypes.byref(t)): break",
        "timeout",
        "memory",
    ),
    "queued signals": children(
        8,
        "import ctypes, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(34, 60))\n"
        "libc = ctypes.CDLL(None)\nfor n in range(10**6):\n    if libc.sigqueue(os.getpid(), 40, 1): break",
        "timeout",
        "memory",
    ),
    "locks of parts of a file": attempt(
        "fcntl.lockf(open('/tmp/l', 'w'), fcntl.LOCK_EX, 1, 0)\nfcntl.fcntl(0, 37, b'x' * 32)\n"
        "fcntl.fcntl(open('/tmp/l', 'w'), fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "fcntl.fcntl(os.open('/tmp', 0), fcntl.F_NOTIFY, 1)\nfcntl.flock(open(os.__file__), fcntl.LOCK_EX)",
        "import fcntl, os\n",
    ),
    "hash tables of futexes": refused("libc.prctl(78, 1, 2**20, 0, 0)"),
    "names of mappings": refused("libc.prctl(0x53564d41, 0, 0, 4096, b'x')"),
    "keys": numbers("248, b'user', b'x', b'x', 1, -2", "249, b'user', b'x', None, 0", "250, 0, -3, 0"),
    "objects of other kinds": refused(
        "libc.memfd_create(b'x', 0)\nlibc.shmget(0, 2**24, 0o1600)\nlibc.msgget(0, 0o1600)\n"
        "libc.semget(0, 1, 0o1600)\nlibc.mlockall(3)\nlibc.mlock(b'x', 1)\nlibc.syscall(447, 0)\n"
        "libc.syscall(240, b'/x', 0o102, 0o600, None)\nlibc.inotify_init()\nlibc.syscall(206, 8, b'x' * 8)\n"
        "libc.syscall(237, None, 0, 1, None, 0, 0)"
    ),
}
