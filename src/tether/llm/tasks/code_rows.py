"""Reading programming problems in the forms data sets publish them in."""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
from collections.abc import Callable
from typing import Any

from tether.errors import DataError
from tether.llm.tasks.code_assertions import Assertions
from tether.llm.tasks.code_cases import CallTest, StreamTest, UnitTests
from tether.llm.tasks.code_names import BUILTINS, USUAL, Context, undefined_names, without_unused_imports
from tether.llm.tasks.protocol import Problem, Prompt


def problem_of_row(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """Make a problem of a row, whichever of the known forms it has.

    >>> row = {"prompt": "Add.", "test_list": ["assert add(1, 2) == 3"]}
    >>> problem_of_row("row 1", row, "").prompt
    [{'role': 'user', 'content': 'Add.\\n\\nYour code should pass a test such as: add(1, 2)'}]
    """
    for field, read in _FORMS.items():
        if row.get(field):
            try:
                return read(where, row, instruction)
            except DataError:
                raise
            except (LookupError, TypeError, AttributeError, SyntaxError, ValueError) as error:
                raise DataError(
                    f"{where}: field {field!r} is malformed ({type(error).__name__}: {error}). Fix or remove "
                    "the row."
                ) from error
    raise DataError(
        f"{where}: no tests (the row has: {', '.join(map(str, row)) or 'nothing'}). Give one of the fields "
        f"{', '.join(_FORMS)}; docs/tasks.md says what they hold."
    )


def _own(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """``tests``: a list of {"call", "expected"} or of {"input", "output"}."""
    given, preamble = row["tests"], row.get("preamble") or ""
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: 'tests' must be a list of tests. Fix or remove the row.")
    if "call" not in given[0]:
        streams = [StreamTest(str(test["input"]), str(test["output"])) for test in given]
        tests = UnitTests(streams, preamble)
    else:
        sources = [ast.parse(test["call"], mode="eval").body for test in given]
        context = Context.of(preamble)
        entry = _name(row.get("entry") or _called(sources, context, where))
        assertions = Assertions(entry, where, context)
        for source, test in zip(sources, given, strict=True):
            assertions.compare(source, test["expected"], _tolerance(where, test.get("tolerance", 0.0)))
        tests = UnitTests(assertions.finish(), preamble, entry)
    return _problem(where, row["prompt"], instruction, tests, row.get("solution"))


def _tolerance(where: str, value: Any) -> float:
    """A distance that a number may have from what is expected."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise DataError(
            f"{where}: the tolerance {value!r} of a test is no distance. Give a number of at least 0, or "
            "remove the row."
        )
    return float(value)


def _mbpp(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """``test_list``: assertions as text; the task in ``text`` or ``prompt``; imports in ``test_imports``."""
    statements = ast.parse("\n".join(row["test_list"])).body
    preamble = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""]).strip()
    context = Context.of(preamble)
    asserted = [statement.test for statement in statements if isinstance(statement, ast.Assert)]
    entry = _called(asserted, context, where, row.get("code") or "")
    assertions = Assertions(entry, where, context)
    assertions.read(statements)
    tests = assertions.finish()
    preamble = without_unused_imports(preamble, assertions.names_inside)
    prompt = (
        f"{row.get('text') or row['prompt']}\n\nYour code should pass a test such as: {tests[0].calls[0]}"
    )
    return _problem(where, prompt, instruction, UnitTests(tests, preamble, entry), row.get("code"))


def _human_eval(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """``test``: a function check(candidate); the stub in ``prompt``, the name in ``entry_point``."""
    entry, stub = _name(row["entry_point"]), row["prompt"]
    statements = ast.parse(row["test"]).body
    checks = [part for part in statements if isinstance(part, ast.FunctionDef) and part.name == "check"]
    if not checks:
        raise DataError(f"{where}: 'test' defines no function check. Fix or remove the row.")
    assertions = Assertions(entry, where, Context.of(stub), checks[0].args.args[0].arg)
    assertions.define([statement for statement in statements if statement is not checks[0]])
    assertions.read(checks[0].body)
    # The stub is a whole function, its docstring being its body, so what it imports and defines is there.
    tests = UnitTests(assertions.finish(), "\n".join([*assertions.imports, stub]), entry)
    prompt = f"Complete this function.\n\n```python\n{stub.rstrip()}\n```"
    solution = stub + row["canonical_solution"] if row.get("canonical_solution") else None
    return _problem(where, prompt, instruction, tests, solution)


def _apps(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """``input_output``: JSON with inputs, outputs and optionally fn_name; the task in ``question``; where
    functions are called, ``starter_code`` may begin the one that is."""
    prompt = row.get("question") or row["prompt"]
    return _inputs_outputs(where, prompt, row["input_output"], instruction, row.get("starter_code") or "")


def _eurus(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """``reward_model``: {"ground_truth": JSON with inputs and outputs}; the task in ``prompt``."""
    return _inputs_outputs(where, row["prompt"], row["reward_model"]["ground_truth"], instruction)


def _inputs_outputs(where: str, prompt: Prompt, given: Any, instruction: str, starter: str = "") -> Problem:
    data = json.loads(given) if isinstance(given, str) else given
    inputs, outputs, entry = data["inputs"], data["outputs"], data.get("fn_name")
    if not inputs or len(inputs) != len(outputs):
        raise DataError(f"{where}: {len(inputs)} inputs and {len(outputs)} outputs. Fix or remove the row.")
    if entry is None:
        tests = UnitTests(
            [StreamTest(_text(read), _text(wanted)) for read, wanted in zip(inputs, outputs, strict=True)]
        )
        return _problem(where, prompt, instruction, tests, None)
    of_class = _SOLUTION.search(starter) is not None
    called = f"Solution().{_name(entry)}" if of_class else _name(entry)
    calls = [f"{called}({', '.join(map(repr, arguments))})" for arguments in inputs]
    tests = UnitTests(
        [_published_call(call, value) for call, value in zip(calls, outputs, strict=True)],
        "",
        "Solution" if of_class else entry,
    )
    return _problem(where, _with_starter(prompt, entry, starter), instruction, tests, None)


# How LeetCode's rows begin, whose function is a method of it.
_SOLUTION = re.compile(r"^class Solution\b", re.MULTILINE)


def _published_call(call: str, value: Any) -> CallTest:
    """A call that gives a value, or its only element: rows of one published kind put each into a list.

    As in the data sets' own checker (testing_util.py of hendrycks/apps), which takes the first element of a
    longer list, too; a tuple counts as the list that JSON made of it.
    """
    values = [value, value[0]] if isinstance(value, list) and len(value) == 1 else [value]
    listed = "[list(x) if isinstance(x, tuple) else x for x in r0] if isinstance(r0, (list, tuple)) else r0"
    checks = [f"({listed}) == v{index}" for index in range(len(values))]
    return CallTest([call], " or ".join(checks), values)


def _with_starter(prompt: Prompt, entry: str, starter: str) -> Prompt:
    """A prompt that says which function is called: by what its code begins with, or by its name."""
    text = prompt if isinstance(prompt, str) else "".join(str(one.get("content")) for one in prompt)
    if starter.strip():
        added = f"Begin with this code.\n\n```python\n{starter.rstrip()}\n```"
    elif re.search(rf"\b{re.escape(entry)}\b", text) is None:
        added = f"The function is called {entry}."
    else:
        return prompt
    if isinstance(prompt, str):
        return f"{prompt.rstrip()}\n\n{added}"
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": f"{last['content'].rstrip()}\n\n{added}"}]


_FORMS: dict[str, Callable[[str, dict[str, Any], str], Problem]] = {
    "tests": _own,
    "test_list": _mbpp,
    "test": _human_eval,
    "input_output": _apps,
    "reward_model": _eurus,
}


def _problem(where: str, prompt: Prompt, instruction: str, tests: UnitTests, solution: str | None) -> Problem:
    if isinstance(prompt, str):
        text = f"{prompt.strip()}\n\n{instruction}" if instruction else prompt.strip()
        prompt = [{"role": "user", "content": text}]
    if not prompt or not all(isinstance(message.get("content"), str) for message in prompt):
        raise DataError(f"{where}: the prompt is neither text nor messages. Fix or remove the row.")
    missing = undefined_names(tests.preamble)
    if missing:
        raise DataError(
            f"{where}: what runs before the program uses {min(missing)!r}, which is not defined there. "
            "Define it there, or leave the row out."
        )
    try:
        answer = tests.dump()
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    metadata = {"solution": f"```python\n{solution.strip()}\n```"} if solution else {}
    return Problem(list(prompt), answer, metadata)


def _called(asserted: list[ast.expr], context: Context, where: str, solution: str = "") -> str:
    """The function that every assertion calls and that neither Python nor the row's tests have by itself.

    A solution that defines it tells where the function bears the name of one of Python's.
    """
    solved = {part.name for part in ast.parse(solution).body if isinstance(part, ast.FunctionDef)}
    known = (BUILTINS | USUAL.keys()) - solved | context.names
    shared: set[str] | None = None
    for node in asserted:
        calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
        names = {called.id for called in calls if isinstance(called, ast.Name)} - known
        if names or not isinstance(node, ast.Constant):
            shared = names if shared is None else shared & names
    if not shared or len(shared) != 1:
        raise DataError(
            f"{where}: the assertions do not all call one function "
            f"({', '.join(sorted(shared or ())) or 'none'}). Fix or remove the row."
        )
    return shared.pop()


def _name(entry: Any) -> str:
    if not isinstance(entry, str) or not entry.isidentifier() or keyword.iskeyword(entry):
        raise TypeError(f"{entry!r:.60} is no function's name")
    return entry


def _text(stream: Any) -> str:
    return "\n".join(map(str, stream)) if isinstance(stream, list) else str(stream)
