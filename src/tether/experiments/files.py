"""Atomic files, CSV, JSON that keeps NaN and infinity, and locks on folders."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from tether.errors import CheckpointError, InvalidInputError

TEMPORARY_PREFIX = ".writing-"
"""Files of this prefix are unfinished writes of a process that was killed; they may be deleted."""

_FLOAT_TAG = "$float"

# Bytes that hold the last line of most files.
_TAIL = 2**16


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    The bytes go to a temporary name in the same folder, are flushed to the disk and renamed. Missing
    parent folders are made. Returns the path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     atomic_write_bytes(f"{folder}/a/b.bin", b"whole").read_bytes()
    b'whole'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a run folder is meant to be read by whoever may read its parent.
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
    return target


def atomic_write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write UTF-8 text as `atomic_write_bytes` does, without touching its line ends."""
    return atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | os.PathLike[str], value: object) -> Path:
    """Write indented JSON (see `dump_json`) as `atomic_write_bytes` does."""
    return atomic_write_text(path, dump_json(value, indent=2) + "\n")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV, each ended by a line feed alone.

    >>> csv_text([("step", "note"), (1, "a, b")])
    'step,note\\n1,"a, b"\\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write_all(file: io.RawIOBase, data: bytes) -> None:
    """Write all of ``data`` to an unbuffered file; the system may take it in pieces where space is short."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def sync_folder(folder: Path) -> None:
    """Make a rename or a new file in ``folder`` survive a power cut, where the system can do that."""
    if os.name == "nt":  # Windows neither needs nor allows opening a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def dump_json(value: object, indent: int | None = None) -> str:
    """Valid JSON for any nesting of dicts, lists, numbers and strings, NaN and infinity included.

    JSON has no NaN: Python's own writer emits a word other programs reject. Here a float that is not
    finite becomes ``{"$float": "nan"}`` (``"inf"``, ``"-inf"``), which `load_json` turns back. Paths are
    written as strings; zero-dimensional arrays and tensors as numbers.

    >>> dump_json({"kl_bound": float("inf"), "step": 3})
    '{"kl_bound": {"$float": "inf"}, "step": 3}'
    """
    # ASCII only: what a model says may hold half a surrogate pair, which UTF-8 cannot carry.
    return json.dumps(_encoded(value), indent=indent, allow_nan=False)


def load_json(text: str | bytes) -> Any:
    """The value `dump_json` wrote.

    >>> load_json('{"kl_bound": {"$float": "-inf"}}')
    {'kl_bound': -inf}
    """
    return json.loads(text, object_hook=_decoded)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without a last line that was cut in the middle of its writing.

    A line counts once its line end is there. A missing file holds no lines.
    """
    if not path.exists():
        return []
    return [record for _, record in iterate_json_lines(path)]


def read_measurements(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's numbers, as `read_json_lines` gives them, each with its step."""
    records = read_json_lines(path)
    for number, record in enumerate(records, start=1):
        _check_step(record, f"Line {number} of {path}")
    return records


def last_measurement(path: Path) -> dict[str, Any] | None:
    """The last of `read_measurements`, or None, without reading what a long run wrote before."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        length = _TAIL
        while True:
            start = max(size - length, 0)
            file.seek(start)
            *lines, _ = file.read(size - start).split(b"\n")
            if start == 0 or len(lines) > 1:  # of which the first may have lost its beginning
                break
            length *= 2
    if not lines:
        return None
    record = _record(lines[-1], f"The last line of {path}")
    _check_step(record, f"The last line of {path}")
    return record


def _check_step(record: dict[str, Any], where: str) -> None:
    if not isinstance(record.get("step"), int):
        raise CheckpointError(
            f"{where} is damaged (its step is {record.get('step')!r}). Delete that line, or restore the file."
        )


def iterate_json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Pairs (the line's own bytes, its object) of the complete lines of a JSON-lines file."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        yield line, _record(line, f"Line {number} of {path}")


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = load_json(line)
    except ValueError as error:
        raise CheckpointError(
            f"{where} is damaged ({error}). Delete that line, or restore the file."
        ) from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{where} holds a {type(record).__name__}; each line must be a JSON object.")
    return record


def dump_json_lines(records: Iterable[object]) -> str:
    """One JSON object a line."""
    return "".join(dump_json(record) + "\n" for record in records)


def _encoded(value: object) -> object:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT_TAG: repr(float(value))}
    if isinstance(value, dict):
        return {_key(key): _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:  # numpy scalars, 0-d arrays and tensors
        return _encoded(item())
    raise InvalidInputError(
        f"JSON cannot hold a {type(value).__name__} ({value!r:.80}). "
        "Convert it to numbers, strings, lists or dicts first."
    )


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidInputError(f"JSON keys are strings; got {key!r} of type {type(key).__name__}.")
    return key


def _decoded(value: dict[str, Any]) -> Any:
    if len(value) == 1 and _FLOAT_TAG in value:
        return float(value[_FLOAT_TAG])
    return value


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
