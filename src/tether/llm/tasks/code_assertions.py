"""Taking the assertions of published data sets apart: calls for the sandbox, checks for outside.

``assert sorted(f(3)) == [1, 2]`` becomes the call ``f(3)``, whose value leaves the sandbox as plain data, and
the check ``sorted(r0) == v0``, which `tether.llm.tasks.code_checks` evaluates outside. What a row defines for
its assertions (constants, loops over known values, functions of one expression) is put in its place first. An
assertion that cannot be taken apart is refused: run beside the candidate, it would hand the answer to
objects, or functions, of the candidate's own.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from tether.errors import DataError
from tether.llm.tasks.code_cases import CallTest
from tether.llm.tasks.code_checks import FAILURES, bind, dotted, evaluate, refuse_unknown
from tether.llm.tasks.code_functions import FUNCTIONS
from tether.llm.tasks.code_harness import encode
from tether.llm.tasks.code_names import (
    BUILTINS,
    Context,
    InPlace,
    loaded_names,
    shown_values,
    stored_names,
)

_MOST_TESTS = 1000


class Assertions:
    """The tests that a row's statements make about a function.

    >>> assertions = Assertions("add", "row 1", Context())
    >>> assertions.read(ast.parse("assert abs(add(1, 2) - 3) < 0.1").body)
    >>> assertions.tests[0].calls, assertions.tests[0].check
    (['add(1, 2)'], 'abs(r0 - 3) < 0.1')
    """

    def __init__(self, entry: str, where: str, context: Context, parameter: str | None = None) -> None:
        self.tests: list[CallTest] = []
        self.imports: list[str] = []
        """Import statements among those read that calls need beside the preamble's."""
        self.names_inside: set[str] = set()
        """What the calls' arguments use."""
        self._entry = entry
        self._where = where
        self._candidates = {entry, parameter or entry}
        self._context = context
        self._inside = context.names
        self._own_imports: dict[str, ast.stmt] = {}
        self._telling = 0
        self._shown: list[Any] = []
        for name in self._candidates:
            context.helpers.pop(name, None)

    def define(self, statements: list[ast.stmt]) -> None:
        """Read what stands beside the function that asserts: of use or not, nothing of it is refused."""
        for statement in statements:
            try:
                understood = self._definition(statement)
            except ValueError:
                understood = False
            if not understood:
                self._context.opaque |= stored_names([statement])

    def read(self, statements: list[ast.stmt]) -> None:
        """Read assertions, and what they need."""
        for statement in statements:
            try:
                self._read(statement)
            except ValueError as error:
                if isinstance(error, DataError):
                    raise
                shown = statement.test if isinstance(statement, ast.Assert) else statement
                what = "the assertion" if isinstance(statement, ast.Assert) else "the statement"
                raise DataError(
                    f"{self._where}: {what} {ast.unparse(shown)[:120]!r} cannot be judged outside the "
                    f"sandbox ({error}). Rewrite it as 'assert f(...) == value', or leave the row out."
                ) from error

    def compare(self, node: ast.expr, expected: Any, tolerance: float = 0.0) -> None:
        """Add a test that an expression over a call gives a value, or a number at most `tolerance` away."""
        try:
            test = self._test(node).giving(expected, tolerance)
            self._refuse_shown(test)
        except ValueError as error:
            raise DataError(
                f"{self._where}: the test {ast.unparse(node)[:120]!r} cannot be judged outside the sandbox "
                f"({error}). Give a call of {self._entry!r}, or leave the row out."
            ) from error
        self.tests.append(test)

    def finish(self) -> list[CallTest]:
        """Every test."""
        if not self._telling:
            raise DataError(
                f"{self._where}: the tests assert nothing about what {self._entry!r} gives for itself. Fix "
                "or remove the row."
            )
        return self.tests

    def _read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assert):
            if isinstance(statement.test, ast.Constant) and statement.test.value is True:
                return
            if len(self.tests) == _MOST_TESTS:
                raise ValueError(f"it is one of more than {_MOST_TESTS}")
            test = self._test(statement.test)
            self._refuse_shown(test)
            self.tests.append(test)
        elif isinstance(statement, ast.For) and not statement.orelse:
            for value in list(self._evaluated(self._placed(statement.iter))):
                for name, part in bind(statement.target, value).items():
                    self._context.constants[name] = _literal(part)
                self.read(statement.body)
        elif not self._definition(statement) and not _has_no_effect(statement):
            raise ValueError("it is more than an assertion")

    def _definition(self, statement: ast.stmt) -> bool:
        """Take in an import, a function or an assignment; whether it is one."""
        if self._candidates & stored_names([statement]):
            raise ValueError("it redefines the function")
        if self._context.define(statement):
            if not isinstance(statement, ast.FunctionDef):
                self._own_imports.update(dict.fromkeys(stored_names([statement]), statement))
            return True
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return False
        target = statement.targets[0]
        if not isinstance(target, ast.Name):
            return False
        placed = self._placed(statement.value)
        if not _TakenApart(self, copy.deepcopy(placed)).calls:
            placed = _literal(self._evaluated(placed))
        self._context.constants[target.id] = placed
        return True

    def _placed(self, node: ast.expr) -> ast.expr:
        return InPlace(self._context, self._candidates).place(node)

    def _evaluated(self, node: ast.expr) -> Any:
        try:
            return evaluate(node, {})
        except FAILURES as error:
            raise ValueError(f"{ast.unparse(node)[:60]!r} is not known: {error}") from error

    def _refuse_shown(self, test: CallTest) -> None:
        """Refuse calls whose source shows what they should give, as ``decode(encode("text"))`` does."""
        constants = (part for part in ast.walk(ast.parse(test.check)) if isinstance(part, ast.Constant))
        wanted = [*test.values, *(part.value for part in constants)]
        for value in wanted:
            if value is None or type(value) is bool:
                continue
            if any(type(shown) is type(value) and shown == value for shown in self._shown):
                raise ValueError(f"the source of its calls shows the value {repr(value)[:40]}")

    def _test(self, node: ast.expr) -> CallTest:
        placed = self._placed(node)
        self._shown = list(self._context.shown)
        apart = _TakenApart(self, placed)
        if not apart.calls:
            raise ValueError(f"it does not call {self._entry}")
        self._telling += apart.tells
        return CallTest(apart.calls, ast.unparse(apart.check), apart.values)

    def call_inside(self, node: ast.Call) -> str:
        """The source of a call of the candidate, as the sandbox gets it."""
        redefined = {*self._context.helpers, *self._context.opaque}
        node.args = [_as_literal(argument, redefined) for argument in node.args]
        self._shown += shown_values([*node.args, *node.keywords], self._context.plain_calls)
        arguments = [part for top in (*node.args, *node.keywords) for part in ast.walk(top)]
        names = loaded_names(arguments)
        if names & self._candidates:
            raise ValueError(f"{self._entry} is called on what it gave itself")
        names -= stored_names([*node.args, *node.keywords]) | BUILTINS
        for name in sorted(names - self._inside):
            if name not in self._own_imports:
                raise ValueError(f"{name!r} is not defined before the program")
            self.imports.append(ast.unparse(self._own_imports[name]))
            self._inside.add(name)
        self.names_inside |= names
        return ast.unparse(ast.Call(ast.Name(self._entry), node.args, node.keywords))

    def is_call(self, node: ast.AST) -> bool:
        """Whether an expression calls the candidate."""
        return isinstance(node, ast.Call) and dotted(node.func) in self._candidates


class _TakenApart(ast.NodeTransformer):
    """An expression with a name in place of every call of the candidate and of every known value."""

    def __init__(self, assertions: Assertions, node: ast.expr) -> None:
        self.calls: list[str] = []
        self.values: list[Any] = []
        self._assertions = assertions
        self._bound = stored_names([node])
        self._mentions = 0
        self.check: ast.expr = self.visit(node)
        names = [f"r{index}" for index in range(len(self.calls))]
        refuse_unknown(self.check, [*names, *(f"v{index}" for index in range(len(self.values)))])

    @property
    def tells(self) -> bool:
        """Whether it says more than that calls of the candidate agree."""
        known = any(isinstance(part, ast.Constant) for part in ast.walk(self.check))
        return self._mentions == 1 or bool(self.values) or known

    def visit(self, node: ast.AST) -> Any:
        if self._assertions.is_call(node):
            assert isinstance(node, ast.Call)
            return self._call(node)
        if isinstance(node, ast.Compare) and not _compares_identity_soundly(node):
            raise ValueError("'is' compares with None, True or False only")
        if isinstance(node, ast.expr) and self._is_known(node):
            return self._folded(node)
        return self._applied(node) if isinstance(node, ast.Call) else self.generic_visit(node)

    def _applied(self, node: ast.Call) -> ast.Call:
        """A call of a function or method of ours, whose own name is no value."""
        looked_at = node.args[:1] if dotted(node.func) == "isinstance" else node.args
        node.args[: len(looked_at)] = [self.visit(argument) for argument in looked_at]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        if isinstance(node.func, ast.Attribute) and dotted(node.func) not in FUNCTIONS:
            node.func.value = self.visit(node.func.value)
        return node

    def _call(self, node: ast.Call) -> ast.expr:
        if loaded_names(ast.walk(node)) & self._bound - stored_names([node]):
            raise ValueError("a call stands in a loop")
        self._mentions += 1
        source = self._assertions.call_inside(node)
        if source not in self.calls:
            self.calls.append(source)
        return ast.Name(f"r{self.calls.index(source)}", ast.Load())

    def _is_known(self, node: ast.expr) -> bool:
        """Whether nothing in an expression depends on the candidate or on a turn of a loop."""
        if isinstance(node, ast.Constant | ast.Slice | ast.Starred):
            return False
        if isinstance(getattr(node, "ctx", None), ast.Store):
            return False
        parts = list(ast.walk(node))
        if any(self._assertions.is_call(part) for part in parts):
            return False
        return not loaded_names(parts) & self._bound - stored_names([node])

    def _folded(self, node: ast.expr) -> Any:
        """A name for the value of an expression, or the expression where its value is no data."""
        refuse_unknown(node, [])
        try:
            value = evaluate(node, {})
        except FAILURES as error:
            raise ValueError(f"{ast.unparse(node)[:60]!r} has no value: {error}") from error
        try:
            encode(value)
        except TypeError as error:
            if isinstance(node, ast.Name | ast.Attribute | ast.Lambda | ast.Call):
                return node
            raise ValueError(f"{ast.unparse(node)[:60]!r} is no plain value") from error
        self.values.append(value)
        return ast.Name(f"v{len(self.values) - 1}", ast.Load())


def _compares_identity_soundly(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    return not any(isinstance(kind, ast.Is | ast.IsNot) for kind in node.ops) or any(
        isinstance(side, ast.Constant) and (side.value is None or type(side.value) is bool) for side in sides
    )


def _as_literal(node: ast.expr, redefined: set[str]) -> ast.expr:
    """An argument's value instead of the calls that make it, where it is known and its text does not vary."""
    parts = list(ast.walk(node))
    if not any(isinstance(part, ast.Call) for part in parts) or loaded_names(parts) & redefined:
        return node
    try:
        value = evaluate(node, {})
        return node if "set" in encode(value) else _literal(value)
    except FAILURES:
        return node


def _literal(value: Any) -> ast.expr:
    """An expression that gives a value."""
    try:
        node = ast.parse(repr(value), mode="eval").body
        ast.literal_eval(node)
    except SyntaxError as error:
        raise ValueError(f"{value!r:.60} is no plain value") from error
    return node


def _has_no_effect(statement: ast.stmt) -> bool:
    """A docstring, print or pass."""
    if isinstance(statement, ast.Expr):
        value = statement.value
        return isinstance(value, ast.Constant) or (
            isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print"
        )
    return isinstance(statement, ast.Pass)
