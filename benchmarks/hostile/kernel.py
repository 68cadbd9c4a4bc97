"""The kernel by hand: system calls that are rare, new, of another architecture, or unknown."""

from __future__ import annotations

import platform

from benchmarks.hostile.program import CTYPES, Hostile, attempt, numbers, refused

PROGRAMS: dict[str, Hostile] = {
    "mounts": refused(
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)\nlibc.mount(b'/tmp', b'/usr', None, 4096, None)\n"
        "libc.umount2(b'/tmp', 2)\nlibc.umount2(b'/', 2)\nlibc.chroot(b'/tmp')\n"
        "libc.pivot_root(b'/tmp', b'/tmp')\nlibc.swapon(b'/tmp', 0)\nlibc.acct(b'/tmp/a')"
    ),
    "the new calls for mounts": numbers(
        "428, -100, b'/', 0",
        "429, 0, b'', 0, b'', 0",
        "430, b'tmpfs', 0",
        "431, 0, 0, None, None, 0",
        "432, 0, 0, 0",
        "433, -100, b'/', 0",
        "442, -100, b'/', 0, 0, 0",
        "457, None, None, 0, 0",
        "458, None, None, 0, 0",
        "467, -100, b'/', 0, None, 0",
    ),
    "another user": refused(
        "libc.setuid(0)\nlibc.setgid(0)\nlibc.setresuid(0, 0, 0)\nlibc.setfsuid(0)\n"
        "libc.capset(b'x' * 8, b'x' * 24)\n"
        "libc.setgroups(0, None)\nlibc.prctl(8, 1, 0, 0, 0)\nlibc.prctl(24, 0, 0, 0, 0)\n"
        "libc.prctl(47, 2, 21, 0, 0)"
    ),
    "the machine": refused(
        "libc.sethostname(b'x', 1)\nlibc.setdomainname(b'x', 1)\nlibc.reboot(0)\nlibc.klogctl(3, None, 0)\n"
        "libc.init_module(None, 0, b'')\nlibc.delete_module(b'x', 0)\nlibc.clock_settime(0, b'x' * 16)\n"
        "libc.settimeofday(b'x' * 16, None)\nlibc.adjtimex(b'x' * 208)\nlibc.vhangup()\n"
        "libc.quotactl(0, b'/', 0, None)\n"
    ),
    "io_uring": numbers("425, 8, None", "426, 0, 1, 0, 0, None, 0", "427, 0, 0, None, 0"),
    "bpf": numbers("321, 0, None, 0", "321, 5, b'\\0' * 72, 72"),
    "performance counters": numbers("298, None, 0, -1, -1, 0", "298, b'\\0' * 128, 0, -1, -1, 0"),
    "page faults in user space": numbers("323, 0", "323, 1"),
    "rule sets of landlock": numbers(
        "444, None, 0, 1", "444, b'\\1' + b'\\0' * 7, 8, 0", "445, 0, 1, None, 0", "446, 0, 0"
    ),
    "watches of all files": numbers("300, 0, 0", "301, 0, 0, 0, -100, b'/'", "253", "294, 0"),
    "filters of its own": numbers(
        "317, 0, 0, None",
        "317, 1, 0, None",
        "317, 1, 8, b'\\0' * 16",
        "317, 2, 0, None",
        "317, 3, 0, b'x' * 6",
        "157, 22, 1, 0, 0, 0",
        "157, 22, 2, b'x' * 16, 0, 0",
    ),
    "keys": numbers(
        "248, b'user', b'x', b'x', 1, -2", "249, b'user', b'x', None, 0", "250, 0, -3, 0", "250, 1, None"
    ),
    "handles of files": numbers("303, -100, b'/', None, None, 0", "304, -100, b'x' * 8, 0"),
    "personality": refused("libc.personality(0xffffffff)\nlibc.personality(0x0040000)\nlibc.personality(8)"),
    "places of memory": numbers(
        "237, None, 0, 1, None, 0, 0",
        "238, 1, None, 0",
        "256, 2, 0, None, None",
        "279, 2, 0, 0, 0, 0, 0",
        "450, 0, 0, 0, 0",
    ),
    "old input and output": numbers(
        "206, 8, b'\\0' * 8", "209, 0, 0, None", "207, 0", "172, 3", "173, 0, 1, 1", "154, 1, None, 0"
    ),
    "modules and other kernels": numbers(
        "175, None, 0, b''",
        "313, 0, b'', 0",
        "246, 0, 0, None, 0",
        "320, 0, 0, 0, b'', 0",
        "134, b'x'",
        "139, 1, b'x'",
    ),
    "disks": numbers(
        "162" + ", 0",
        "306, 0",
        "167, b'/tmp', 0",
        "168, b'/tmp'",
        "179, 0, b'/', 0, None",
        "443, 0, 0, 0, None",
    ),
    "options of processes": refused(
        "\n".join(
            f"libc.prctl({n}, 1, 0, 0, 0)"
            for n in (22, 26, 28, 33, 35, 41, 43, 47, 53, 55, 57, 59, 62, 66, 70, 78)
        )
    ),
    "words in a terminal's mouth": attempt(
        "\n".join(
            f"fcntl.ioctl(0, {n}, b'x' * 64)" for n in ("0x5412", "0x541c", "0x540e", "0x5402", "0x100005412")
        ),
        "import fcntl\n",
    ),
    "controls of devices and files": attempt(
        "fcntl.ioctl(open('/dev/random'), 0x5204, 0)\nfcntl.ioctl(open('/dev/null'), 0x1234)\n"
        "fcntl.ioctl(os.open('/tmp', 0), 0x40086602, b'x' * 8)\n"
        "fcntl.ioctl(open(os.__file__), 0xc020660b, bytes(64))",
        "import fcntl, os\n",
    ),
    "flags in the upper half": refused(
        "libc.syscall(157, 22 | 1 << 32, 2, 0, 0, 0)\nlibc.syscall(72, 0, 1031 | 1 << 32, 2**20)\n"
        "libc.syscall(53, 1 | 1 << 32, 2, 0, b'x' * 8)\n"
        "libc.syscall(56, 0x10000000 | 1 << 40 | 17, 0, 0, 0, 0)"
    ),
    "every rare call without arguments": Hostile(
        CTYPES
        + "for n in [*range(134, 137), *range(153, 157), *range(161, 186), *range(212, 216), *range(236, "
        "257),"
        " *range(272, 273), *range(278, 281), *range(303, 306), *range(310, 314), *range(320, 324), "
        "*range(425, 434)]:\n"
        "    if libc.syscall(n, 0, 0, 0, 0, 0, 0) != -1: print('ESCAPED', n)"
    ),
    "calls of the future": Hostile(
        CTYPES
        + "for n in [*range(337, 424), *range(442, 449), 450, 453, *range(457, 1200), 2**16, 2**30 - 1]:\n"
        "    if libc.syscall(n, 0, 0, 0, 0, 0, "
        "0) != -1 or ctypes.get_errno() != errno.ENOSYS: print('ESCAPED', n)"
    ),
    "no call at all": Hostile(
        CTYPES + "if libc.syscall(-1) != -1: print('ESCAPED')\nlibc.syscall(-5)", ("ok", "killed")
    ),
    "clone3": numbers("435, b'\\0' * 64, 64", "435, b'\\0' * 88, 88", "435, None, 0"),
    "crash": Hostile("import ctypes\nctypes.string_at(0)", ("killed",)),
    "a jump into nowhere": Hostile("import ctypes\nctypes.CFUNCTYPE(None)(4096)()", ("killed",)),
}

_CODE = (
    "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\ncode[:{0}] = bytes.fromhex('{1}')\n"
    "call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\n"
    "print('ESCAPED', call())"
)
X86 = {
    # mov eax, getpid; int 0x80; ret
    "32-bit system calls": Hostile(_CODE.format(8, "b814000000cd80c3"), ("killed",)),
    # mov eax, getpid of the ABI with 32-bit pointers; syscall; ret
    "system calls of the x32 ABI": Hostile(_CODE.format(8, "b8270000400f05c3"), ("killed",)),
    # mov eax, socket; ... by the old gate, which leads to the 32-bit table; sysenter
    "the gate of 32-bit kernels": Hostile(_CODE.format(8, "b8140000000f34c3"), ("killed",)),
}
if platform.machine() == "x86_64":
    PROGRAMS |= X86
