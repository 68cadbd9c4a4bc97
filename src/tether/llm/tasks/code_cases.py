"""Unit tests of programming problems, in a form whose expected answers never enter the sandbox.

A test is either a program's input and output, or an expression that calls the candidate's function and the
value it must have. The expression is evaluated inside the sandbox, the value compared outside. Assertions
of published data sets are taken apart into such pairs; an assertion that cannot be is refused, since
running it beside the candidate would show it the answer.
"""

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass
from typing import Any

from tether.errors import DataError
from tether.llm.tasks.code_harness import canonical


@dataclass(frozen=True)
class CallTest:
    """An expression that calls the candidate, and the canonical form of what it must give.

    >>> CallTest.of("add(1, 2)", 3).accepts(["int", "0x3"])
    True
    """

    call: str
    """Evaluated where the candidate's definitions are."""
    expected: list[Any]
    """See `canonical`."""
    absolute: float = 0.0
    """How far a number may be off."""
    relative: float = 0.0
    """The same, as a share of the larger of the two."""

    @classmethod
    def of(cls, call: str, value: Any, absolute: float = 0.0, relative: float = 0.0) -> CallTest:
        """Make a test from the expected value itself."""
        return cls(call, canonical(value), absolute, relative)

    def accepts(self, found: Any) -> bool:
        """Whether a canonical value from the sandbox, which may be anything at all, is right."""
        if found == self.expected:
            return found[0] != "other" and found != ["float", "nan"]
        if not (self.absolute or self.relative):
            return False
        try:
            left, right = _number(found), _number(self.expected)
        except (TypeError, ValueError, IndexError, OverflowError):
            return False
        return math.isclose(left, right, rel_tol=self.relative, abs_tol=self.absolute)


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
        """Whether a program printed what it had to."""
        return _lines(found) == _lines(self.stdout)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _number(form: Any) -> float:
    kind, text = form
    if kind == "int":
        return float(int(text, 16))
    if kind == "float":
        return float(text)
    raise ValueError(kind)


def cases_from_assertions(statements: list[ast.stmt], entry: str, where: str) -> list[CallTest]:
    """Take assertions about the function `entry` apart into calls and expected values.

    Understood are ``assert f(x) == value`` either way round, ``assert f(x)``, ``assert not f(x)``,
    ``assert f(x) is None``, ``assert abs(f(x) - value) < bound`` and ``assert math.isclose(f(x), value)``,
    where ``f(x)`` may stand inside an expression such as ``sorted(f(x))``.

    Raises:
        DataError: There is an assertion that cannot be judged from outside, or none at all.

    >>> tree = ast.parse("assert add(1, 2) == 3")
    >>> cases_from_assertions(tree.body, "add", "row 1")[0].call
    'add(1, 2)'
    """
    tests = []
    for statement in statements:
        if isinstance(statement, ast.Assert):
            if isinstance(statement.test, ast.Constant) and statement.test.value is True:
                continue
            tests.append(_test_of(statement.test, entry, where))
        elif not _has_no_effect(statement):
            raise DataError(
                f"{where}: the tests hold more than assertions ({ast.unparse(statement)[:80]!r}), so they "
                "cannot be judged outside the sandbox. Rewrite them as 'assert f(...) == value', or leave "
                "the row out."
            )
    if not tests:
        raise DataError(f"{where}: the tests assert nothing about {entry!r}. Fix or remove the row.")
    return tests


def _has_no_effect(statement: ast.stmt) -> bool:
    """A docstring, print, pass, or assignment of a plain value such as METADATA."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        value = statement.value
        return isinstance(value, ast.Constant) or (
            isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print"
        )
    return isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Dict, ast.Constant))


def _test_of(test: ast.expr, entry: str, where: str) -> CallTest:
    try:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return CallTest.of(f"bool({_call(test.operand, entry)})", False)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return _comparison(test, entry)
        if isinstance(test, ast.Call) and _named(test.func) in ("isclose", "math.isclose"):
            return _isclose(test, entry)
        return CallTest.of(f"bool({_call(test, entry)})", True)
    except ValueError as error:
        raise DataError(
            f"{where}: the assertion {ast.unparse(test)[:120]!r} cannot be judged outside the sandbox "
            f"({error}). Rewrite it as 'assert f(...) == value', or leave the row out."
        ) from error


def _comparison(test: ast.Compare, entry: str) -> CallTest:
    left, operator, right = test.left, test.ops[0], test.comparators[0]
    if isinstance(operator, (ast.Lt, ast.LtE)):
        return _closeness(left, right, entry)
    if not isinstance(operator, (ast.Eq, ast.Is)):
        raise ValueError(f"{type(operator).__name__} is not understood")
    if not _mentions(left, entry):
        left, right = right, left
    return CallTest.of(_call(left, entry), _value(right, entry))


def _closeness(left: ast.expr, bound: ast.expr, entry: str) -> CallTest:
    """``abs(f(x) - value) < bound``."""
    if not (isinstance(left, ast.Call) and _named(left.func) in ("abs", "math.fabs") and len(left.args) == 1):
        raise ValueError("only abs(f(x) - value) may be compared with a bound")
    difference = left.args[0]
    if not (isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub)):
        raise ValueError("only a difference may be compared with a bound")
    call, value = difference.left, difference.right
    if not _mentions(call, entry):
        call, value = value, call
    return CallTest.of(_call(call, entry), _value(value, entry), absolute=float(_value(bound, entry)))


def _isclose(test: ast.Call, entry: str) -> CallTest:
    if len(test.args) != 2:
        raise ValueError("isclose takes two values")
    call, value = test.args
    if not _mentions(call, entry):
        call, value = value, call
    bounds = {keyword.arg: float(_value(keyword.value, entry)) for keyword in test.keywords}
    return CallTest.of(
        _call(call, entry), _value(value, entry), bounds.get("abs_tol", 0.0), bounds.get("rel_tol", 1e-9)
    )


def _call(node: ast.expr, entry: str) -> str:
    """The source of an expression that calls `entry` and shows nothing of what it should give."""
    if not _mentions(node, entry):
        raise ValueError(f"it does not call {entry}")
    for part in ast.walk(node):
        if isinstance(part, (ast.Compare, ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr)):
            raise ValueError("the expected value stands inside the expression")
    return ast.unparse(node)


def _value(node: ast.expr, entry: str) -> Any:
    """The value of an expression of constants and containers, found without running it."""
    if _mentions(node, entry):
        raise ValueError("both sides call the function")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        makers: dict[str, Any] = {
            "set": set,
            "frozenset": frozenset,
            "tuple": tuple,
            "list": list,
            "dict": dict,
        }
        if node.func.id in makers and len(node.args) <= 1:
            return makers[node.func.id](*(_value(argument, entry) for argument in node.args))
        if node.func.id == "float" and len(node.args) == 1:
            return float(_value(node.args[0], entry))
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        left, right = _value(node.left, entry), _value(node.right, entry)
        if all(isinstance(side, (int, float)) for side in (left, right)):
            return _arithmetic(node.op, left, right)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{ast.unparse(node)[:60]!r} is no plain value") from error


def _arithmetic(operator: ast.operator, left: float, right: float) -> float:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if right == 0:
        raise ValueError("division by zero")
    return left / right


def _mentions(node: ast.expr, entry: str) -> bool:
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == entry
        for part in ast.walk(node)
    )


def _named(node: ast.expr) -> str:
    return ast.unparse(node)


def dump_tests(tests: list[CallTest] | list[StreamTest], preamble: str, entry: str | None) -> str:
    """Write the tests of one problem as the text a problem's answer is."""
    kind = "calls" if tests and isinstance(tests[0], CallTest) else "streams"
    return json.dumps(
        {"kind": kind, "entry": entry, "preamble": preamble, "tests": [vars(test) for test in tests]}
    )


def load_tests(answer: str) -> tuple[list[CallTest] | list[StreamTest], str, str | None]:
    """Read what `dump_tests` wrote: tests, preamble, name of the function.

    Raises:
        DataError: The text is no such thing.

    >>> load_tests(dump_tests([StreamTest("1", "2")], "", None))[0]
    [StreamTest(stdin='1', stdout='2')]
    """
    try:
        data = json.loads(answer)
        make = {"calls": CallTest, "streams": StreamTest}[data["kind"]]
        if not data["tests"]:
            raise ValueError("an empty list of tests")
        return [make(**test) for test in data["tests"]], data["preamble"], data["entry"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The answer {answer[:60]!r} holds no tests ({type(error).__name__}: {error}). Take it from a "
            "problem of the code task."
        ) from error
