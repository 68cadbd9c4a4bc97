"""Unit tests of programming problems, in a form whose expected answers never enter the sandbox.

A test is either a program's input and output, or calls of the candidate's function and what must hold of the
values they give. The calls are made inside the sandbox; the values leave it as plain data and are judged
here. `tether.llm.tasks.code_assertions` takes the assertions of published data sets apart into such tests.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tether.errors import DataError
from tether.llm.tasks.code_checks import FAILURES, evaluate
from tether.llm.tasks.code_harness import OUTPUT, TooLargeError, encode
from tether.llm.tasks.code_values import Value, decode


@dataclass(frozen=True)
class CallTest:
    """Calls of the candidate, and what must hold of what they give.

    >>> CallTest.of("add(1, 2)", 3).accepts([Value(3.0)])
    True
    >>> CallTest(["f(1)"], "abs(r0 - v0) < v1", [0.3, 0.01]).accepts([Value(0.305)])
    True
    """

    calls: list[str]
    """Evaluated where the candidate's definitions are."""
    check: str
    """An expression over what they give, ``r0``, ``r1`` and so on, and the values ``v0``, ``v1`` ..."""
    values: list[Any]
    """What the test expects, as plain data."""

    @classmethod
    def of(cls, call: str, value: Any, tolerance: float = 0.0) -> CallTest:
        """Make a test that a call gives a value, or a number at most `tolerance` away."""
        return cls([call], "r0", []).giving(value, tolerance)

    def giving(self, value: Any, tolerance: float = 0.0) -> CallTest:
        """The test that what `check` gives is a value, or a number at most `tolerance` away."""
        index = len(self.values)
        same = f"({self.check}) == v{index}"
        near = f" or abs(({self.check}) - v{index}) <= v{index + 1}" if tolerance else ""
        return CallTest(self.calls, same + near, [*self.values, value, *([tolerance] if tolerance else [])])

    def accepts(self, found: Sequence[Value | None]) -> bool:
        """Whether what the calls gave, each None where it failed, is right."""
        if None in found:
            return False
        names = {f"r{index}": value.data for index, value in enumerate(found) if value is not None}
        names.update((f"v{index}", value) for index, value in enumerate(self.values))
        try:
            return bool(evaluate(_parsed(self.check), names))
        except FAILURES:
            return False


@functools.lru_cache(maxsize=1024)
def _parsed(check: str) -> ast.expr:
    return ast.parse(check, mode="eval").body


@dataclass(frozen=True)
class StreamTest:
    """What a program reads and what it must print.

    >>> StreamTest("1 2", "3").accepts("3 \\n\\n")
    True
    """

    stdin: str
    """Standard input."""
    stdout: str
    """Standard output, up to white space at the ends of lines and of the whole."""

    def accepts(self, found: str) -> bool:
        """Whether a program printed what it had to; reads no more of it than is right."""
        expected, printed = _lines(self.stdout), _lines(found)
        return all(line == next(printed, None) for line in expected) and next(printed, None) is None


def _lines(text: str) -> Iterator[str]:
    text = text.rstrip()
    start = 0
    while start <= len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end].rstrip()
        start = end + 1


@dataclass(frozen=True)
class UnitTests:
    """All tests of a problem, and what a program needs to take them.

    >>> UnitTests([StreamTest("1", "2")]).calls
    []
    """

    tests: list[CallTest] | list[StreamTest]
    """All of one kind."""
    preamble: str = ""
    """Python that runs before the program."""
    entry: str | None = None
    """The function that calls are made of; None for programs that read and print."""

    @property
    def calls(self) -> list[str]:
        """Every test's calls, in order."""
        return [call for test in self.tests if isinstance(test, CallTest) for call in test.calls]

    def dump(self) -> str:
        """Write the tests as the text a problem's answer is."""
        if isinstance(self.tests[0], CallTest):
            tests = [{**vars(test), "values": _encoded(test)} for test in self.tests]
        else:
            tests = [_checked(test) for test in self.tests]
        return json.dumps({"entry": self.entry, "preamble": self.preamble, "tests": tests})

    @classmethod
    def load(cls, answer: str) -> UnitTests:
        """Read what `dump` wrote.

        >>> UnitTests.load(UnitTests([StreamTest("1", "2")]).dump()).tests
        [StreamTest(stdin='1', stdout='2')]
        """
        try:
            data = json.loads(answer)
            if not data["tests"]:
                raise ValueError("an empty list of tests")
            tests: list[Any] = [_loaded(test) for test in data["tests"]]
            return cls(tests, data["preamble"], data["entry"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"The answer {answer[:60]!r} holds no tests ({type(error).__name__}: {error}). Take it from "
                "a problem of the code task."
            ) from error


def _encoded(test: CallTest | StreamTest) -> list[Any]:
    assert isinstance(test, CallTest)
    try:
        return [json.loads(encode(value)) for value in test.values]
    except (TypeError, TooLargeError) as error:
        raise DataError(
            f"What {test.calls[0][:80]} should give cannot be compared: {error}. Leave the test out."
        ) from error


def _checked(test: CallTest | StreamTest) -> dict[str, Any]:
    assert isinstance(test, StreamTest)
    size = len(test.stdout.encode("utf-8", "replace"))
    if size > OUTPUT:
        raise DataError(
            f"a test wants {size} bytes of output, but a program may write {OUTPUT}. Leave the test out."
        )
    return vars(test)


def _loaded(test: dict[str, Any]) -> CallTest | StreamTest:
    if "stdin" in test:
        return StreamTest(**test)
    return CallTest(test["calls"], test["check"], [decode(value) for value in test["values"]])
