"""How much memory a sandboxed program makes the machine hold, counted from outside through /proc.

A program holds memory in three ways: pages of its processes, files in its private folder, and objects of the
kernel that its processes have open. The filter of system calls leaves it no fourth: no memory that is shared
and of no file, no descriptor on its way in a message, no queue, lock or watch that nothing here shows. Pages
and files are counted exactly; an object counts as the most that the kernel can hold for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tether.llm.sandbox.syscalls import SHARED_MAPPING

_LIBC = ctypes.CDLL(None, use_errno=True)
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
_ADDS_UP = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 16)
_UNTOLD = 0 if _ADDS_UP else 2 * _CPUS * max(32, 2 * _CPUS) * _PAGE
# A program that shares more than this beyond its limit must sit still while it is counted.
_SHARED = 1.25
_RESTLESS_LOOKS = 3
_KCMP, _KCMP_VM = (312 if platform.machine() == "x86_64" else 272), 1

_AMOUNTS = re.compile(rb"^(?:RssAnon|RssFile|VmSwap|VmPTE):\s+(\d+) kB$", re.MULTILINE)
_THREADS = re.compile(rb"^Threads:\s+(\d+)$", re.MULTILINE)
_TABLES = re.compile(rb"^VmPTE:\s+(\d+) kB$", re.MULTILINE)
_PROPORTIONAL = re.compile(rb"^(Pss|Pss_Shmem|SwapPss):\s+(\d+) kB$", re.MULTILINE)


class MemoryWatch:
    """Check, as often as asked, whether a program holds more memory than its limit."""

    def __init__(self, launcher: int, limit: int) -> None:
        self._launcher = launcher
        self._limit = limit
        self._restless = 0

    def verdict(self) -> str | None:
        """Say why the program must be stopped, or None."""
        init = first_child(self._launcher)
        if init is None:
            return None
        # Short, so that the kernel lets it run at once though 32 busy processes want the processor as well.
        seen = _descendants(init)
        rough = sum(one.pages for one in seen) + _UNTOLD * len(seen)
        if rough > self._limit:
            held = _pages(seen, self._limit)
            if held > self._limit:
                return self._over(held)
            restless = rough > _SHARED * self._limit and {one.process for one in seen} != {
                one.process for one in _descendants(init)
            }
        else:
            held, restless = rough, False
        # A page counts once, divided among its holders: one that came and went unseen would hide a part.
        self._restless = self._restless + 1 if restless else 0
        if self._restless == _RESTLESS_LOOKS:
            return f"its processes share {rough} bytes and came and went too fast to be counted"
        beside = _of_folder(init) + _of_objects(seen, self._limit)
        if held + beside > self._limit and held == rough:
            held = _pages(seen, self._limit)
        return self._over(held + beside) if held + beside > self._limit else None

    def _over(self, held: int) -> str:
        return f"it held {held} bytes, more than {self._limit}"


class _Seen(NamedTuple):
    """A living process."""

    process: int
    place: str
    """Its folder, or that of another of its threads when the first has ended and shows nothing."""
    pages: int
    """Bytes of its pages and page tables, in full, as the kernel keeps count of them."""
    threads: int


def first_child(process: int) -> int | None:
    """The child of a process that has one, or None when it is gone."""
    return next(iter(_children(process)), None)


def _descendants(process: int) -> list[_Seen]:
    """All living processes below one, parents before their children."""
    seen, below = list[_Seen](), list(_children(process))
    while below:
        child = below.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            one, threads = _look(child)
            if one is not None:
                seen.append(one)
            below += _children(child, threads)
    return seen


def _look(process: int) -> tuple[_Seen | None, int]:
    """A process unless it holds nothing any more, and the number of its threads."""
    place = f"/proc/{process}"
    status = _read(f"{place}/status")
    found = _THREADS.search(status)
    threads = int(found[1]) if found else 1
    told = _AMOUNTS.findall(status)
    if not told:
        for thread in os.listdir(f"{place}/task"):
            told = _AMOUNTS.findall(_read(f"{place}/task/{thread}/status"))
            if told:
                place = f"{place}/task/{thread}"
                break
    return (_Seen(process, place, sum(map(int, told)) * _KIB, threads) if told else None), threads


def _children(process: int, threads: int = 2) -> Iterator[int]:
    """The children of all of a process's threads."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in [process] if threads == 1 else os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield from map(int, _read(f"/proc/{process}/task/{thread}/children").split())


@contextlib.contextmanager
def _unless_ended(place: str) -> Iterator[None]:
    """For what is asked of a process, which may end meanwhile and then holds nothing."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        try:
            yield
        except PermissionError:
            # What has given up its memory belongs to root from then on, until it is gone.
            if _AMOUNTS.search(_read(f"{place}/status")):
                raise


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _of_folder(init: int) -> int:
    """What the files in the program's private folder take, deleted ones that are open included."""
    place, held = f"/proc/{init}", 0
    with _unless_ended(place):
        told = os.statvfs(f"{place}/root/tmp")
        held = (told.f_blocks - told.f_bfree) * told.f_frsize + (told.f_files - told.f_ffree) * _FILE
    return held


def _of_objects(seen: list[_Seen], most: int) -> int:
    """What threads, mappings and descriptors may take; no further counted than to `most`."""
    total, named = 0, set[str]()
    for one in seen:
        total += _TASK * one.threads
        with _unless_ended(one.place):
            total += _mappings(one.place, most)
            descriptors = os.listdir(f"{one.place}/fd")
            total += _DESCRIPTOR * len(descriptors)
            for descriptor in descriptors:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    named.add(os.readlink(f"{one.place}/fd/{descriptor}"))
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


def _pages(seen: list[_Seen], most: int) -> int:
    """Pages of all processes, each one once, and their page tables; no further counted than to `most`.

    Args:
        seen: parents before their children.
    """
    total, counted = 0, list[int]()
    for one in seen:
        # What vfork made shares all with its parent until it becomes another program. If it came first, and
        # became one while its pages were counted, its parent's would be counted once more.
        if not any(_same_memory(one.process, other) for other in counted):
            counted.append(one.process)
            total += _proportional(one.place)
        if total > most:
            break
    return total


def _proportional(place: str) -> int:
    """Pages of a process, each divided by the number of its holders, without those of files in memory."""
    held = 0
    with _unless_ended(place):
        told = {name: int(amount) for name, amount in _PROPORTIONAL.findall(_read(f"{place}/smaps_rollup"))}
        tables = _TABLES.search(_read(f"{place}/status"))
        held = told.get(b"Pss", 0) - told.get(b"Pss_Shmem", 0) + told.get(b"SwapPss", 0)
        held += int(tables[1]) if tables else 0
    return held * _KIB


def _same_memory(one: int, other: int) -> bool:
    """Whether two processes have the very same memory; kernels that cannot tell count it twice."""
    return bool(_LIBC.syscall(_KCMP, one, other, _KCMP_VM, 0, 0) == 0)
