"""How much memory a sandboxed program makes the machine hold, counted from outside through /proc.

A program holds memory in three ways: pages of its processes, files in its private folder, and objects of the
kernel that its processes have open. The filter of system calls leaves it no fourth: no memory that is shared
and of no file, no descriptor on its way in a message, no queue, lock or watch that nothing here shows. Pages
and files are counted exactly; an object counts as the most that the kernel can hold for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from tether.llm.sandbox.syscalls import SHARED_MAPPING

_PAGE = os.sysconf("SC_PAGE_SIZE")
_KIB = 1024
# The most the kernel holds for one object. A pipe has 16 pages and 16 entries for them; a socket what waits
# in it, on its way either here or there; a mapping itself, its part of a tree, a link to every ancestor.
_PIPE = 80 * _KIB
_SOCKET = int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="ascii")) + 64 * _KIB
_DESCRIPTOR = _KIB
_MAPPING = 2 * _KIB
_SHARED_OF_NO_FILE = b"/dev/zero (deleted)\n"
_TASK = 32 * _KIB
_FILE = 2 * _KIB
# Kernels before 6.16 tell pages without what each processor has not added up yet, for two kinds of pages.
_CPUS = os.cpu_count() or 1
_UNTOLD = 2 * _CPUS * max(32, 2 * _CPUS) * _PAGE
# A program that shares more than this beyond its limit must sit still while it is counted.
_SHARED = 1.25
_RESTLESS_LOOKS = 3
_KCMP, _KCMP_VM = (312 if platform.machine() == "x86_64" else 272), 1

_AMOUNTS = re.compile(rb"^(?:RssAnon|RssFile|VmSwap|VmPTE):\s+(\d+) kB$", re.MULTILINE)
_THREADS = re.compile(rb"^Threads:\s+(\d+)$", re.MULTILINE)
_PROPORTIONAL = re.compile(rb"^(Pss|Pss_Shmem|SwapPss):\s+(\d+) kB$", re.MULTILINE)


class Scales:
    """Look, as often as asked, whether a program holds more memory than it may.

    Args:
        launcher: The process whose only child is process 1 of the program's namespace.
        limit: Bytes the program may hold.
    """

    def __init__(self, launcher: int, limit: int) -> None:
        self._launcher = launcher
        self._limit = limit
        self._restless = 0

    def verdict(self) -> str | None:
        """Say why the program must be stopped, or None.

        Raises:
            PermissionError: The program, or this process's want of rights, keeps its memory from being seen.
        """
        init = first_child(self._launcher)
        if init is None:
            return None
        before = set(_descendants(init))
        fixed = _of_folder(init) + _of_objects(before, self._limit)
        rough = fixed + sum(map(_pages_roughly, before))
        if rough + _UNTOLD * len(before) <= self._limit:
            self._restless = 0
            return None
        held = fixed + _pages(before, self._limit)
        if held > self._limit:
            return f"it held {held} bytes, more than {self._limit}"
        # A page counts once, divided among its holders: one that came and went unseen would hide a part.
        still = rough <= _SHARED * self._limit or before == set(_descendants(init))
        self._restless = 0 if still else self._restless + 1
        if self._restless == _RESTLESS_LOOKS:
            return f"its processes share {rough} bytes and came and went too fast to be counted"
        return None


def first_child(process: int) -> int | None:
    """The child of a process that has one, or None when it is gone."""
    return next(iter(_children(process)), None)


def _descendants(process: int) -> Iterator[int]:
    for child in _children(process):
        yield child
        yield from _descendants(child)


def _children(process: int) -> Iterator[int]:
    """The children of all of a process's threads."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children = _read(f"/proc/{process}/task/{thread}/children")
                yield from map(int, children.split())


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _of_folder(init: int) -> int:
    """What the files in the program's private folder take, deleted ones that are open included."""
    try:
        told = os.statvfs(f"/proc/{init}/root/tmp")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (told.f_blocks - told.f_bfree) * told.f_frsize + (told.f_files - told.f_ffree) * _FILE


def _of_objects(processes: set[int], most: int) -> int:
    """What threads, mappings and descriptors may take; no further counted than to `most`."""
    total, named = 0, set[str]()
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            place = _living(process)
            told = _THREADS.search(_read(f"{place}/status"))
            total += _TASK * (int(told[1]) if told else 1)
            total += _mappings(place, most)
            descriptors = os.listdir(f"{place}/fd")
            total += _DESCRIPTOR * len(descriptors)
            for descriptor in descriptors:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    named.add(os.readlink(f"{place}/fd/{descriptor}"))
        if total > most:
            break
    kinds = [name.partition(":")[0] for name in named]
    return total + _PIPE * kinds.count("pipe") + _SOCKET * kinds.count("socket")


def _mappings(place: str, most: int) -> int:
    """What mappings of a process may take in the kernel, and in full those that are shared and of no file."""
    total = 0
    with open(f"{place}/maps", "rb", buffering=0) as file:
        while total <= most and (chunk := file.read(64 * _KIB)):
            total += _MAPPING * chunk.count(b"\n") + SHARED_MAPPING * chunk.count(_SHARED_OF_NO_FILE)
    return total


def _living(process: int) -> str:
    """The folder of a process, or of another of its threads when the first has ended and shows nothing."""
    place = f"/proc/{process}"
    if _AMOUNTS.search(_read(f"{place}/status")):
        return place
    for thread in os.listdir(f"{place}/task"):
        if _AMOUNTS.search(_read(f"{place}/task/{thread}/status")):
            return f"{place}/task/{thread}"
    raise ProcessLookupError(process)


def _pages_roughly(process: int) -> int:
    """Pages of a process and its page tables, in full, as the kernel keeps count of them."""
    try:
        told = _AMOUNTS.findall(_read(f"{_living(process)}/status"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(map(int, told)) * _KIB


def _pages(processes: set[int], most: int) -> int:
    """Pages of all processes, each one once, and their page tables; no further counted than to `most`."""
    total, counted = 0, list[int]()
    for process in processes:
        # A process that was made by vfork and did not yet become another program shares all.
        if not any(_same_memory(process, other) for other in counted):
            counted.append(process)
            total += _proportional(process)
        if total > most:
            break
    return total


def _proportional(process: int) -> int:
    """Pages of a process, each divided by the number of its holders, without those of files in memory."""
    try:
        place = _living(process)
        told = {name: int(amount) for name, amount in _PROPORTIONAL.findall(_read(f"{place}/smaps_rollup"))}
        tables = re.search(rb"^VmPTE:\s+(\d+)", _read(f"{place}/status"), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    held = told.get(b"Pss", 0) - told.get(b"Pss_Shmem", 0) + told.get(b"SwapPss", 0)
    return (held + (int(tables[1]) if tables else 0)) * _KIB


def _same_memory(one: int, other: int) -> bool:
    """Whether two processes have the very same memory; kernels that cannot tell count it twice."""
    return bool(_libc().syscall(_KCMP, one, other, _KCMP_VM, 0, 0) == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
