"""Plain data on its way out of the sandbox, whatever a program writes, and answers as text."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading_time import grows_linearly

from tether.errors import DataError
from tether.llm.tasks.code_cases import CallTest, StreamTest, UnitTests
from tether.llm.tasks.code_harness import DEPTH, ROOM, TooLargeError, encode
from tether.llm.tasks.code_values import Items, Value, decode, read_results


def passes(test: CallTest, value: Any) -> bool:
    return test.accepts([Value(value)])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
        | st.sets(st.integers() | st.floats(allow_nan=False) | st.text(max_size=3), max_size=3)
    ),
    max_leaves=8,
)


def carried(value: Any) -> Any:
    """A value after its way out of the sandbox."""
    (found,) = read_results(f"[{encode(value)}]\n", 1)
    assert found is not None
    return found.data


@given(VALUES)
def test_plain_data_leaves_the_sandbox_as_it_was(value: Any) -> None:
    assert carried(value) == value
    assert repr(carried(value)) == repr(value) or isinstance(value, (set, dict, list, tuple))


@given(VALUES, VALUES)
def test_equality_is_pythons(first: Any, second: Any) -> None:
    answer = UnitTests([CallTest.of("f()", first)], "", "f").dump()
    (test,) = UnitTests.load(answer).tests
    assert isinstance(test, CallTest)
    assert passes(test, carried(second)) == (first == second)
    assert passes(test, carried(first))


def test_numbers_compare_across_types_and_signs() -> None:
    for value in (1, 1.0, True, 1 + 0j):
        assert passes(CallTest.of("f()", 1), carried(value))
    assert passes(CallTest.of("f()", 0.0), carried(-0.0))
    assert math.copysign(1, carried(-0.0)) == -1
    assert not passes(CallTest.of("f()", math.nan), carried(math.nan))
    assert not passes(CallTest.of("f()", [math.nan]), carried([math.nan]))
    assert passes(CallTest.of("f()", {1: 2, 3: 4}), carried({3.0: 4, True: 2}))
    assert carried("\ud800x") == "\ud800x"
    assert carried(3**5000) == 3**5000


def test_subclasses_count_as_the_plain_value_they_hold() -> None:
    class Liar(list):
        def __iter__(self) -> Any:
            return iter([1, 2, 3])

        __len__ = __eq__ = None  # type: ignore[assignment]

    class Level(IntEnum):
        high = 3

    point = namedtuple("point", "x y")
    assert carried(Liar([9])) == [9]
    assert carried((Level.high, point(1, 2), Counter("aab"), OrderedDict(a=1), defaultdict(int, b=2))) == (
        3,
        (1, 2),
        {"a": 2, "b": 1},
        {"a": 1},
        {"b": 2},
    )
    assert type(carried(Level.high)) is int
    assert carried(np.float64(0.5)) == 0.5


def test_what_iterates_is_carried_for_use_but_equals_nothing() -> None:
    three = {0: 1, 1: 1, 2: 1}
    for value in (range(3), deque(three), map(int, "012"), (n for n in three), three.keys()):
        found = carried(value)
        assert isinstance(found, Items)
        test = CallTest(["f()"], "list(r0) == v0", [[0, 1, 2]])
        assert passes(test, found)
        assert found != [0, 1, 2]


def test_what_is_no_plain_data_or_too_large_does_not_leave() -> None:
    for value in (object(), len, int, [object()], {"a": NotImplemented}, np.zeros(2), np.int64(1)):
        with pytest.raises(TypeError, match="no plain data"):
            encode(value)
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(DEPTH + 1):
        deep = [deep]
    wide = ["x" * 1000] * 1000
    for value in (endless, deep, wide, "x" * (ROOM + 1), b"x" * ROOM, 1 << (5 * ROOM), iter(int, 1)):
        with pytest.raises((TooLargeError, TypeError)):
            encode(value)
    shared: list[Any] = []
    for _ in range(60):
        shared = [shared, shared]
    with pytest.raises(TooLargeError):
        encode(shared)


# What a program may write instead.


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "7",
        "{}",
        '{"a": 1, "a": 2}',
        "[1, 2]",
        "[1][1]",
        "[1.5]",
        "[1e999]",
        "[NaN]",
        "[-Infinity]",
        "[" + "9" * 5000 + "]",
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '[["list",' * 500 + "1" + "]]" * 500,
        '[["no such type", 1]]',
        '[["list", {}]]',
        "[[]]",
        "[[1]]",
        "[[null]]",
        '[["int"]]',
        '[["int", 3]]',
        '[["int", "zz"]]',
        '[["int", "0x1", "0x1"]]',
        '[["int", "0x' + "f" * 100_000 + '"]]',
        '[["float", "0x1p999999"]]',
        '[["float", "one"]]',
        '[["bytes", "zz"]]',
        '[["dict", 1]]',
        '[["dict", ["list"], 1]]',
        '[["set", ["list", 1]]]',
        '["\\ud800',
        "[truefalse]",
        "\x00",
    ],
)
def test_malformed_lines_are_failed_calls(line: str) -> None:
    before, hostile, after = read_results(f"[1]\n{line}\n[true]\n", 3)
    assert hostile is None
    assert before is not None
    assert after is not None
    assert (before.data, after.data) == (1, True)


def test_more_lines_than_calls_count_for_nothing_and_missing_ones_fail() -> None:
    assert read_results("[1]\n[2]\n[3]\n", 2) == [None, None]
    assert read_results("[1]\n[2]\n[3", 2) == [None, None]
    found = read_results("[1]\n[2", 3)
    assert [value and value.data for value in found] == [1, None, None]


HOSTILE = {
    "nested": lambda n: "[" * n,
    "digits": lambda n: "[" + "9" * n + "]",
    "hexadecimal digits": lambda n: '[["int","' + "f" * n + '"]]',
    "digits of a float": lambda n: '[["float","0x1.' + "f" * n + '"]]',
    "small items": lambda n: '[["list"' + ",1" * (n // 2) + "]]",
    "empty lists": lambda n: '[["list"' + ',["list"]' * (n // 9) + "]]",
    "a set of one hash": lambda n: (
        '[["set"' + "".join(f',["int","{hex(k * (2**61 - 1))}"]' for k in range(n // 28)) + "]]"
    ),
    "keys of one hash": lambda n: (
        '[["dict"' + "".join(f',["int","{hex(k * (2**61 - 1))}"],1' for k in range(n // 30)) + "]]"
    ),
    "tuples of one hash": lambda n: (
        '[["set"' + "".join(f',["tuple",["int","{hex(k * (2**61 - 1))}"]]' for k in range(n // 40)) + "]]"
    ),
    "escapes": lambda n: '["' + "\\ud800" * (n // 6) + '"]',
    "keys": lambda n: "{" + '"a":1,' * (n // 6),
    "lines": lambda n: "\n" * n,
}


@pytest.mark.parametrize("family", HOSTILE.values(), ids=HOSTILE)
def test_reading_results_takes_linear_time(family: Any) -> None:
    assert grows_linearly(lambda text: read_results(text, 10_000), family, 100_000)


# Answers as text, and streams.


def test_tests_survive_being_an_answer_and_refuse_what_cannot_be_compared() -> None:
    tests = UnitTests([CallTest.of("f(1)", {(1, 2): {3}}, tolerance=0.5)], "import math", "f")
    assert UnitTests.load(tests.dump()) == tests
    json.loads(tests.dump())
    with pytest.raises(DataError, match="cannot be compared"):
        UnitTests([CallTest.of("f(1)", object())], "", "f").dump()
    with pytest.raises(DataError, match="bytes of output"):
        UnitTests([StreamTest("1", "x" * 2_000_000)]).dump()


@pytest.mark.parametrize(
    ("expected", "found", "right"),
    [
        ("3\n", "3", True),
        ("1\n2", "1 \r\n2\t\n\n\n", True),
        ("", "\n\n", True),
        ("1\n2", "1\n2\n3", False),
        ("1\n2\n3", "1\n2", False),
        ("1\n\n2", "1\n2", False),
        (" 1", "1", False),
        ("1 2", "1  2", False),
        ("", "0", False),
    ],
)
def test_output_is_compared_line_by_line_up_to_trailing_white_space(
    expected: str, found: str, right: bool
) -> None:
    assert StreamTest("", expected).accepts(found) is right


@pytest.mark.parametrize("filler", ["\n", " ", "x\n", "\r\n", "\x0c", "3\n"])
def test_comparing_output_takes_linear_time(filler: str) -> None:
    test = StreamTest("", "3\n" * 400_000)
    assert grows_linearly(test.accepts, lambda size: filler * size, 50_000)


def test_decode_refuses_what_encode_never_writes() -> None:
    for form in (1.5, {}, ["list", 1.5], (1,), ["dict", 1, 2, 3]):
        with pytest.raises((ValueError, TypeError)):
            decode(form)
