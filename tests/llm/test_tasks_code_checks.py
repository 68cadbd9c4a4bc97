"""Assertions taken apart into calls and checks, and checks that mean what Python and numpy say."""

from __future__ import annotations

import ast
import math
from typing import Any

import numpy as np
import pytest

from tether.errors import DataError
from tether.llm.tasks.code_assertions import Assertions
from tether.llm.tasks.code_cases import CallTest
from tether.llm.tasks.code_checks import FAILURES, evaluate
from tether.llm.tasks.code_names import Context
from tether.llm.tasks.code_values import Value

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
        ("assert f(lambda x: x >= 717, 0, 1000) == 717", "shows the value 717"),
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


@pytest.mark.parametrize(
    "check", ["all(r0.count(x) == 1 for x in r0)", "all(x in r0 for x in r0)", "r0.index(r0[-1]) >= 0"]
)
def test_looking_through_a_list_is_counted_by_its_elements(check: str) -> None:
    """Outside the sandbox nobody else watches the time: a list of 155,000 numbers would take minutes."""
    node = ast.parse(check, mode="eval").body
    assert evaluate(node, {"r0": list(range(100))})
    with pytest.raises(FAILURES):
        evaluate(node, {"r0": list(range(400_000))})
