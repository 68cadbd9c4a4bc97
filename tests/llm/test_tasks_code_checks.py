"""Assertions taken apart, plain data carried out of the sandbox, and checks with Python's meaning."""

from __future__ import annotations

import ast
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from code_timing import growth
from hypothesis import given
from hypothesis import strategies as st

from tether.errors import DataError
from tether.llm.tasks.code_assertions import Assertions
from tether.llm.tasks.code_cases import CallTest, StreamTest, UnitTests
from tether.llm.tasks.code_checks import FAILURES, evaluate
from tether.llm.tasks.code_harness import DEPTH, ROOM, TooLargeError, encode
from tether.llm.tasks.code_names import Context
from tether.llm.tasks.code_values import Items, Value, decode, read_results

HELPERS = """
import math
from math import isclose as near
import numpy as np
from collections import Counter
def close(a, b, tol=1e-6):
    '''How close.'''
    return abs(a - b) < tol
def loops(a):
    for x in a: return x
class Node: pass
root = Node()
"""


def taken_apart(source: str, preamble: str = HELPERS) -> list[CallTest]:
    assertions = Assertions("f", "row 7", Context.of(preamble), "candidate")
    assertions.read(ast.parse(source).body)
    return assertions.finish()


def passes(test: CallTest, *values: Any) -> bool:
    return test.accepts([Value(value) for value in values])


# Taking assertions apart.


@pytest.mark.parametrize(
    ("assertion", "calls", "right", "wrong"),
    [
        ("assert f(1) == 2", ["f(1)"], 2, 3),
        ("assert candidate(1) == 2, 'message'", ["f(1)"], 2.0, "2"),
        ("assert 2 == f(1)", ["f(1)"], 2.0, "2"),
        ("assert f([1]) == [1, (2, 3)]", ["f([1])"], [1, (2, 3)], [1, [2, 3]]),
        ("assert set(f(1)) == {1, 2}", ["f(1)"], [2, 1, 1], [1]),
        ("assert f(1) == set()", ["f(1)"], set(), {0}),
        ("assert sorted(f(1)) == [1, 2]", ["f(1)"], {2, 1}, [2]),
        ("assert f(1)", ["f(1)"], [0], []),
        ("assert not f(1)", ["f(1)"], 0, 1),
        ("assert f(1) is None", ["f(1)"], None, 0),
        ("assert f(1) is not None", ["f(1)"], 0, None),
        ("assert f(1) == -1.5", ["f(1)"], -1.5, 1.5),
        ("assert f(1) == 2 / 4", ["f(1)"], 0.5, 1),
        ("assert f(1) == 'a' * 3 + 'b'", ["f(1)"], "aaab", "aaa"),
        ("assert f(1) == {'a': [1]}", ["f(1)"], {"a": [1]}, {"a": [2]}),
        ("assert f(1) == float('inf')", ["f(1)"], math.inf, 1e308),
        ("assert f(range(3), key=len) == [x * x for x in range(3)]", ["f(range(3), key=len)"], [0, 1, 4], []),
        ("assert abs(f(1) - 0.3) < 1e-3", ["f(1)"], 0.3004, 0.302),
        ("assert math.fabs(0.3 - f(1)) <= 1e-3", ["f(1)"], 0.3, 0.0),
        ("assert math.isclose(f(1), 100, rel_tol=0.01)", ["f(1)"], 100.5, 102),
        ("assert near(f(1), 100)", ["f(1)"], 100 + 1e-9, 100.1),
        ("assert close(f(1), 100)", ["f(1)"], 100 + 1e-7, 100.1),
        ("assert close(f(1), b=100, tol=1)", ["f(1)"], 100.5, 101.5),
        ("assert np.allclose(f(1), [1, 2])", ["f(1)"], (1, 2 + 1e-9), [1]),
        ("assert f(1).strip().lower().startswith('ab')", ["f(1)"], "  ABC", "b"),
        ("assert ''.join(f(1)) == 'ab'", ["f(1)"], ["a", "b"], ["b", "a"]),
        ("assert f(1)[-1]['k'] == 3", ["f(1)"], [{"k": 3}], [{}]),
        ("assert Counter(f(1)) == Counter([2, 1, 1])", ["f(1)"], [1, 2, 1], [1, 2]),
        ("assert f(1) in (1, 2) and f(1) != 2", ["f(1)"], 1, 2),
        ("assert 0 < f(1) < 10 or f(1) == 99", ["f(1)"], 99, 10),
        ("assert isinstance(f(1), (int, str))", ["f(1)"], "x", 1.5),
        ("assert max(f(1), key=lambda p: p[1]) == (1, 9)", ["f(1)"], [(5, 2), (1, 9)], [(1, 2)]),
        ("assert dict(f(1)) == {1: 2} and [k for k, _ in f(1)] == [1]", ["f(1)"], [(1, 2)], [(1, 3)]),
        ("assert all(abs(x - y) < 0.1 for x, y in zip(f(1), [1, 2]))", ["f(1)"], [1.05, 2], [1.2, 2]),
        ("assert f(root, Node()) == 1", ["f(root, Node())"], 1, 2),
        ("x = [3, 4]\nassert f(x) == x[::-1]", ["f([3, 4])"], [4, 3], [3, 4]),
        ("r = f(3)\nassert len(r) == 2", ["f(3)"], "ab", "a"),
        ("def near2(a):\n    return close(a, 2)\nassert near2(f(1))", ["f(1)"], 2, 3),
        ("assert f(list('abc'), int('7')) == 'abc'", ["f(['a', 'b', 'c'], 7)"], "abc", ""),
        ("assert f(range(5)) == 5", ["f(range(5))"], 5, 4),
        ("import string\nassert f(string.digits) == '0'", ["f(string.digits)"], "0", "1"),
    ],
)
def test_assertions_become_calls_and_checks(assertion: str, calls: list[str], right: Any, wrong: Any) -> None:
    (test,) = taken_apart(assertion)
    assert test.calls == calls
    assert passes(test, right)
    assert not passes(test, wrong)


def test_loops_over_known_values_become_a_test_a_turn() -> None:
    loops = "for n in range(2, 4):\n    for a, b in [(1, n)]:\n        assert f(a, b + 1) == str(n)"
    tests = taken_apart(loops)
    assert [test.calls for test in tests] == [["f(1, 2 + 1)"], ["f(1, 3 + 1)"]]
    assert [passes(test, "2") for test in tests] == [True, False]


def test_assertions_about_two_calls_compare_plain_data() -> None:
    _, agree = taken_apart("assert f(0) == 1\nassert tuple(f(1)) == tuple(f(2))")
    assert agree.calls == ["f(1)", "f(2)"]
    assert passes(agree, [1], (1,))
    assert not passes(agree, [1], [2])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert f(1) == f(2)", "nothing about what 'f' gives"),
        ("assert f(1) == f(1)", "nothing about what 'f' gives"),
        ("pass", "nothing about what 'f' gives"),
        ("assert f(f(1)) == 1", "what it gave itself"),
        ("assert f(loops('text')) == 'text'", "shows the value 'text'"),
        ("assert f(loops([1, 'text'])) == [1, 'text']", "shows the value"),
        ("import base64\nassert f(base64.b64encode(b'text')) == b'text'", "shows the value b'text'"),
        ("assert list(map(f, [1])) == [1]", "more than called"),
        ("assert f.__name__ == 'f'", "more than called"),
        ("assert [f(n) for n in range(3)] == [0, 1, 2]", "stands in a loop"),
        ("assert f(1) == x", "'x' is not known"),
        ("assert f(x) == 1", "'x' is not defined before"),
        ("assert g(1) == 1", "'g' is not understood"),
        ("assert g(f(1)) == 1", "'g' is not understood"),
        ("assert f(1).equals(2)", "'r0.equals' is not understood"),
        ("assert f(1)()", "is not understood"),
        ("assert f(1).__class__ == int", "is not known"),
        ("assert f'{f(1)}' == '1'", "is not understood"),
        ("assert f(1) @ 2 == 3", "MatMult is not understood"),
        ("assert f(1) is 3", "'is' compares"),
        ("assert f(1) == len(3)", "has no value"),
        ("assert f(1) == 10 ** 10 ** 9", "has no value"),
        ("assert f(1) == [0] * 10 ** 9", "has no value"),
        ("assert eval('f(1)')", "'eval' is not understood"),
        ("assert close == f(1)", "inside the sandbox alone"),
        ("assert root == f(1)", "inside the sandbox alone"),
        ("assert loops(f(1)) == 1", "more than return an expression"),
        ("assert close(f(1)) == 1", "does not fit"),
        ("x = g()\nassert f(1) == 1", "'g' is not understood"),
        ("f(1)\nassert f(1) == 1", "more than an assertion"),
        ("f = None\nassert f(1) == 1", "redefines the function"),
        ("while f(1): pass", "more than an assertion"),
        ("try:\n    assert f(1) == 1\nexcept ValueError: pass", "more than an assertion"),
        ("import random\nfor n in range(3):\n    x = random.random()\n    assert f(x) == x", "'random"),
        ("for n in range(2000):\n    assert f(n) == n", "more than 1000"),
        ("assert 1 == 1", "does not call f"),
        ("x = 1\nassert [x for x in f(1)] == [1]", "defined twice"),
    ],
)
def test_what_cannot_be_judged_outside_is_refused_with_the_reason(source: str, reason: str) -> None:
    with pytest.raises(DataError, match=rf"row 7: .*{reason}"):
        taken_apart(source)


# Values.


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
        (test,) = taken_apart("assert list(f()) == [0, 1, 2]")
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
    assert growth(lambda text: read_results(text, 10_000), family(100_000), family(800_000)) < 12


# Checks.


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("r0 ** 10 ** 9", 3),
        ("r0 ** r0", 10**6),
        ("[0] * r0", 10**10),
        ("'ab' * r0", 10**10),
        ("round(1.5, r0)", 10**9),
        ("round(5, -r0)", 10**9),
        ("list(range(r0))", 10**10),
        ("[x + y for x in r0 for y in r0]", list(range(3000))),
        ("sum(r0, [])", [[1]] * 1000),
        ("set(r0)", [k * (2**61 - 1) for k in range(20_000)]),
        ("{x: 1 for x in r0}", [k * (2**61 - 1) for k in range(20_000)]),
        ("set().union(r0)", [k * (2**61 - 1) for k in range(20_000)]),
        ("'x'.join(r0 * 1000)", ["a" * 10_000]),
    ],
)
def test_checks_on_hostile_values_are_given_up(expression: str, value: Any) -> None:
    with pytest.raises(FAILURES):
        evaluate(ast.parse(expression, mode="eval").body, {"r0": value})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("np.allclose(r0, [1.0, 2.0])", [1.0, 2.00001]),
        ("np.allclose(r0, [1.0, 2.0])", [1.0, 2.1]),
        ("np.allclose(r0, [[1, 2], [3, 4]], atol=0.5)", [[1, 2.4], [3, 4]]),
        ("np.allclose(r0, 1e10)", 1.00001e10),
        ("np.allclose(1e10, r0)", 1.0001e10),
        ("np.allclose(r0, [math.inf])", [math.inf]),
        ("np.allclose(r0, [math.nan])", [math.nan]),
        ("np.allclose(r0, [math.nan], equal_nan=True)", [math.nan]),
        ("np.isclose(r0, 0.3)", 0.30000001),
        ("np.array_equal(r0, [1, 2])", [1.0, 2.0]),
        ("np.array_equal(r0, [1, 2])", [1.0]),
        ("math.isclose(r0, 0.3, abs_tol=0.01)", 0.305),
        ("sorted(r0, key=lambda p: (-p[1], p[0]), reverse=True)", [(1, 2), (2, 2), (0, 5)]),
        ("r0[1:-1][::-1] + [len(r0)]", [1, 2, 3, 4]),
        ("{k: v for k, v in r0.items() if v > 1}", {"a": 1, "b": 2}),
        ("sum(x * y for x, y in zip(r0, r0[1:]))", [1, 2, 3]),
        ("divmod(r0, 7) + (r0 % 5, r0 // 5, -r0, r0 / 4, r0 ** 2)", 23),
        ("1 if r0 > 2 else 0", 3),
        ("list(map(str, r0)) + list(filter(None, r0))", [0, 1]),
        ("[r0 & 6, r0 | 8, r0 ^ 1, ~r0]", 5),
    ],
)
def test_checks_mean_what_python_and_numpy_say(expression: str, value: Any) -> None:
    expected = eval(expression, {"np": np, "math": math, "r0": value})  # noqa: S307 - written above
    known = expression.replace("np.", "numpy.")
    assert evaluate(ast.parse(known, mode="eval").body, {"r0": value}) == expected


def test_arrays_of_different_shapes_are_not_close() -> None:
    """numpy would stretch the empty list to any shape, and find all none of its elements close."""
    check = ast.parse("numpy.allclose(r0, [12345])", mode="eval").body
    assert np.allclose([], [12345])
    assert evaluate(check, {"r0": []}) is False
    assert evaluate(check, {"r0": [12345]}) is True


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
    sizes = (50_000, 400_000)
    assert growth(test.accepts, *(filler * size for size in sizes)) < 12


def test_decode_refuses_what_encode_never_writes() -> None:
    for form in (1.5, {}, ["list", 1.5], (1,), ["dict", 1, 2, 3]):
        with pytest.raises((ValueError, TypeError)):
            decode(form)
