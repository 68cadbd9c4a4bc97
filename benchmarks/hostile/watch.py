"""Watching from outside how much memory the machine loses while something runs in the sandbox."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

# What is available, and what processes outside of all sandboxes hold for themselves: what goes from the one
# to the other, no sandbox took. A process in a namespace of its own has two numbers or more. What was just
# given back stays with each processor, hundreds of megabytes from Linux 6.7 on, and the kernel calls it
# neither free nor available.
_SAMPLER = r"""
import os, re, sys, time
parent = os.getppid()
available = re.compile(rb"MemAvailable: +(\d+)")
given_back = re.compile(rb"\n +count: +(\d+)")
page = os.sysconf("SC_PAGE_SIZE")
own = re.compile(rb"(?:RssAnon|RssShmem|VmPTE):\s+(\d+)")
alone = re.compile(rb"NSpid:\t\d+\n")

def read(path):
    with open(path, "rb", buffering=0) as file:
        return file.read()

def outside():
    total = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = read(f"/proc/{process}/status")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if alone.search(status):
            total += sum(map(int, own.findall(status)))
    return total

while os.getppid() == parent:
    left = int(available.search(read("/proc/meminfo"))[1]) + outside()
    pages = sum(map(int, given_back.findall(read("/proc/zoneinfo"))))
    print(time.monotonic(), left * 1024 + pages * page, flush=True)
    time.sleep(0.005)
"""


class Watch:
    """Sample the machine's memory every few ms in a process of its own, for the length of a with block.

    Counted is what programs could still get, caches that the kernel gives up when asked among it, and what
    processes outside of sandboxes have got. The rest was taken by sandboxed programs, in whatever form.
    """

    def __enter__(self) -> Watch:
        command = [sys.executable, "-I", "-S", "-c", _SAMPLER]
        self._sampler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._sampler.stdout is not None
        self._samples = [_parse(self._sampler.stdout.readline())]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampler.kill()
        text, _ = self._sampler.communicate()
        self._samples += [_parse(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def peak(self) -> int:
        """Bytes that sandboxed programs held at most."""
        return self._samples[0][1] - min(left for _, left in self._samples)

    def seconds_above(self, held: int) -> float:
        """The longest time on end for which they held more than `held` bytes."""
        longest, since = 0.0, None
        for time, left in self._samples:
            if self._samples[0][1] - left <= held:
                since = None
            elif since is None:
                since = time
            else:
                longest = max(longest, time - since)
        return longest


def _parse(line: str) -> tuple[float, int]:
    time, left = line.split()
    return float(time), int(left)
