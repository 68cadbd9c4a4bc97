"""What turns a fresh process into a sandboxed one; handed to an interpreter as text, never imported.

The interpreter gets two descriptors (`backends.command`). From the first it reads a job as JSON, this file's
text in it, so that no file of Tether's need be visible; to the second this code writes ``ready`` right before
it becomes the program, or the reason why it could not. The steps, in order:

1. (without bubblewrap) new namespaces, a root of its own with a few folders bound read-only, fork twice:
   process 1 of the namespace reaps and reports, process 2 goes on;
2. give up root and every capability, and enter a user namespace in which processes are counted anew;
3. resource limits, no new privileges, the system-call filter;
4. become the interpreter that runs the program, with nothing but its three standard streams.

Only the standard library is available here. System calls that Python 3.11 does not offer go through
ctypes.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import os
import resource
import signal
from typing import Any, NoReturn

_libc = ctypes.CDLL(None, use_errno=True)

# Flags of unshare(2), mount(2), mount_setattr(2) and prctl(2), as in the kernel's headers.
_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture since Linux 5.12
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 1, 22, 38, 41
_SECCOMP_MODE_FILTER = 2

_INSIDE_ID = 1000
_SLACK_SECONDS = 15
PROGRAM = "/tmp/program.py"


def main(job: dict[str, Any], status: int) -> NoReturn:
    """Confine this process as `job` says and become the program."""
    os.set_inheritable(status, False)
    try:
        if job["isolate"]:
            _isolate(job, status)
        os.setsid()
        if job["drop_to"] is not None:
            _drop_to(job["drop_to"])
        _count_anew()
        with open(PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as program:
            program.write(job["code"])
        os.chdir("/tmp")
        _limit(job)
        _filter(base64.b64decode(job["filter"]))
        os.write(status, b"ready")
        os.execve(job["command"][0], job["command"], job["environment"])
    except BaseException as error:  # noqa: BLE001 - whatever it is, the host reports it
        os.write(status, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
        os._exit(71)


def _call(name: str, *arguments: Any) -> None:
    """Call a C function that returns 0 for success, and raise its error otherwise."""
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    if getattr(_libc, name)(*wide) != 0:
        number = ctypes.get_errno()
        shown = " ".join(str(argument) for argument in arguments[:3])
        raise OSError(number, f"{name} {shown}: {os.strerror(number)}")


def _isolate(job: dict[str, Any], status: int) -> None:
    """Enter new namespaces and a new root; return only in the process that becomes the program."""
    parent = os.getppid()
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(71)
    spaces = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWCGROUP
    if job["drop_to"] is None:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", spaces | _CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/gid_map", f"{_INSIDE_ID} {group} 1")
        _write("/proc/self/uid_map", f"{_INSIDE_ID} {user} 1")
    else:
        _call("unshare", spaces)
    _call("sethostname", b"sandbox", 7)
    _build_root(job)
    init = os.fork()
    if init:
        os.close(status)
        _close_streams()
        os._exit(_code(os.waitpid(init, 0)[1]))
    if job["drop_to"] is not None:
        _drop_to(job["drop_to"])
        job["drop_to"] = None
    _drop_capabilities()
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # cleared by the change of user: set again
    program = os.fork()
    if program:
        os.close(status)
        _reap(program, job["time_limit"])


def _reap(program: int, time_limit: float) -> NoReturn:
    """Be process 1: collect the dead, end with the program's code and so end everything else."""
    _close_streams()
    # Should the host be stopped or stuck, the tree still ends.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + signal.SIGKILL))
    signal.alarm(int(time_limit) + _SLACK_SECONDS)
    while True:
        process, state = os.wait()
        if process == program:
            os._exit(_code(state))


def _code(state: int) -> int:
    return 128 + os.WTERMSIG(state) if os.WIFSIGNALED(state) else os.WEXITSTATUS(state)


def _close_streams() -> None:
    for stream in range(3):
        os.close(stream)


def _build_root(job: dict[str, Any]) -> None:
    """Make `job["root"]`, an empty folder, the root: read-only but for /tmp, and without the old one."""
    root: str = job["root"]
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _mount_tmpfs(root, "size=1m,mode=755")
    # First, since an interpreter may itself live in a temporary folder.
    os.makedirs(f"{root}/tmp")
    _mount_tmpfs(f"{root}/tmp", f"size={job['folder_size']},nr_inodes=4096,mode=1777")
    _show(job["readable"], root)
    for folder in job["hidden"]:
        _mount_tmpfs(root + folder, "size=4k,nr_inodes=64,mode=755")
    _show(job["added"], root)
    for folder in job["hidden"]:
        _set_attributes(root + folder, _ATTR_RDONLY, recursive=False)
    for device in job["devices"]:
        _bind(device, root + device, _ATTR_NOSUID)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    _set_attributes("/", _ATTR_RDONLY, recursive=False)


def _show(paths: list[str], root: str) -> None:
    """Bind `paths` read-only below `root`; links are made again."""
    for path in paths:
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
        else:
            _bind(path, root + path, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)


def _mount_tmpfs(target: str, options: str) -> None:
    _call("mount", b"tmpfs", target.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode())


def _bind(source: str, target: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    _call("mount", os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None)
    _set_attributes(target, attributes, recursive=True)


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    """mount_setattr(2), which, unlike mount(2), reaches everything mounted below and keeps other flags."""
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    arguments = (_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, request, ctypes.sizeof(request))
    _call("syscall", *arguments)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as stream:
        stream.write(text)


def _drop_to(identity: int) -> None:
    os.setgroups([])
    os.setresgid(identity, identity, identity)
    os.setresuid(identity, identity, identity)


def _count_anew() -> None:
    """Enter a user namespace: the kernel counts a user's processes in each one by itself.

    Two sandboxes of one user, in two containers say, then have nothing to share. No user is mapped into it,
    so the program finds itself to be nobody. Where the host allows no more namespaces, processes are
    counted for the user, with the launcher's own.
    """
    try:
        _call("unshare", _CLONE_NEWUSER)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EUSERS):
            raise
    _drop_capabilities()


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _limit(job: dict[str, Any]) -> None:
    for name, soft, hard in job["limits"]:
        resource.setrlimit(getattr(resource, name), (soft, hard))
    # Of a huge page that was partly let go the kernel keeps all, and no process is told to hold it.
    _call("prctl", _PR_SET_THP_DISABLE, 1, 0, 0, 0)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter(instructions: bytes) -> None:
    """Load a compiled system-call filter, 8 bytes an instruction, for this process and its descendants."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _FilterProgram(len(instructions) // 8, instructions)
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
