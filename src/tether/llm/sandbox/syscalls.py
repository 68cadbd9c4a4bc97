"""Which system calls sandboxed programs may make, compiled by libseccomp."""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import platform
import tempfile
import termios
from typing import Any

from tether.errors import MissingDependencyError

# Everything else does not exist for a program (ENOSYS), calls that kernels will learn one day included. What
# is missing opens a way to other processes, holds memory that `memory_watch` cannot see, or is often used in
# exploits. The C library and Python do without: asyncio, for one, waits with poll where there is no epoll.
ALLOWED: dict[str, tuple[str, ...]] = {
    "files": (
        *("read", "write", "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "preadv2"),
        *("pwritev2", "open", "openat", "openat2", "creat", "close", "lseek", "dup", "dup2", "dup3"),
        *("stat", "lstat", "fstat", "newfstatat", "statx", "statfs", "fstatfs", "access", "faccessat"),
        *("faccessat2", "readlink", "readlinkat", "getdents", "getdents64", "getcwd", "chdir", "fchdir"),
        *("mkdir", "mkdirat", "rmdir", "rename", "renameat", "renameat2", "link", "linkat", "unlink"),
        *("unlinkat", "symlink", "symlinkat", "chmod", "fchmod", "fchmodat", "fchmodat2", "umask"),
        *("chown", "fchown", "lchown", "fchownat", "utime", "utimes", "utimensat", "futimesat"),
        *("truncate", "ftruncate", "fallocate", "fsync", "fdatasync", "sync_file_range", "fadvise64"),
        *("copy_file_range", "readahead", "pipe", "pipe2"),
        *("getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr"),
    ),
    "memory": ("brk", "munmap", "mremap", "mprotect", "madvise", "mincore", "msync", "membarrier"),
    "processes": (
        *("fork", "vfork", "execve", "execveat", "exit", "exit_group", "wait4", "waitid", "kill", "tkill"),
        *("tgkill", "getpid", "getppid", "gettid", "getpgid", "setpgid", "getpgrp", "getsid", "setsid"),
        *("set_tid_address", "set_robust_list", "get_robust_list", "rseq", "arch_prctl", "futex"),
        *("futex_waitv", "futex_wake", "futex_wait", "futex_requeue", "restart_syscall", "getrusage"),
        "times",
        *("getrlimit", "setrlimit", "prlimit64", "getpriority", "setpriority", "getcpu", "uname", "sysinfo"),
        *("sched_yield", "sched_getaffinity", "sched_setaffinity", "sched_getparam", "sched_setparam"),
        *("sched_getscheduler", "sched_setscheduler", "sched_getattr", "sched_get_priority_max"),
        *("sched_get_priority_min", "sched_rr_get_interval", "riscv_flush_icache", "riscv_hwprobe"),
        *("getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid", "getgroups", "getrandom"),
    ),
    "signals and time": (
        *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigpending", "rt_sigtimedwait"),
        *("rt_sigsuspend", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "sigaltstack", "pause", "alarm"),
        *("signalfd", "signalfd4", "nanosleep", "clock_nanosleep", "clock_gettime", "clock_getres"),
        *("gettimeofday", "time", "getitimer", "setitimer", "timer_create", "timer_settime"),
        *("timer_gettime", "timer_getoverrun", "timer_delete", "timerfd_create", "timerfd_settime"),
        "timerfd_gettime",
    ),
    "waiting and pairs of sockets": (
        *("poll", "ppoll", "select", "pselect6", "eventfd", "eventfd2"),
        *("sendto", "recvfrom", "recvmsg", "shutdown", "getsockopt", "getsockname", "getpeername"),
    ),
}
"""System calls a program may make with any arguments; `compiled_filter` adds those it may make with some."""

SHARED_MAPPING = 2**20
"""Bytes of the largest mapping a program can make that is shared with its children and of no file."""

MACHINES = ("x86_64", "aarch64", "riscv64")
"""Processors whose calls take their arguments where the filter looks for them."""

# CLONE_NEW...: NS, CGROUP, UTS, IPC, USER, PID, NET.
_NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
_CLONE_FILES, _CLONE_THREAD, _CLOSE_RANGE_UNSHARE = 0x400, 0x10000, 2
_MAP_HUGETLB = 0x40000
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPES = 1, 1, 0xF
_TERMINAL = (termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD, termios.FIONBIO, termios.FIOCLEX)
_FILE_COMMANDS = (
    *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL),
    1032,  # F_GETPIPE_SZ, which not every Python names
)
# Death signal, dumpable, name, no new privileges, child subreaper: set and get.
_PROCESS_OPTIONS = (1, 2, 3, 4, 15, 16, 36, 37, 38, 39)
_32_BITS = 0xFFFFFFFF


@functools.cache
def compiled_filter() -> bytes:
    """Compile the filter for this machine, as the instructions the kernel takes.

    Calls of another architecture end the program: libseccomp's default, and the reason why 32-bit calls
    are no way around the filter.

    >>> len(compiled_filter()) % 8
    0
    """
    if platform.machine() not in MACHINES:
        raise MissingDependencyError(
            f"The sandbox's filter of system calls is made for {', '.join(MACHINES)}, and this is a "
            f"{platform.machine()}. Run code tasks on one of those."
        )
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"The sandbox filters system calls with libseccomp, which cannot be used here ({error}). Install "
            "tether-rl[llm], which brings pyseccomp, and the library: apt-get install libseccomp2, or dnf "
            "install libseccomp."
        ) from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
    for names in ALLOWED.values():
        for name in names:
            # Not every architecture has every call, and an older libseccomp lacks some of the newest.
            if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0:
                rules.add_rule(pyseccomp.ALLOW, name)
    _allow_some(rules, pyseccomp)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _allow_some(rules: Any, seccomp: Any) -> None:
    """Allow calls whose arguments decide what they open; with other arguments they do not exist either.

    clone3 hides its flags behind a pointer; without it, the C library falls back to clone.
    """

    def bits(argument: int, mask: int, value: int) -> Any:
        return seccomp.Arg(argument, seccomp.MASKED_EQ, mask, value)

    # Threads of one process share their descriptors, so that looking at one's is looking at all.
    rules.add_rule(seccomp.ALLOW, "clone", bits(0, _NAMESPACES | _CLONE_THREAD, 0))
    threads = _CLONE_THREAD | _CLONE_FILES
    rules.add_rule(seccomp.ALLOW, "clone", bits(0, _NAMESPACES | threads, threads))
    rules.add_rule(seccomp.ALLOW, "close_range", bits(2, _CLOSE_RANGE_UNSHARE, 0))
    # Private memory, or a file's. What is shared and of no file outlives most of its mapping, unseen:
    # `memory_watch` counts each such mapping, however small, as the largest that may be made.
    shared = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    rules.add_rule(seccomp.ALLOW, "mmap", bits(3, _MAP_HUGETLB | mmap.MAP_SHARED, 0))
    rules.add_rule(seccomp.ALLOW, "mmap", bits(3, _MAP_HUGETLB | mmap.MAP_ANONYMOUS, 0))
    small, large = (seccomp.Arg(1, how, SHARED_MAPPING) for how in (seccomp.LE, seccomp.GT))
    rules.add_rule(seccomp.ALLOW, "mmap", small, bits(3, _MAP_HUGETLB | shared, shared))
    rules.add_rule(seccomp.ERRNO(errno.ENOMEM), "mmap", large, bits(3, _MAP_HUGETLB | shared, shared))
    # Without sendmsg no descriptor leaves a process unseen, without setsockopt no buffer grows.
    stream = bits(1, _SOCK_TYPES, _SOCK_STREAM)
    rules.add_rule(seccomp.ALLOW, "socketpair", bits(0, _32_BITS, _AF_UNIX), stream)
    # Locks of parts of files and larger pipes hold memory of the kernel.
    for command in _FILE_COMMANDS:
        rules.add_rule(seccomp.ALLOW, "fcntl", bits(1, _32_BITS, command))
    for request in _TERMINAL:
        rules.add_rule(seccomp.ALLOW, "ioctl", bits(1, _32_BITS, request))
    for option in _PROCESS_OPTIONS:
        rules.add_rule(seccomp.ALLOW, "prctl", bits(0, _32_BITS, option))
