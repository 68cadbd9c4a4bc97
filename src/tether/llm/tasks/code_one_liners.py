"""Very small programming problems made by a generator: a function that one line of Python is enough for."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from tether.llm.tasks.code_cases import CallTest, UnitTests
from tether.llm.tasks.data import as_messages
from tether.llm.tasks.protocol import Problem

_TESTS = 8
_LETTERS = "abcdefghiklmnoprstuw"

# By the function's parameters: what it returns, in words and in Python; k, m are numbers, x, y letters.
_FUNCTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "n": (
        ("n times {k} plus {m}", "n * {k} + {m}"),
        ("n times {k} minus {m}", "n * {k} - {m}"),
        ("the sum of n and {k}, times {m}", "(n + {k}) * {m}"),
        ("the square of n plus {k}", "n * n + {k}"),
        ("the square of n minus {k} times n", "n * n - {k} * n"),
        ("the remainder of n divided by {k}, plus {m}", "n % {k} + {m}"),
        ("n divided by {k}, rounded down, plus {m}", "n // {k} + {m}"),
        ("True if n is divisible by {k} and greater than {m}", "n % {k} == 0 and n > {m}"),
        ("True if n is at least {k} and less than {k} plus {m}", "{k} <= n < {k} + {m}"),
        ("the larger of n and {k}, plus {m}", "max(n, {k}) + {m}"),
        ("the smaller of n and {k}, times {m}", "min(n, {k}) * {m}"),
        ("the distance between n and {k}, plus {m}", "abs(n - {k}) + {m}"),
        ("{k} if n is even and {m} if n is odd", "{k} if n % 2 == 0 else {m}"),
    ),
    "a, b": (
        ("{k} times a plus {m} times b", "{k} * a + {m} * b"),
        ("{k} times a minus b", "{k} * a - b"),
        ("the product of a and b, plus {k}", "a * b + {k}"),
        ("the sum of a and b, times {k}", "(a + b) * {k}"),
        ("the larger of a and b, minus {k}", "max(a, b) - {k}"),
        ("the smaller of a plus {k} and b", "min(a + {k}, b)"),
        ("True if the sum of a and b is greater than {k}", "a + b > {k}"),
    ),
    "numbers": (
        ("the sum of the numbers in the list, plus {k}", "sum(numbers) + {k}"),
        ("the largest number in the list, times {k}", "max(numbers) * {k}"),
        ("the smallest number in the list, minus {k}", "min(numbers) - {k}"),
        ("a list with {k} added to every number", "[n + {k} for n in numbers]"),
        ("a list with every number times {k}", "[n * {k} for n in numbers]"),
        ("how many numbers in the list are greater than {k}", "sum(n > {k} for n in numbers)"),
        ("the list of the numbers that are less than {k}", "[n for n in numbers if n < {k}]"),
    ),
    "text": (
        ("how often the letter {x} occurs in text", "text.count({x})"),
        ("text with every {x} replaced by {y}", "text.replace({x}, {y})"),
        ("text without the letter {x}", "text.replace({x}, '')"),
        ("True if text starts with {x} or ends with {y}", "text.startswith({x}) or text.endswith({y})"),
        ("text in upper case, followed by {x}", "text.upper() + {x}"),
        ("{x} followed by text backwards", "{x} + text[::-1]"),
        ("the first {k} characters of text", "text[:{k}]"),
        ("the length of text times {k}", "len(text) * {k}"),
    ),
}  # fmt: skip

_KINDS = {"n": "an integer", "a, b": "two integers", "numbers": "a list of integers", "text": "a string"}


Function = tuple[str, str, str]
"""Its parameters, and what it returns in words and in Python."""
FUNCTIONS: list[Function] = [
    (given, *function) for given, functions in _FUNCTIONS.items() for function in functions
]


def draw_one_liner(
    rng: random.Random, instruction: str, function: Function | None = None
) -> tuple[str, Problem]:
    """Draw a problem, of a function if one is given; give its text, which identifies it, too.

    Of a function that gives one value for all tests another one is drawn. Without an instruction, which asks
    for a code block, the solution is its one line.

    >>> draw_one_liner(random.Random(1), "")[0].partition(" and ")[2]
    'returns True if n is at least 20 and less than 20 plus 29.'
    """
    while True:
        parameters, words, python = function or rng.choice(FUNCTIONS)
        numbers, letters = rng.sample(range(2, 31), 2), rng.sample(_LETTERS, 2)
        call = _function(parameters, python)(*numbers, *letters)
        inputs = [_inputs(parameters, rng) for _ in range(_TESTS)]
        outputs = [call(*given) for given in inputs]
        if any(output != outputs[0] for output in outputs):
            break
    # Drawn by no random number, so that the problems of a seed do not hang on them.
    edges = _edges(parameters, numbers, letters)
    inputs, outputs = inputs + edges, outputs + [call(*given) for given in edges]
    constants = dict(zip("kmxy", map(repr, (*numbers, *letters)), strict=True))
    text = (
        f"Write a Python function solve({parameters}) that takes {_KINDS[parameters]} and returns "
        f"{words.format(**constants)}."
    )
    tests = [
        CallTest.of(f"solve({', '.join(map(repr, given))})", output)
        for given, output in zip(inputs, outputs, strict=True)
    ]
    head, line = f"def solve({parameters}):", f"return {python.format(**constants)}"
    solution = f"```python\n{head}\n    {line}\n```" if instruction else f"{head} {line}"
    return text, Problem(
        as_messages(text, instruction), UnitTests(tests, entry="solve").dump(), {"solution": solution}
    )


def _inputs(parameters: str, rng: random.Random) -> list[Any]:
    if parameters == "text":
        return ["".join(rng.choices(_LETTERS, k=rng.randint(4, 14)))]
    if parameters == "numbers":
        return [[rng.randint(-20, 60) for _ in range(rng.randint(2, 8))]]
    return [rng.randint(-20, 60) for _ in parameters.split(",")]


def _edges(parameters: str, numbers: list[int], letters: list[str]) -> list[Any]:
    """Inputs that tell a function from what is nearly it: on its bounds, or texts of all letters, longer than
    any number of characters asked for, that begin and end with one of the letters asked for."""
    k, m = numbers
    edges: dict[str, list[Any]] = {
        "n": [[0], [k], [m], [k + m]],
        "a, b": [[k, 0], [0, k]],
        "numbers": [[[k, m, k + m]]],
        "text": [[letter + 2 * _LETTERS + letter] for letter in letters],
    }
    return edges[parameters]


@functools.cache
def _function(parameters: str, python: str) -> Callable[..., Callable[..., Any]]:
    """From the constants to the function; `python` is a line of this file."""
    body = python.format(k="k", m="m", x="x", y="y")
    names: dict[str, Any] = {}
    exec(f"def function(k, m, x, y): return lambda {parameters}: {body}", names)
    function: Callable[..., Callable[..., Any]] = names["function"]
    return function
