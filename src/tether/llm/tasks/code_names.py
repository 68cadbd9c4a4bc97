"""What the names in a data set's assertions mean, found by reading the source around them.

The program under test must have no say in it: were ``close(f(3), 4)`` evaluated beside the candidate, a
candidate that defines ``close`` would pass. So what a row imports, defines or computes for its assertions is
put in place of its names here, before anything runs.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tether.llm.tasks.code_checks import bound_names, dotted

_MOST_INLINED = 20
USUAL = {
    **{name: name for name in ("math", "cmath", "numpy", "collections")},
    **{"np": "numpy", "isclose": "math.isclose", "Counter": "collections.Counter"},
}
"""What names mean where a row imports nothing of that name."""
BUILTINS = frozenset(dir(builtins))


@dataclass
class Context:
    """What the source around a row's assertions defines.

    >>> context = Context.of("import numpy as np\\ndef close(a, b): return abs(a - b) < 1e-6")
    >>> context.imports["np"], list(context.helpers)
    ('numpy', ['close'])
    """

    imports: dict[str, str] = field(default_factory=dict)
    """The full name behind each imported one."""
    helpers: dict[str, ast.FunctionDef] = field(default_factory=dict)
    """Functions that may be put in the place of their calls."""
    opaque: set[str] = field(default_factory=set)
    """Other names, which mean something inside the sandbox alone."""
    constants: dict[str, ast.expr] = field(default_factory=dict)
    """Names that stand for expressions whose own names are resolved."""

    plain_calls: set[str] = field(default_factory=lambda: {"range"})
    """Functions and classes whose results show their arguments."""
    shown: list[Any] = field(default_factory=list)
    """Values that stand in the arguments of other calls that run before the candidate."""

    @classmethod
    def of(cls, preamble: str) -> Context:
        """Read what runs before the candidate."""
        context = cls()
        for statement in ast.parse(preamble).body:
            if not context.define(statement):
                context.opaque |= stored_names([statement])
            if isinstance(statement, ast.ClassDef):
                context.plain_calls.add(statement.name)
            elif not isinstance(statement, ast.FunctionDef):
                context.shown += shown_values([statement], context.plain_calls)
        return context

    def define(self, statement: ast.stmt) -> bool:
        """Take in an import or a function; whether it is one."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                root = alias.name.partition(".")[0]
                self.imports[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                self.imports[alias.asname or alias.name] = f"{statement.module}.{alias.name}"
        elif isinstance(statement, ast.FunctionDef):
            self.helpers[statement.name] = statement
        else:
            return False
        return True

    @property
    def names(self) -> set[str]:
        """Everything a preamble defines."""
        return {*self.imports, *self.helpers, *self.opaque}


class InPlace(ast.NodeTransformer):
    """Put in an assertion's expression what its names stand for, outside the candidate's arguments.

    Constants and functions of one expression replace their names; imported names become full ones. In the
    arguments of a call of a candidate, which the sandbox evaluates, only constants are replaced.
    """

    def __init__(self, context: Context, candidates: set[str]) -> None:
        self._context = context
        self._candidates = candidates
        self._inlined = 0
        self.bound: set[str] = set()

    def place(self, node: ast.expr) -> ast.expr:
        """The expression with its names replaced; the original is left as it is."""
        self.bound = bound_names(node)
        placed: ast.expr = self.visit(copy.deepcopy(node))
        clash = self.bound & {*self._context.constants, *self._candidates}
        if clash:
            raise ValueError(f"{min(clash)!r} is defined twice")
        return placed

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = dotted(node.func)
        if name in self._candidates:
            return _Substitute(self._context.constants).arguments(node)
        if name in self._context.helpers:
            return self._helper(node, self._context.helpers[name])
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.bound or not isinstance(node.ctx, ast.Load):
            return node
        if node.id in self._context.constants:
            return copy.deepcopy(self._context.constants[node.id])
        return self._resolved(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        name = dotted(node)
        root = name.partition(".")[0] if name else None
        if name and root not in self.bound and root not in self._context.constants:
            return self._resolved(name)
        self.generic_visit(node)
        return node

    def _resolved(self, name: str) -> ast.expr:
        root, dot, rest = name.partition(".")
        if root in self._candidates:
            raise ValueError(f"{root} is more than called")
        if root in self._context.imports:
            root = self._context.imports[root]
        elif root in self._context.helpers or root in self._context.opaque:
            raise ValueError(f"{root!r} means something inside the sandbox alone")
        else:
            root = USUAL.get(root, root)
        return ast.parse(f"{root}{dot}{rest}", mode="eval").body

    def _helper(self, node: ast.Call, helper: ast.FunctionDef) -> ast.expr:
        """The expression that a helper returns, over the arguments of a call."""
        self._inlined += 1
        body = _returned(helper)
        if body is None or self._inlined > _MOST_INLINED:
            raise ValueError(f"{helper.name} does more than return an expression")
        arguments = {name: self.visit(value) for name, value in _arguments(node, helper).items()}
        inner = bound_names(body)
        taken = {
            part.id for value in arguments.values() for part in ast.walk(value) if isinstance(part, ast.Name)
        }
        if inner & {*taken, *arguments}:
            raise ValueError(f"{helper.name} uses a name twice")
        self.bound |= inner
        placed: ast.expr = self.visit(_Substitute(arguments).visit(copy.deepcopy(body)))
        return placed


class _Substitute(ast.NodeTransformer):
    """Replace names by expressions."""

    def __init__(self, expressions: dict[str, ast.expr]) -> None:
        self._expressions = expressions

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._expressions.get(node.id, node))

    def arguments(self, node: ast.Call) -> ast.Call:
        """Replace them in a call's arguments alone."""
        for part in (*node.args, *node.keywords):
            if bound_names(part) & self._expressions.keys():
                raise ValueError(f"{ast.unparse(part)[:60]!r} uses a name twice")
        node.args = [self.visit(argument) for argument in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        return node


def _returned(helper: ast.FunctionDef) -> ast.expr | None:
    """What a function of nothing but a return statement (and perhaps a docstring) returns."""
    body = helper.body[1:] if ast.get_docstring(helper) else helper.body
    if len(body) != 1 or not isinstance(body[0], ast.Return) or helper.decorator_list:
        return None
    return body[0].value


def _arguments(node: ast.Call, helper: ast.FunctionDef) -> dict[str, ast.expr]:
    given = helper.args
    if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
        raise ValueError(f"{helper.name} takes more than named arguments")
    names = [argument.arg for argument in given.args]
    found = dict(zip(names[len(names) - len(given.defaults) :], given.defaults, strict=True))
    found.update(zip(names, node.args, strict=False))
    found.update((str(keyword.arg), keyword.value) for keyword in node.keywords)
    if set(found) != set(names) or len(node.args) > len(names):
        raise ValueError(f"the call of {helper.name} does not fit it")
    return found


def undefined_names(preamble: str) -> set[str]:
    """Names that a preamble uses as it runs and that nothing defines before the candidate.

    >>> undefined_names("root = Node(1)")
    {'Node'}
    """
    statements = ast.parse(preamble).body
    running = list(_running(statements))
    if any(isinstance(part, ast.alias) and part.name == "*" for part in running):
        return set()
    return loaded_names(running) - stored_names(statements) - BUILTINS - {"__name__", "__file__"}


def without_unused_imports(preamble: str, used: set[str]) -> str:
    """Drop imports that only checks use, of what the sandbox lacks: all but the standard library.

    >>> without_unused_imports("import math\\nimport numpy as np", {"f"})
    'import math'
    """
    statements = ast.parse(preamble).body
    used = used | loaded_names(part for statement in statements for part in ast.walk(statement))
    kept = [statement for statement in statements if not _is_foreign(statement, used)]
    return preamble if len(kept) == len(statements) else ast.unparse(ast.Module(kept, []))


def _is_foreign(statement: ast.stmt, used: set[str]) -> bool:
    if isinstance(statement, ast.Import):
        modules = [alias.name for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom):
        modules = [statement.module or ""]
    else:
        return False
    roots = {module.partition(".")[0] for module in modules}
    return not roots & sys.stdlib_module_names and not stored_names([statement]) & used


def shown_values(nodes: Iterable[ast.AST], plain_calls: set[str]) -> list[Any]:
    """Values that stand in the source of calls and lambdas, but may not be seen in what these give.

    >>> shown_values([ast.parse("decode(encode('text'), 3)")], {"decode"})
    ['text']
    """
    found: list[Any] = []
    for node in (part for top in nodes for part in ast.walk(top)):
        called = isinstance(node, ast.Call) and dotted(node.func) not in plain_calls
        if called or isinstance(node, ast.Lambda):
            for part in ast.walk(node):
                with contextlib.suppress(ValueError, TypeError):
                    found.append(ast.literal_eval(part))
    return found


def _running(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Everything but the bodies of functions."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _running(ast.iter_child_nodes(node))


def loaded_names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that nodes, without what is in them, read."""
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def stored_names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that nodes, and what is in them, define."""
    names: set[str] = set()
    for node in (part for top in nodes for part in ast.walk(top)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names
