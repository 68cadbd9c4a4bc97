"""False results: ends, words and signals that look like those of a program that did well."""

from __future__ import annotations

from benchmarks.hostile.program import HIDDEN_SECRET, Hostile

PROGRAMS: dict[str, Hostile] = {
    "exit early": Hostile("import os\nos._exit(0)"),
    "exit by exec": Hostile("import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'pass'])"),
    "exit by the last thread": Hostile(
        "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(.1,)).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)",
        ("ok", "error", "timeout"),
    ),
    "a false ready": Hostile(
        "import os\nfor n in (1, 2): os.write(n, b'ready')\nfor n in range(3, 1024):\n"
        "    try: os.write(n, b'ready'); print('ESCAPED', n)\n    except OSError: pass"
    ),
    "a false reason on the launcher's channel": Hostile(
        "import os\nfor n in range(3, 1024):\n    try: os.write(n, b'OSError: no'); print('ESCAPED', n)\n"
        "    except OSError: pass\nos._exit(71)",
        ("error",),
    ),
    "an end as of a launcher": Hostile("import os\nos._exit(71)", ("error",)),
    "an end as of a signal": Hostile("import os\nos._exit(137)", ("killed",)),
    "an end that its first process reports": Hostile(
        "import os, signal\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass\n"
        "os._exit(3)",
        ("error", "killed"),
    ),
    "an end of an orphan": Hostile(
        "import os, time\nif os.fork() == 0:\n    if os.fork() == 0: time.sleep(.05); os._exit(0)\n"
        "    os._exit(0)\n"
        "os.wait(); time.sleep(.2); os._exit(4)",
        ("error",),
    ),
    "search memory for the answer": Hostile(
        "import gc, sys\nframe, seen = sys._getframe(), []\n"
        "while frame: seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "seen += [repr(o) for o in gc.get_objects() if isinstance(o, (str, list, dict))]\n"
        "if any('folder_size' in s for s in map(str, sys.argv + sys.orig_argv)): print('ESCAPED')\n"
        f"print('ESCAPED' if any({HIDDEN_SECRET} in s for s in seen) else 'nothing')"
    ),
    "search the stack and the heap for the launcher": Hostile(
        "import ctypes, sys\nn = id(sys) & ~4095\nwords = b'folder_' + b'size'\n"
        "seen = ctypes.string_at(n, 4096)\n"
        "environ = ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'environ').value\n"
        "seen += ctypes.string_at(environ, 2048)\nprint('ESCAPED' if words in seen else 'nothing')",
        ("ok", "killed"),
    ),
    "rewrite itself": Hostile(
        "open('/tmp/program.py', 'w').write('print(1)')\nimport os, sys\nif len(sys.argv) < 2:\n"
        "    os.execv(sys.executable, [sys.executable, '/tmp/program.py', 'again'])"
    ),
    "a module in place of the library's": Hostile(
        "import subprocess, sys\nopen('/tmp/os.py', 'w').write('print(\"ESCAPED\")')\n"
        "subprocess.run([sys.executable, '-I', '-c', 'import os'])"
    ),
    "not Python": Hostile("this is not Python\x00", ("error",)),
    "half characters": Hostile("print('\ud800')", ("error",)),
    "nothing": Hostile(""),
    "a very long line": Hostile("x = '" + "y" * 10**6 + "'", ("ok",)),
    "very deep source": Hostile("x = " + "(" * 10**5, ("error", "memory", "killed")),
}
