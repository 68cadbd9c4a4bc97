"""Which system calls sandboxed programs are refused, compiled by libseccomp."""

from __future__ import annotations

import errno
import functools
import tempfile

from tether.errors import MissingDependencyError

# Everything else is allowed: namespaces, limits and the missing rights contain it. What is listed either
# opens a way to other processes, holds memory that no limit counts, or is a common part of exploits.
REFUSED: dict[str, tuple[str, ...]] = {
    "other machines and processes": (
        *("socket", "connect", "bind", "listen", "accept", "accept4"),
        *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp"),
        *("pidfd_open", "pidfd_getfd", "pidfd_send_signal"),
    ),
    "memory outside the count": (
        *("memfd_create", "memfd_secret", "shmget", "shmat", "shmctl", "semget", "semop", "semtimedop"),
        *("semctl", "msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "vmsplice", "mlock", "mlock2"),
        *("mlockall", "inotify_init", "inotify_init1", "fanotify_init", "fanotify_mark"),
        *("add_key", "request_key", "keyctl"),
    ),
    "namespaces and file systems": (
        *("unshare", "setns", "mount", "umount2", "umount", "pivot_root", "chroot", "mount_setattr"),
        *("move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "swapon", "swapoff"),
        *("name_to_handle_at", "open_by_handle_at", "quotactl", "quotactl_fd", "acct", "mknod", "mknodat"),
    ),
    "the kernel": (
        *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter"),
        *("io_uring_register", "io_setup", "io_submit", "init_module", "finit_module", "delete_module"),
        *("kexec_load", "kexec_file_load", "reboot", "syslog", "personality", "modify_ldt", "iopl"),
        *("ioperm", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname"),
        *("setdomainname", "vhangup", "lookup_dcookie", "nfsservctl", "uselib", "_sysctl"),
    ),
}
"""System calls that fail with EPERM, by what they would open."""

_NAMESPACE_FLAGS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
_TERMINAL_REQUESTS = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX put words into a terminal's mouth


@functools.cache
def compiled_filter() -> bytes:
    """Compile the filter for this machine, as the instructions the kernel takes.

    Calls of another architecture end the program: libseccomp's default, and the reason why 32-bit calls
    are no way around the filter.

    Raises:
        MissingDependencyError: pyseccomp or the library libseccomp is missing.

    >>> len(compiled_filter()) % 8
    0
    """
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"The sandbox filters system calls with libseccomp, which cannot be used here ({error}). Install "
            "tether-rl[llm], which brings pyseccomp, and the library: apt-get install libseccomp2, or dnf "
            "install libseccomp."
        ) from error
    refuse = pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for names in REFUSED.values():
        for name in names:
            if _known(name):
                rules.add_rule(refuse, name)
    clone_flags = 1 if _backwards_clone() else 0
    for flag in _NAMESPACE_FLAGS:
        rules.add_rule(refuse, "clone", pyseccomp.Arg(clone_flags, pyseccomp.MASKED_EQ, flag, flag))
    # clone3 hides its flags behind a pointer; without it, the C library falls back to clone.
    if _known("clone3"):
        rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    for request in _TERMINAL_REQUESTS:
        rules.add_rule(refuse, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _known(name: str) -> bool:
    """Whether the installed libseccomp has heard of a call; an older one lacks some of the newest.

    Those all ask for rights that a sandboxed program lacks, so the filter is then only the second wall
    less.
    """
    import pyseccomp

    return bool(pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) != -1)


def _backwards_clone() -> bool:
    """On s390 clone takes the stack first and the flags second."""
    import platform

    return platform.machine().startswith("s390")
