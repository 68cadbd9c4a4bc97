"""Programs that try to get out of the sandbox, hold more than they may, or pretend to have done well."""

from __future__ import annotations

from benchmarks.hostile import files, kernel, limits, memory, processes, results
from benchmarks.hostile.program import SECRET, Hostile

GROUPS: dict[str, dict[str, Hostile]] = {
    "limits": limits.PROGRAMS,
    "memory": memory.PROGRAMS,
    "files": files.PROGRAMS,
    "processes": processes.PROGRAMS,
    "kernel": kernel.PROGRAMS,
    "results": results.PROGRAMS,
}
HOSTILE: dict[str, Hostile] = {
    f"{group}: {name}": hostile for group, programs in GROUPS.items() for name, hostile in programs.items()
}

__all__ = ["GROUPS", "HOSTILE", "SECRET", "Hostile"]
