"""A griffe extension: examples in docstrings are shown as code, wherever in the docstring they stand."""

from __future__ import annotations

from typing import Any

import griffe


class DoctestFences(griffe.Extension):
    """Put fences around the doctests of every docstring; without them Markdown would read their brackets."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with each doctest, from its first prompt to the next empty line, between fences."""
    lines: list[str] = []
    indent: str | None = None
    for line in text.splitlines():
        stripped = line.lstrip()
        if indent is None and stripped.startswith(">>> "):
            indent = line[: len(line) - len(stripped)]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not stripped:
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    if indent is not None:
        lines.append(f"{indent}```")
    return "\n".join(lines)
