"""Reading programming problems in the forms data sets publish them in."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from tether.errors import DataError
from tether.llm.tasks.code_cases import CallTest, StreamTest, cases_from_assertions, dump_tests
from tether.llm.tasks.protocol import Problem, Prompt

_Tests = list[CallTest] | list[StreamTest]


def problem_of_row(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """Make a problem of a row, whichever of the known forms it has.

    Raises:
        DataError: The row has none of them, or tests that cannot be judged from outside.

    >>> row = {"prompt": "Add.", "test_list": ["assert add(1, 2) == 3"]}
    >>> problem_of_row("row 1", row, "").prompt
    [{'role': 'user', 'content': 'Add.\\n\\nYour code should pass a test such as: add(1, 2)'}]
    """
    for field, read in _FORMS.items():
        if row.get(field):
            try:
                return read(where, row, instruction)
            except (KeyError, TypeError, AttributeError, SyntaxError, json.JSONDecodeError) as error:
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
    given, entry = row["tests"], row.get("entry")
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: 'tests' must be a list of tests. Fix or remove the row.")
    if "call" in given[0]:
        tests: _Tests = [
            CallTest.of(test["call"], test["expected"], float(test.get("tolerance", 0.0))) for test in given
        ]
    else:
        tests = [StreamTest(str(test["input"]), str(test["output"])) for test in given]
    return _problem(
        where, row["prompt"], instruction, tests, row.get("preamble", ""), entry, row.get("solution")
    )


def _mbpp(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """``test_list``: assertions as text; the task in ``text`` or ``prompt``; imports in ``test_imports``."""
    source = "\n".join(row["test_list"])
    statements = ast.parse(source).body
    entry = _called(statements, where)
    setup = row.get("test_imports") or row.get("test_setup_code") or ""
    preamble = "\n".join(setup) if isinstance(setup, list) else setup
    tests = cases_from_assertions(statements, entry, where)
    prompt = f"{row.get('text') or row['prompt']}\n\nYour code should pass a test such as: {tests[0].call}"
    return _problem(where, prompt, instruction, tests, preamble, entry, row.get("code"))


def _human_eval(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """``test``: a function check(candidate); the stub in ``prompt``, the name in ``entry_point``."""
    entry = row["entry_point"]
    checks = [
        statement
        for statement in ast.parse(row["test"]).body
        if isinstance(statement, ast.FunctionDef) and statement.name == "check"
    ]
    if not checks:
        raise DataError(f"{where}: 'test' defines no function check. Fix or remove the row.")
    tests = cases_from_assertions(checks[0].body, checks[0].args.args[0].arg, where)
    stub = row["prompt"]
    prompt = f"Complete this function.\n\n```python\n{stub.rstrip()}\n```"
    solution = stub + row["canonical_solution"] if row.get("canonical_solution") else None
    # The stub is a whole function, its docstring being its body, so what it imports and defines is there.
    return _problem(where, prompt, instruction, tests, stub, entry, solution)


def _apps(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """``input_output``: JSON with inputs, outputs and optionally fn_name; the task in ``question``."""
    return _inputs_outputs(where, row.get("question") or row["prompt"], row["input_output"], instruction)


def _eurus(where: str, row: dict[str, Any], instruction: str) -> Problem:
    """``reward_model``: {"ground_truth": JSON with inputs and outputs}; the task in ``prompt``."""
    return _inputs_outputs(where, row["prompt"], row["reward_model"]["ground_truth"], instruction)


def _inputs_outputs(where: str, prompt: Prompt, given: Any, instruction: str) -> Problem:
    data = json.loads(given) if isinstance(given, str) else given
    inputs, outputs, entry = data["inputs"], data["outputs"], data.get("fn_name")
    if not inputs or len(inputs) != len(outputs):
        raise DataError(f"{where}: {len(inputs)} inputs and {len(outputs)} outputs. Fix or remove the row.")
    if entry is None:
        tests: _Tests = [
            StreamTest(_text(read), _text(written)) for read, written in zip(inputs, outputs, strict=True)
        ]
    else:
        tests = [
            CallTest.of(f"{entry}({', '.join(map(repr, arguments))})", value)
            for arguments, value in zip(inputs, outputs, strict=True)
        ]
    return _problem(where, prompt, instruction, tests, "", entry, None)


_FORMS: dict[str, Callable[[str, dict[str, Any], str], Problem]] = {
    "tests": _own,
    "test_list": _mbpp,
    "test": _human_eval,
    "input_output": _apps,
    "reward_model": _eurus,
}


def _problem(
    where: str,
    prompt: Prompt,
    instruction: str,
    tests: _Tests,
    preamble: str,
    entry: str | None,
    solution: str | None,
) -> Problem:
    if isinstance(prompt, str):
        text = f"{prompt.strip()}\n\n{instruction}" if instruction else prompt.strip()
        prompt = [{"role": "user", "content": text}]
    if not prompt or not all(isinstance(message.get("content"), str) for message in prompt):
        raise DataError(f"{where}: the prompt is neither text nor messages. Fix or remove the row.")
    metadata = {"solution": f"```python\n{solution.strip()}\n```"} if solution else {}
    return Problem(list(prompt), dump_tests(tests, preamble, entry), metadata)


def _called(statements: list[ast.stmt], where: str) -> str:
    """The function that every assertion calls and that Python does not have by itself."""
    import builtins

    shared: set[str] | None = None
    for statement in statements:
        if isinstance(statement, ast.Assert):
            names = {
                part.func.id
                for part in ast.walk(statement)
                if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
            } - set(dir(builtins))
            shared = names if shared is None else shared & names
    if not shared or len(shared) != 1:
        raise DataError(
            f"{where}: the assertions do not all call one function "
            f"({', '.join(sorted(shared or ())) or 'none'}). Fix or remove the row."
        )
    return shared.pop()


def _text(stream: Any) -> str:
    return "\n".join(map(str, stream)) if isinstance(stream, list) else str(stream)
