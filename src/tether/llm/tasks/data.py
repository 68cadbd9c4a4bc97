"""Problems from files and from the hub: rows with where they stand, and which split each belongs to."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from tether.errors import ConfigError, DataError, MissingDependencyError, warn
from tether.llm.tasks.protocol import Problem, Split, Verdict, check_request, split_of

Row = TypeVar("Row")
Parsed = TypeVar("Parsed")


BadRows = Literal["refuse", "skip"]
"""What to do with a row that lacks what the task needs."""

Located = list[tuple[str, dict[str, Any]]]
"""Rows, each with where it stands: ``file:line``, for errors."""


class DataTask(Generic[Row]):
    """What tasks whose problems are rows of data have in common: splits, their order, one check at a time.

    A file is divided into the three splits by a hash of each problem. Of a folder, or of the hub, the test
    rows are apart, none of them is in another split, and a tenth of the rest is the validation split.
    """

    name: str
    path: str | Path | None
    stream: str
    """The task's part of the random stream that shuffles problems."""

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """Read the problems of a split, shuffled by `seed`; None as limit gives all."""
        check_request(split, limit)
        problems = [self._problem(where, row) for where, row in self._rows(split)]
        if not problems:
            raise DataError(
                f"The {split} split of {self.path or self.name} has no problem that can be judged. Give "
                "more rows, or a folder with train.jsonl and test.jsonl."
            )
        random.Random(f"{self.stream}/{split}/{seed}").shuffle(problems)
        return problems[:limit]

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """Check one response; see `verify_many`."""
        return self.verify_many([response], [problem_answer])[0]

    def verify_many(self, responses: Sequence[str], problem_answers: Sequence[str]) -> list[Verdict]:
        """A verdict a response, in order."""
        raise NotImplementedError

    def _rows(self, split: Split) -> list[tuple[str, Row]]:
        if self._is_one_file():
            return [(where, row) for where, row in self._part("") if split_of(self._key(where, row)) == split]
        tested = self._part("test")
        if split == "test":
            return tested
        held_out = {self._key(where, row) for where, row in tested}
        validated = self._validation()
        if validated is not None:
            if split == "validation":
                return [(where, row) for where, row in validated if self._key(where, row) not in held_out]
            held_out |= {self._key(where, row) for where, row in validated}
        rows = [(where, row) for where, row in self._part("train") if self._key(where, row) not in held_out]
        if validated is not None:
            return rows
        return [(w, row) for w, row in rows if split_of(self._key(w, row), test_percent=0) == split]

    def _is_one_file(self) -> bool:
        return self.path is not None and not Path(self.path).is_dir()

    def _file(self, part: str) -> Path:
        """The file of a part, which is empty for the one file that holds all."""
        return Path(str(self.path)) / f"{part}.jsonl" if part else Path(str(self.path))

    def _validation(self) -> list[tuple[str, Row]] | None:
        """The rows of a validation split that was given; None to take a tenth of the training rows."""
        return None

    def _part(self, part: str) -> list[tuple[str, Row]]:
        """The rows called train or test, or all of one file."""
        raise NotImplementedError

    def _key(self, where: str, row: Row) -> str:
        """A problem's identity."""
        raise NotImplementedError

    def _problem(self, where: str, row: Row) -> Problem:
        raise NotImplementedError


def as_messages(question: str, instruction: str) -> list[dict[str, str]]:
    """A question as a user's message, an instruction behind it."""
    return [{"role": "user", "content": f"{question}\n\n{instruction}" if instruction else question}]


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
        raise DataError(f"There is no file {path}. Check the path, or create a JSONL file{_with(fields)}.")
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
            f"{path} {'holds ' if lines else ''}{none}. Give one JSON object a line{_with(fields)}."
        )
    return rows


def read_hub(
    name: str,
    split: str,
    fields: Sequence[str],
    config: str | None = None,
    bad_rows: BadRows = "refuse",
    check: Callable[[str, dict[str, Any]], object] | None = None,
) -> Located:
    """Read a split of a data set of the Hugging Face hub, as `read_jsonl` reads a file.

    `config` is the data set's configuration, None where it has one only.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependencyError("The hub is read with `datasets`. Install tether-rl[llm].") from error
    try:
        rows = load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name} ({split}) could not be loaded from the hub ({type(error).__name__}: {error}). Connect, "
            "check the name, or give the task a path to JSONL files."
        ) from error
    located = [(f"{name} {split} row {number}", dict(row)) for number, row in enumerate(rows)]

    def parse(where: str, row: dict[str, Any]) -> dict[str, Any]:
        check_fields(row, where, fields)
        if bad_rows == "skip" and check is not None:
            check(where, row)
        return row

    return sound_rows(located, parse, bad_rows)


def sound_rows(
    rows: Iterable[tuple[str, Row]], parse: Callable[[str, Row], Parsed], bad_rows: BadRows
) -> list[tuple[str, Parsed]]:
    """Parse located rows; those for which `parse` raises `DataError` are refused, or left out and counted.

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
        warn(
            f"{len(broken)} of {count} rows are broken and left out (bad_rows='skip'); the first: {broken[0]}"
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
        if rb"\ud" in line.lower():  # half a character, which no tokenizer or file takes
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start} of the line). Convert the file."
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON ({error.msg} at column {error.colno}). Fix or remove the line."
        ) from error
    except (ValueError, RecursionError) as error:  # half a character, too long an integer, too deep a nesting
        raise DataError(f"{where}: JSON that cannot be read ({error}). Fix or remove the line.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, not an object. Give one JSON object a line.")
    check_fields(row, where, fields)
    return row


def check_fields(row: dict[str, Any], where: str, fields: Sequence[str]) -> None:
    """Refuse a row that lacks one of the text fields a task needs.

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


def _with(fields: Sequence[str]) -> str:
    """What a row has; nothing where the task itself looks for its fields."""
    return f" with {_named(fields)}" if fields else ""


def _named(fields: Iterable[str]) -> str:
    return " and ".join(repr(name) for name in fields)
