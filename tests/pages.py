"""The pages people read: the commands and the code that stand on them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from scripts import REPOSITORY

#: README, documentation and folders' own pages; the changelog tells of what was, the log of what was tried.
PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for pattern in ("*.md", "docs/*.md", "recipes/*.md", "benchmarks/*/README.md")
    for path in REPOSITORY.glob(pattern)
    if path.name not in ("CHANGELOG.md", "log.md")
)
_PROGRAMS = "tether|make|python[0-9.]*|pip|bash|ray|accelerate|tensorboard|pre-commit"
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ +)*(?:\.venv[\w-]*/bin/)?(?:{_PROGRAMS})(?: |$)")
_NEEDS = re.compile(r"#.*\bneeds (.+)$")


@dataclass(frozen=True)
class Command:
    """A line to be typed, without its comment; `needs` is what that, or its block's first line, asks for."""

    page: str
    line: int
    text: str
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Code:
    """A block of Python; `file` is what its first line says it is called, `needs` what it asks for."""

    page: str
    line: int
    text: str
    file: str | None
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    """A page's text."""
    return (REPOSITORY / page).read_text(encoding="utf-8")


def codes(page: str) -> list[Code]:
    """Every fenced block of Python."""
    found = []
    for block in re.finditer(r"^( *)```python\n(.*?)^ *```$", read(page), re.MULTILINE | re.DOTALL):
        text = textwrap.dedent(block[2])
        first = text.partition("\n")[0]
        file, needs = re.fullmatch(r"# (\w+\.py)", first), _NEEDS.match(first)
        line = read(page)[: block.start()].count("\n") + 2
        found.append(Code(page, line, text, file[1] if file else None, needs[1] if needs else None))
    return found


def commands(page: str) -> Iterator[Command]:
    """Every command in an indented block, or in a fenced one that is not of another language."""
    lines = read(page).splitlines()
    fence: str | None = None
    of_block: str | None = None
    for number, line in enumerate(lines, start=1):
        stripped = line.strip()
        if stripped.startswith("```"):
            fence = stripped[3:] if fence is None else None
        inside = fence in ("", "bash", "sh", "console") if fence is not None else line.startswith("    ")
        if not inside:
            of_block = None
            continue
        needs = _NEEDS.search(stripped)
        if needs and stripped.startswith("#"):
            of_block = needs[1]
        if not _COMMAND.match(stripped) or (number > 1 and lines[number - 2].endswith("\\")):
            continue
        following = number
        while stripped.endswith("\\"):
            stripped = stripped[:-1] + lines[following].strip()
            following += 1
        text = re.sub(r"\s+#.*$", "", stripped)
        yield Command(page, number, text, needs[1] if needs else of_block)


def inline_commands(page: str) -> list[str]:
    """Commands in the middle of a sentence, that name more than the program."""
    prose = re.sub(r"^ *```.*?^ *```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    return [found for found in re.findall(r"`([^`\n]+)`", prose) if re.match(r"(?:make|tether) [a-z]", found)]
