"""Too many processes, too much time, too much output."""

from __future__ import annotations

from benchmarks.hostile.program import CTYPES, HOLD, Hostile, attempt

_LIMITS = ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "SIGPENDING", "STACK", "MEMLOCK", "RTPRIO", "NICE")
_DEAF = (
    "import os, signal, time\nfor n in range(1, 32):\n"
    "    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
)

PROGRAMS: dict[str, Hostile] = {
    # Processes.
    "fork bomb": Hostile(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ("timeout",)
    ),
    "fork bomb of orphans": Hostile(
        _DEAF + "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n"
        "    except OSError: time.sleep(.001)",
        ("timeout",),
    ),
    "thread bomb": Hostile(
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
        ("error", "timeout", "memory"),
    ),
    "vfork bomb": Hostile(
        "import os, sys\nwhile True:\n"
        "    try: os.posix_spawn(sys.executable, [sys.executable, '/tmp/program.py'], {})\n"
        "    except OSError: pass",
        ("timeout", "memory"),
    ),
    "processes that come and go": Hostile(
        "import os\nwhile True:\n    if os.fork() == 0: os._exit(0)\n    os.wait()", ("timeout",)
    ),
    "zombies": Hostile(
        "import os\nwhile True:\n    try:\n        if os.fork() == 0: os._exit(0)\n    except OSError: pass",
        ("timeout",),
    ),
    "raised limits": attempt(
        "\n".join(f"resource.setrlimit(resource.RLIMIT_{name}, (10**9, 10**9))" for name in _LIMITS)
        + "\nresource.prlimit(1, resource.RLIMIT_NPROC, (10**6, 10**6))",
        "import resource\n",
    ),
    # Time.
    "endless computation": Hostile("while True: pass", ("timeout",)),
    "computation in all processes": Hostile(
        "import os\nfor _ in range(5):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass",
        ("timeout",),
    ),
    "a huge number": Hostile("print(len(str(9**9**9)))", ("timeout", "memory", "error")),
    "a pattern that backtracks": Hostile("import re\nre.match('(a+)+b', 'a' * 64)", ("timeout",)),
    # CPython 3.11 that is refused memory for a frame: "SystemError: error return without exception set".
    "endless recursion in C": Hostile(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        ("killed", "memory", "timeout", "error"),
    ),
    "sleep": Hostile("import time\ntime.sleep(3600)", ("timeout",)),
    "sleep without streams": Hostile(
        "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(3600)", ("timeout",)
    ),
    "sleep in a vfork": Hostile(
        CTYPES + "if libc.syscall(56, 0x4000 | 17, 0, 0, 0, 0) == 0: libc.sleep(3600)" + HOLD, ("timeout",)
    ),
    "a stop of itself": Hostile("import os, signal\nos.kill(0, signal.SIGSTOP)" + HOLD, ("timeout",)),
    "stopped children": Hostile(
        "import os, signal\nfor _ in range(5):\n    n = os.fork()\n    if n == 0: os.kill(os.getpid(), 19)\n"
        "    os.kill(n, signal.SIGSTOP)\nos.wait()",
        ("timeout",),
    ),
    "a stop by another process": Hostile(
        "import os, signal, time\nn = os.getpid()\nif os.fork() == 0:\n"
        "    while True: os.kill(n, signal.SIGSTOP)" + HOLD,
        ("timeout",),
    ),
    "deaf to signals": Hostile(_DEAF + "while True: time.sleep(1)", ("timeout",)),
    "deaf to the limit of CPU time": Hostile(
        "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass", ("timeout",)
    ),
    "a storm of alarms": Hostile(
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)\nwhile True: pass",
        ("timeout",),
    ),
    "a storm of signals between processes": Hostile(
        _DEAF + "one = os.getpid()\ntwo = os.fork() or one\nwhile True: os.kill(two, 10)",
        ("timeout", "error"),
    ),
    "a higher priority": attempt(
        "os.nice(-5)\nos.setpriority(os.PRIO_PROCESS, 0, -1)\nos.setpriority(os.PRIO_PROCESS, HOST, 19)\n"
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\n"
        "os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))\nos.sched_setaffinity(HOST, {0})"
    ),
    "a lower priority and one processor": Hostile(
        "import os\nos.nice(19); os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass",
        ("timeout",),
    ),
    # Output.
    "endless output": Hostile("while True: print('x' * 1000)", ("killed",)),
    "endless errors": Hostile("import sys\nwhile True: sys.stderr.write('x' * 1000)", ("killed",)),
    "endless output of children": Hostile(
        "import os\nos.fork(); os.fork()\nwhile True: os.write(1, b'x' * 65536)", ("killed",)
    ),
    "endless output of an orphan": Hostile(
        "import os\nif os.fork(): os._exit(0)\nwhile True: os.write(1, b'x' * 65536)", ("ok", "killed")
    ),
    "endless output of no text": Hostile("import os\nwhile True: os.write(1, b'\\xff' * 65536)", ("killed",)),
    "output at once": Hostile("import os\nos.write(1, b'x' * 2**26)", ("killed",)),
    "output of many vectors": Hostile(
        "import os\nwhile True: os.writev(2, [b'x' * 4096] * 1024)", ("killed",)
    ),
    "output without waiting": Hostile(
        "import os\nos.set_blocking(1, False)\nwhile True:\n    try: os.write(1, b'x' * 65536)\n"
        "    except BlockingIOError: pass",
        ("killed",),
    ),
    "output through copies of a stream": Hostile(
        "import os\ncopies = [os.dup(1) for _ in range(30)]\nwhile True:\n"
        "    for n in copies: os.write(n, b'x' * 1000)",
        ("killed",),
    ),
    "a byte at a time": Hostile("import os\nwhile True: os.write(1, b'x')", ("killed", "timeout")),
    "output nobody ends": Hostile("import os\nos.close(1)\nos.write(2, b'x' * 10**5)" + HOLD, ("timeout",)),
    "reading its output back": attempt("os.read(1, 1)\nos.read(2, 1)\nos.lseek(0, 0, 0)\nos.write(0, b'x')"),
}
