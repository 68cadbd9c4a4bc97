"""A lock on a folder that disappears with the process that held it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Self

from tether.errors import CheckpointError


class FolderLock:
    """Keep two processes from writing one folder.

    The operating system drops the lock when the process ends, however it ends, and forked children (data
    loaders, simulators) do not inherit it: nothing has to be cleaned up after ``kill -9``.

    Args:
        folder: what is locked.
        wait: wait for whoever holds the lock.
    """

    NAME = ".lock"

    def __init__(self, folder: Path, *, wait: bool = False) -> None:
        self._file = open(folder / self.NAME, "a+b")  # noqa: SIM115 - held until release()
        try:
            _lock(self._file.fileno(), wait)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().decode(errors="replace").strip() or "unknown"
            self._file.close()
            raise CheckpointError(
                f"{folder} is being written by another process (id {holder}). "
                "Wait for it or stop it, or choose another output folder."
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()

    def release(self) -> None:
        """Let others write; doing it twice is harmless."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int, wait: bool) -> None:
        # Far past the end, since Windows would refuse others the reading of locked bytes.
        os.lseek(handle, 1 << 30, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(handle: int, wait: bool) -> None:
        fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
