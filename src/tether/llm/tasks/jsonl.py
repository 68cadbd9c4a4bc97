"""Reading rows of JSON, with errors that name file and line."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from tether.errors import ConfigError, DataError, TetherWarning

Row = TypeVar("Row")
Parsed = TypeVar("Parsed")


BadRows = Literal["refuse", "skip"]
"""What to do with a row that lacks what the task needs."""

Located = list[tuple[str, dict[str, Any]]]
"""Rows, each with where it stands: ``file:line``, for errors."""


def read_jsonl(
    path: Path,
    fields: Sequence[str],
    bad_rows: BadRows = "refuse",
    check: Callable[[str, dict[str, Any]], object] | None = None,
) -> Located:
    """Read a file of one JSON object a line, each with the text fields a task needs.

    Args:
        path: The file; blank lines are passed over.
        fields: Names every row must have, holding non-empty text.
        bad_rows: ``"refuse"`` to stop at the first broken row, ``"skip"`` to leave broken rows out with a
            warning that counts them.
        check: With ``"skip"``, further asked about (where, row); a row for which it raises `DataError` is
            broken.

    Returns:
        For every row, where it stands (``file:line``, for later errors) and the row.

    Raises:
        DataError: The file is missing or holds no (sound) row; a row is not UTF-8, no JSON object, or lacks
            a field.

    Warns:
        TetherWarning: Rows were left out; the first is named.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "rows.jsonl")
    ...     _ = file.write_text('{"question": "1+1?", "answer": "2"}')
    ...     read_jsonl(file, ["question", "answer"])[0][1]
    {'question': '1+1?', 'answer': '2'}
    """
    if not path.is_file():
        raise DataError(
            f"There is no file {path}. Check the path, or create a JSONL file with {_named(fields)}."
        )
    # Not str.splitlines, which would also cut rows at line ends that JSON allows inside a text.
    lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    rows = sound_rows(
        [(f"{path}:{number}", line) for number, line in lines],
        lambda where, line: _parse_row(line, where, fields),
        bad_rows,
    )
    if bad_rows == "skip" and check is not None:
        rows = sound_rows(rows, lambda where, row: (check(where, row), row)[1], bad_rows)
    if not rows:
        none = "no sound row" if lines else "is empty"
        raise DataError(
            f"{path} {'holds ' if lines else ''}{none}. Give one JSON object a line with {_named(fields)}."
        )
    return rows


def sound_rows(
    rows: Iterable[tuple[str, Row]], parse: Callable[[str, Row], Parsed], bad_rows: BadRows
) -> list[tuple[str, Parsed]]:
    """Parse located rows; those for which `parse` raises `DataError` are refused, or left out and counted.

    Raises:
        DataError: of `parse`, with ``"refuse"``.

    Warns:
        TetherWarning: Rows were left out; the first is named.
    """
    parsed, broken, count = [], [], 0
    for count, (where, row) in enumerate(rows, start=1):  # noqa: B007 - the last one is used
        try:
            parsed.append((where, parse(where, row)))
        except DataError as error:
            if bad_rows == "refuse":
                raise
            broken.append(str(error))
    if broken:
        warnings.warn(
            f"{len(broken)} of {count} rows are broken and left out (bad_rows='skip'); the first: "
            f"{broken[0]}",
            TetherWarning,
            stacklevel=3,
        )
    return parsed


def check_bad_rows(bad_rows: str) -> BadRows:
    """Refuse another choice than ``"refuse"`` and ``"skip"``.

    >>> check_bad_rows("skip")
    'skip'
    """
    for known in get_args(BadRows):
        if bad_rows == known:
            choice: BadRows = known
            return choice
    raise ConfigError(f"bad_rows is {bad_rows!r}; use 'refuse' or 'skip'.")


def _parse_row(line: bytes, where: str, fields: Sequence[str]) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start} of the line). Convert the file."
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON ({error.msg} at column {error.colno}). Fix or remove the line."
        ) from error
    except (ValueError, RecursionError) as error:  # an integer of too many digits, too deep a nesting
        raise DataError(f"{where}: JSON that cannot be read ({error}). Fix or remove the line.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, not an object. Give one JSON object a line.")
    check_fields(row, where, fields)
    return row


def check_fields(row: dict[str, Any], where: str, fields: Sequence[str]) -> None:
    """Refuse a row that lacks one of the text fields a task needs.

    Raises:
        DataError: A field is absent, no text, or blank; the message says where and what the row has.

    >>> check_fields({"question": "1+1?"}, "rows.jsonl:1", ["question", "answer"])
    Traceback (most recent call last):
    tether.errors.DataError: rows.jsonl:1: no text in field 'answer' (the row has: question)...
    """
    for name in fields:
        value = row.get(name)
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"{where}: no text in field {name!r} (the row has: {', '.join(map(str, row)) or 'nothing'}). "
                f"Every row needs {_named(fields)}; fix or remove the row."
            )


def _named(fields: Iterable[str]) -> str:
    return " and ".join(repr(name) for name in fields)
