"""Evaluating what a test says about plain data, outside the sandbox and without Python's own `eval`.

A check is an expression over names that stand for what calls of the program gave. Only the operations listed
here and in `tether.llm.tasks.code_functions` exist, each of bounded cost, and an evaluation of more than
`STEPS` steps is given up. What Python would raise is raised.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tether.llm.tasks.code_functions import (
    CONSTANTS,
    FUNCTIONS,
    METHODS,
    TYPES,
    add,
    bitwise,
    call_method,
    multiply,
    number,
    power,
    subtract,
)
from tether.llm.tasks.code_values import distinct, make_dict

STEPS = 300_000
"""Parts of expressions evaluated for one check at most."""

FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What evaluating a check raises where its assertion would not hold."""

_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, whole: item in whole,
    ast.NotIn: lambda item, whole: item not in whole,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Sub: subtract,
    ast.Mult: multiply,
    ast.Pow: power,
    ast.Div: lambda left, right: number(number(left) / number(right)),
    ast.FloorDiv: lambda left, right: number(number(left) // number(right)),
    ast.Mod: lambda left, right: number(number(left) % number(right)),
    ast.BitAnd: bitwise(operator.and_),
    ast.BitOr: bitwise(operator.or_),
    ast.BitXor: bitwise(operator.xor),
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: lambda value: -number(value),
    ast.UAdd: lambda value: +number(value),
    ast.Invert: lambda value: ~number(value),
}


def dotted(node: ast.expr) -> str | None:
    """The name that an expression such as ``math.pi`` is; None for any other.

    >>> dotted(ast.parse("a.b.c", mode="eval").body)
    'a.b.c'
    """
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression over `names`.

    >>> evaluate(ast.parse("abs(x - 1) < 0.5", mode="eval").body, {"x": 1.25})
    True
    """
    return _Evaluation(names).of(node)


class _Evaluation:
    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = dict(names)
        self._left = STEPS

    def of(self, node: ast.expr) -> Any:
        self._count(1)
        if type(node) not in _NODES:
            raise ValueError(f"{ast.unparse(node)[:60]!r} is not understood")
        return _NODES[type(node)](self, node)

    def _look_through(self, whole: Any) -> None:
        """Count a step for each element that Python compares, or a check of a list could be quadratic."""
        self._count(len(whole) if isinstance(whole, (list, tuple)) else 0)

    def _count(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise OverflowError(f"more than {STEPS} steps")

    def name(self, node: ast.Name | ast.Attribute) -> Any:
        name = dotted(node) or ""
        for known in (self._names, CONSTANTS, FUNCTIONS):
            if name in known:
                return known[name]
        raise ValueError(f"{ast.unparse(node)[:60]!r} is not known")

    def items(self, nodes: list[ast.expr]) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found.extend(self.of(node.value))
            else:
                found.append(self.of(node))
        return found

    def dictionary(self, node: ast.Dict) -> dict[Any, Any]:
        if None in node.keys:
            raise ValueError("** is not understood")
        keys = self.items([key for key in node.keys if key is not None])
        return make_dict(list(zip(keys, self.items(node.values), strict=True)))

    def choice(self, node: ast.BoolOp) -> Any:
        stops = isinstance(node.op, ast.Or)
        value: Any = None
        for operand in node.values:
            value = self.of(operand)
            if bool(value) is stops:
                break
        return value

    def comparison(self, node: ast.Compare) -> Any:
        left: Any = self.of(node.left)
        result: Any = True
        for kind, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.of(right_node)
            if isinstance(kind, (ast.In, ast.NotIn)):
                self._look_through(right)
            result = _COMPARISONS[type(kind)](left, right)
            if not result:
                break
            left = right
        return result

    def part(self, node: ast.Subscript) -> Any:
        whole = self.of(node.value)
        if not isinstance(node.slice, ast.Slice):
            return whole[self.of(node.slice)]
        bounds = (node.slice.lower, node.slice.upper, node.slice.step)
        return whole[slice(*(None if bound is None else self.of(bound) for bound in bounds))]

    def call(self, node: ast.Call) -> Any:
        name = dotted(node.func)
        if name == "isinstance":
            return isinstance(self.of(node.args[0]), _types(node.args[1]))
        arguments = self.items(node.args)
        named = {str(keyword.arg): self.of(keyword.value) for keyword in node.keywords}
        if name in FUNCTIONS:
            return FUNCTIONS[name](*arguments, **named)
        if isinstance(node.func, ast.Attribute):
            value = self.of(node.func.value)
            if node.func.attr in ("count", "index"):
                self._look_through(value)
            return call_method(value, node.func.attr, arguments, named)
        raise ValueError(f"{ast.unparse(node.func)[:60]!r} is not known")

    def function(self, node: ast.Lambda) -> Callable[..., Any]:
        parameters = [argument.arg for argument in node.args.args]

        def applied(*values: Any) -> Any:
            return self._within(dict(zip(parameters, values, strict=True)), node.body)

        return applied

    def _within(self, names: dict[str, Any], node: ast.expr) -> Any:
        outer = self._names
        self._names = {**outer, **names}
        try:
            return self.of(node)
        finally:
            self._names = outer

    def loop(self, loops: list[ast.comprehension], *wanted: ast.expr) -> Iterator[tuple[Any, ...]]:
        """The wanted expressions' values for every turn of a comprehension's loops."""
        if not loops:
            yield tuple(self.of(node) for node in wanted)
            return
        outer = self._names
        for value in self.of(loops[0].iter):
            self._names = {**outer, **bind(loops[0].target, value)}
            if all(self.of(condition) for condition in loops[0].ifs):
                yield from self.loop(loops[1:], *wanted)
            self._names = outer

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> list[Any]:
        return [value for (value,) in self.loop(node.generators, node.elt)]

    def pairs(self, node: ast.DictComp) -> dict[Any, Any]:
        return make_dict([(key, value) for key, value in self.loop(node.generators, node.key, node.value)])


def bind(target: ast.expr, value: Any) -> dict[str, Any]:
    """What the names in a loop's target stand for.

    >>> bind(ast.parse("a, (b, c)", mode="eval").body, (1, [2, 3]))
    {'a': 1, 'b': 2, 'c': 3}
    """
    if isinstance(target, ast.Name):
        return {target.id: value}
    if not isinstance(target, ast.Tuple | ast.List):
        raise ValueError(f"a loop over {ast.unparse(target)[:60]!r} is not understood")
    names: dict[str, Any] = {}
    for part, item in zip(target.elts, list(value), strict=True):
        names.update(bind(part, item))
    return names


def _types(node: ast.expr) -> tuple[type, ...]:
    listed = node.elts if isinstance(node, ast.Tuple) else [node]
    return tuple(TYPES[dotted(part) or ""] for part in listed)


_NODES: dict[type, Callable[[_Evaluation, Any], Any]] = {
    ast.Constant: lambda self, node: node.value,
    ast.Name: _Evaluation.name,
    ast.Attribute: _Evaluation.name,
    ast.List: lambda self, node: self.items(node.elts),
    ast.Tuple: lambda self, node: tuple(self.items(node.elts)),
    ast.Set: lambda self, node: set(distinct(self.items(node.elts))),
    ast.Dict: _Evaluation.dictionary,
    ast.UnaryOp: lambda self, node: _UNARY[type(node.op)](self.of(node.operand)),
    ast.BinOp: lambda self, node: _BINARY[type(node.op)](self.of(node.left), self.of(node.right)),
    ast.BoolOp: _Evaluation.choice,
    ast.Compare: _Evaluation.comparison,
    ast.IfExp: lambda self, node: self.of(node.body if self.of(node.test) else node.orelse),
    ast.Subscript: _Evaluation.part,
    ast.Call: _Evaluation.call,
    ast.Lambda: _Evaluation.function,
    ast.ListComp: _Evaluation.comprehension,
    ast.SetComp: lambda self, node: set(distinct(self.comprehension(node))),
    ast.GeneratorExp: _Evaluation.comprehension,
    ast.DictComp: _Evaluation.pairs,
}


def refuse_unknown(node: ast.expr, names: Iterable[str]) -> None:
    """Refuse an expression with a part that `evaluate` never understands, whatever `names` stand for.

    >>> refuse_unknown(ast.parse("x.equals(1)", mode="eval").body, ["x"])
    Traceback (most recent call last):
    ValueError: 'x.equals' is not understood
    """
    known = {*names, *bound_names(node)}
    pending: list[ast.AST] = [node]
    while pending:
        part = pending.pop()
        if isinstance(part, ast.Call):
            pending += _parts_of_call(part, known)
        elif isinstance(part, ast.BinOp | ast.UnaryOp):
            if type(part.op) not in _BINARY and type(part.op) not in _UNARY:
                raise ValueError(f"{type(part.op).__name__} is not understood")
            pending += [child for child in ast.iter_child_nodes(part) if isinstance(child, ast.expr)]
        elif isinstance(part, ast.Name | ast.Attribute):
            name = dotted(part) or ""
            if name not in known and name not in CONSTANTS and name not in FUNCTIONS:
                raise ValueError(f"{ast.unparse(part)[:60]!r} is not known")
        elif isinstance(part, ast.Starred):
            pending.append(part.value)
        else:
            unpacks = isinstance(part, ast.Dict) and None in part.keys
            if unpacks or (isinstance(part, ast.expr) and type(part) not in (*_NODES, ast.Slice)):
                raise ValueError(f"{ast.unparse(part)[:60]!r} is not understood")
            pending += [child for child in ast.iter_child_nodes(part) if not isinstance(child, ast.arguments)]


def _parts_of_call(node: ast.Call, known: set[str]) -> list[ast.expr]:
    """What of a call is yet to be looked at: all but the function's name."""
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    name = dotted(node.func)
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("** is not understood")
    if name == "isinstance":
        if len(node.args) != 2:
            raise ValueError("isinstance takes two arguments")
        try:
            _types(node.args[1])
        except KeyError as error:
            raise ValueError(f"the type {ast.unparse(node.args[1])[:60]!r} is not known") from error
        return node.args[:1]
    if name in FUNCTIONS and name not in known:
        return arguments
    if isinstance(node.func, ast.Attribute) and any(
        node.func.attr in methods for methods in METHODS.values()
    ):
        return [node.func.value, *arguments]
    raise ValueError(f"{ast.unparse(node.func)[:60]!r} is not understood")


def bound_names(node: ast.AST) -> set[str]:
    """The names that lambdas and comprehensions inside an expression bind.

    >>> sorted(bound_names(ast.parse("[f(a, b) for a in c]", mode="eval").body))
    ['a']
    """
    return {
        part.arg if isinstance(part, ast.arg) else part.id
        for part in ast.walk(node)
        if isinstance(part, ast.arg) or (isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
    }
