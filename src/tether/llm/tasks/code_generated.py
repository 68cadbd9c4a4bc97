"""Small programming problems made by a generator: a few steps on a list of integers, with tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tether.llm.tasks.code_cases import CallTest, UnitTests
from tether.llm.tasks.data import as_messages
from tether.llm.tasks.protocol import Problem

_TESTS = 8


class _Step(NamedTuple):
    """One step: what it says, and the line of Python that does it."""

    text: str
    line: str


def _keep(text: str, condition: str) -> _Step:
    return _Step(f"keep the numbers {text}", f"numbers = [n for n in numbers if {condition}]")


def _change(text: str, expression: str) -> _Step:
    return _Step(text, f"numbers = [{expression} for n in numbers]")


_STEPS: tuple[Callable[[int], _Step], ...] = (
    lambda k: _keep("that are even", "n % 2 == 0"),
    lambda k: _keep("that are odd", "n % 2 == 1"),
    lambda k: _keep(f"greater than {k}", f"n > {k}"),
    lambda k: _keep(f"less than {k + 5}", f"n < {k + 5}"),
    lambda k: _keep(f"that are not divisible by {k}", f"n % {k} != 0"),
    lambda k: _change(f"add {k} to every number", f"n + {k}"),
    lambda k: _change(f"subtract {k} from every number", f"n - {k}"),
    lambda k: _change(f"multiply every number by {k}", f"n * {k}"),
    lambda k: _change("square every number", "n * n"),
    lambda k: _change("replace every number by its absolute value", "abs(n)"),
    lambda k: _change(f"replace every number by its remainder after division by {k}", f"n % {k}"),
    lambda k: _Step("reverse the list", "numbers = numbers[::-1]"),
    lambda k: _Step("sort the list, smallest first", "numbers = sorted(numbers)"),
    lambda k: _Step("sort the list, largest first", "numbers = sorted(numbers, reverse=True)"),
    lambda k: _Step("remove every number that has occurred before", "numbers = list(dict.fromkeys(numbers))"),
    lambda k: _Step(f"keep only the first {k} numbers", f"numbers = numbers[:{k}]"),
    lambda k: _Step("keep every second number, starting with the first", "numbers = numbers[::2]"),
)

_ENDS = (
    _Step("return the list", "return numbers"),
    _Step("return the sum of the numbers (0 for none)", "return sum(numbers)"),
    _Step("return how many numbers there are", "return len(numbers)"),
    _Step("return the largest number (0 for none)", "return max(numbers, default=0)"),
    _Step("return the smallest number (0 for none)", "return min(numbers, default=0)"),
)


def draw_problem(rng: random.Random, steps: int, instruction: str) -> tuple[str, Problem]:
    """Draw a problem of `steps` steps before what it returns; give its text, which identifies it, too.

    Problems whose tests a do-nothing function would pass, or that give one value for all tests, are drawn
    again. Without an instruction, which asks for a code block, the solution is bare code.

    >>> draw_problem(random.Random(0), 1, "")[0].splitlines()[-1]
    '2. return the list'
    """
    while True:
        chosen = [rng.choice(_STEPS)(rng.randint(2, 9)) for _ in range(steps)]
        chosen.append(rng.choice(_ENDS))
        inputs = _inputs(rng)
        outputs = list(map(_function(chosen), inputs))
        idle = list(map(_function(chosen[-1:]), inputs))
        changed = sum(output != same for output, same in zip(outputs, idle, strict=True))
        if len({repr(output) for output in outputs}) >= _TESTS // 2 and changed >= _TESTS // 2:
            break
    listed = "\n".join(f"{number}. {step.text}" for number, step in enumerate(chosen, start=1))
    text = (
        "Write a Python function solve(numbers) that takes a list of integers and does the following, in "
        f"this order:\n{listed}"
    )
    tests = [
        CallTest.of(f"solve({numbers})", output) for numbers, output in zip(inputs, outputs, strict=True)
    ]
    return text, Problem(
        as_messages(text, instruction),
        UnitTests(tests, entry="solve").dump(),
        {"solution": f"```python\n{_source(chosen)}\n```" if instruction else _source(chosen)},
    )


def _inputs(rng: random.Random) -> list[list[int]]:
    drawn = [[rng.randint(-9, 20) for _ in range(rng.randint(4, 9))] for _ in range(_TESTS - 2)]
    return [[], [rng.randint(-9, 20)], *drawn]


def _source(steps: list[_Step]) -> str:
    return "\n".join(["def solve(numbers):", *(f"    {step.line}" for step in steps)])


def _function(steps: list[_Step]) -> Callable[[list[int]], Any]:
    names: dict[str, Any] = {}
    exec(_source(steps), names)  # lines of this file
    solve: Callable[[list[int]], Any] = names["solve"]
    return solve
