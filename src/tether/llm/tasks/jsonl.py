"""Reading rows of JSON, with errors that name file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tether.errors import DataError


def read_jsonl(path: Path, fields: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read a file of one JSON object a line, each with the text fields a task needs.

    Args:
        path: The file; blank lines are passed over.
        fields: Names every row must have, holding non-empty text.

    Returns:
        For every row, where it stands (``file:line``, for later errors) and the row.

    Raises:
        DataError: The file is missing, not UTF-8, or empty; a line is no JSON object or lacks a field.

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
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Convert it."
        ) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            rows.append((where, _parse_row(line, where, fields)))
    if not rows:
        raise DataError(f"{path} is empty. Give one JSON object a line with {_named(fields)}.")
    return rows


def _parse_row(line: str, where: str, fields: Sequence[str]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON ({error.msg} at column {error.colno}). Fix or remove the line."
        ) from error
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
