"""Finding the code in a response, in time linear in its length."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tether.llm.tasks.thinking import after_thinking

_CODE = frozenset({"", "python", "py", "python3"})
_TEXT = frozenset({"markdown", "md"})
_DEEPER = 4


def extract_code(response: str, entry: str | None = None) -> tuple[bool, str]:
    """Whether a response has a code block, and its code.

    A block stands between lines of at least three backquotes or tildes, the first of which may name Python
    and may follow other text; blocks that name another language do not count. Of several the last that
    defines the function `entry` counts, or the last. A block that the response's end cuts off counts too.
    Without a block, the whole response is the code. What the model thought aloud is no part of its response.

    >>> extract_code("So:\\n```python\\nx = 1\\n```\\nThis sets x.")
    (True, 'x = 1')
    """
    response = after_thinking(response)
    blocks = _blocks(response)
    if not blocks:
        return False, response
    defining = [block for block in blocks if entry and defines(block, entry)]
    return True, (defining or blocks)[-1]


def defines(code: str, name: str) -> bool:
    """Whether source text has a definition of the function `name`.

    >>> defines("def add_all(xs): ...", "add")
    False
    """
    return re.search(rf"\bdef[ \t]+{re.escape(name)}\b", code) is not None


@dataclass
class _Fence:
    """A line that opens a block."""

    mark: str
    length: int
    indent: int
    language: str
    lines: list[str] = field(default_factory=list)

    def closed_by(self, other: _Fence) -> bool:
        """Whether another fence ends the block: as long, of the same kind, and not deeper inside."""
        return (
            other.mark == self.mark and other.length >= self.length and other.indent < self.indent + _DEEPER
        )


def _blocks(response: str) -> list[str]:
    """The code of every block of Python, or of no language, in order."""
    blocks: list[str] = []
    around: list[_Fence] = []  # of Markdown, in which there may be blocks
    inside: _Fence | None = None
    for line in response.split("\n"):
        fence = _fence(line, after_text=inside is None)
        if inside is None:
            if fence and around and not fence.language and around[-1].closed_by(fence):
                around.pop()
            elif fence and fence.language in _TEXT:
                around.append(fence)
            elif fence:
                inside = fence
        elif fence and inside.closed_by(fence):
            blocks += _finished(inside)
            inside = fence if fence.language in _CODE - {""} else None
        else:
            inside.lines.append(_dedented(line, inside.indent))
    return blocks + (_finished(inside) if inside else [])


def _finished(block: _Fence) -> list[str]:
    return ["\n".join(block.lines)] if block.language in _CODE else []


def _fence(line: str, after_text: bool) -> _Fence | None:
    """The fence a line is, or ends with; None for other lines."""
    text = stripped = line.lstrip(" \t")
    indent = len(line) - len(text)
    if not text.startswith(("```", "~~~")):
        start = text.find("```") if after_text else -1
        if start < 0:
            return None
        text, indent = text[start:], 0
    mark = text[0]
    rest = text.lstrip(mark)
    words = rest.split(None, 1)
    if mark in rest or (text is not stripped and rest.strip().lower() not in _CODE):
        return None  # code within a line, or prose about it
    return _Fence(mark, len(text) - len(rest), indent, words[0].lower() if words else "")


def _dedented(line: str, indent: int) -> str:
    """A line of a block without the indentation of the block itself."""
    start = 0
    while start < min(indent, len(line)) and line[start] in " \t":
        start += 1
    return line[start:]
