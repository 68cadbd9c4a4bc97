"""A lock on a folder that disappears with the process that held it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tether.errors import CheckpointError


class FolderLock:
    """Keep two processes from writing one folder.

    The operating system drops the lock when the process ends, however it ends, and forked children (data
    loaders, simulators) do not inherit it: nothing has to be cleaned up after ``kill -9``.

    Raises:
        CheckpointError: another process holds the lock.
    """

    NAME = ".lock"

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / self.NAME, "a+b")  # noqa: SIM115 - held until release()
        try:
            _lock(self._file.fileno())
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


@contextmanager
def waiting_lock(folder: Path, seconds: float = 120.0) -> Iterator[None]:
    """Hold the lock on a folder, after waiting for whoever has it.

    Raises:
        CheckpointError: another process has held it for so long.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            lock = FolderLock(folder)
        except CheckpointError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            break
    try:
        yield
    finally:
        lock.release()


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        # Far past the end, since Windows would refuse others the reading of locked bytes.
        os.lseek(handle, 1 << 30, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
