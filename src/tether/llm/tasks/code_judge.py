"""Judging one response: its code is found and run in the sandbox, and a verdict is all that is kept of it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tether.llm.sandbox import Execution, Sandbox
from tether.llm.tasks import code_harness
from tether.llm.tasks.code_cases import CallTest, StreamTest, UnitTests
from tether.llm.tasks.code_values import read_results
from tether.llm.tasks.protocol import Verdict, after_thinking

_HARNESS = Path(code_harness.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True)
class CodeJudge:
    """What responses are judged by, besides their tests.

    >>> from tether.llm.tasks.code_cases import CallTest
    >>> with Sandbox(1) as sandbox:
    ...     tests = UnitTests([CallTest.of("f(1)", 2)], entry="f")
    ...     CodeJudge(sandbox).verdict("def f(x): return x + 1", tests).correct
    True
    """

    sandbox: Sandbox
    """An open one."""
    partial_credit: bool = False
    """Whether the reward is the share of tests passed."""
    format_reward: float = 0.0
    """Added for a code block."""
    time_limit: float = 5.0
    """Seconds for all calls of a problem, or for one input."""
    total_time_limit: float = 60.0
    """Seconds for all inputs of a problem together."""
    memory_limit: int = 512 * 2**20
    """Bytes."""

    def verdict(self, response: str, tests: UnitTests) -> Verdict:
        """Run a response's code on all tests of a problem, one program at a time."""
        has_block, code = extract_code(response, tests.entry)
        statuses: set[str] = set()
        count = 0
        if code.strip():
            runs = self._calls(code, tests) if tests.calls else self._streams(code, tests)
            for status, passed in runs:
                statuses.add(status)
                count += passed
        share = count / len(tests.tests)
        correct = share == 1.0 and statuses == {"ok"}
        parts = {"block": float(has_block), "passed": share}
        parts.update({status: float(status in statuses) for status in ("timeout", "memory", "killed")})
        reward = share if self.partial_credit else float(correct)
        return Verdict(reward + self.format_reward * has_block, correct, parts)

    def _calls(self, code: str, tests: UnitTests) -> Iterator[tuple[str, int]]:
        """How the one program ended that makes all calls, and how many tests it passed."""
        arguments = (tests.preamble, _source(code, tests), tests.calls, tests.entry)
        done = self._run(f"{_HARNESS}\n\nmain({', '.join(map(repr, arguments))})\n")
        results = iter(read_results(done.stdout, len(tests.calls)))
        yield (
            done.status,
            sum(
                test.accepts([next(results) for _ in test.calls])
                for test in tests.tests
                if isinstance(test, CallTest)
            ),
        )

    def _streams(self, code: str, tests: UnitTests) -> Iterator[tuple[str, int]]:
        """How a program ended for each input, and whether it was right, up to the first time-out."""
        code = _from_the_margin(code)
        source = f"{tests.preamble}\n{code}" if tests.preamble else code
        left = self.total_time_limit
        for test in tests.tests:
            assert isinstance(test, StreamTest)
            if left <= 0:
                yield "timeout", 0
                return
            done = self._run(source, test.stdin, min(self.time_limit, left))
            yield done.status, done.ok and test.accepts(done.stdout)
            if done.status == "timeout":
                return
            left -= done.seconds

    def _run(self, source: str, stdin: str = "", time_limit: float | None = None) -> Execution:
        return self.sandbox.run(source, stdin, time_limit or self.time_limit, self.memory_limit)


def _source(code: str, tests: UnitTests) -> str:
    """The code; a response that only continues a stub is put behind it."""
    entry = tests.entry or ""
    continues = defines(tests.preamble, entry) and not defines(code, entry)
    return f"{tests.preamble}{code}" if continues else _from_the_margin(code)


def _from_the_margin(code: str) -> str:
    """Code without indentation of its first line, which a text begins with that goes on after "Answer:".

    Any other code is left as it is: `textwrap.dedent` also empties lines of spaces, inside of strings, too.

    >>> _from_the_margin(" def f(x): return x"), _from_the_margin("  x = 1\\n  y = 2")
    ('def f(x): return x', 'x = 1\\ny = 2')
    """
    return textwrap.dedent(code).lstrip(" \t") if re.match(r"\n*[ \t]", code) else code


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
    """Whether source text defines `name`: a function, a class, or something that is given the name.

    >>> [defines(code, "add") for code in ("def add_all(xs): ...", "# def add is above", "add = sum")]
    [False, False, True]
    """
    name = re.escape(name)
    definition = rf"^[ \t]*(?:(?:async[ \t]+)?(?:def|class)[ \t]+{name}\b|{name}[ \t]*(?::[^=\n]*)?=(?!=))"
    return re.search(definition, code, re.MULTILINE) is not None


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
