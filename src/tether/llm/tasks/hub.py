"""Reading a data set from the Hugging Face hub, with errors that name row and remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tether.errors import DataError, MissingDependencyError
from tether.llm.tasks.jsonl import BadRows, Located, check_fields, sound_rows


def read_hub(
    name: str,
    split: str,
    fields: Sequence[str],
    config: str | None = None,
    bad_rows: BadRows = "refuse",
    check: Callable[[str, dict[str, Any]], object] | None = None,
) -> Located:
    """Read a split of a data set, giving for every row where it stands and the row.

    Args:
        name: The data set's name on the hub, such as ``"HuggingFaceH4/MATH-500"``.
        split: The hub's own name of the split.
        fields: Names every row must have, holding non-empty text.
        config: The data set's configuration; None where it has one only.
        bad_rows, check: as `read_jsonl`.

    Raises:
        MissingDependencyError: `datasets` is not installed.
        DataError: The hub cannot be reached, or a row lacks a field.
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
