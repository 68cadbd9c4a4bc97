"""Scores answers for `tether.llm.tasks.reasoning_gym`, inside the judge's process; needs reasoning-gym alone.

Everything a model wrote is read here and in linear time until a scorer of reasoning-gym gets it; what that
does with it is bounded by the judge.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Callable
from typing import Any

# Calls that run text as Python. Several scorers of reasoning-gym apply them to the answer itself; four
# data sets run a text of their own alone.
_EVALUATES = re.compile(
    r"(?<![\w.])(?:eval|exec)\(|\bsympify\(|\bimport parse_expr\b|\b(?:sp|sympy)\.parse_expr\("
)
_RUN_THEIR_OWN = frozenset(["basic_arithmetic", "bitwise_arithmetic", "codeio", "number_sorting"])
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FUNCTIONS = frozenset(
    [
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "pi", "Abs"),
    ]
)
_SYMBOLS = frozenset("0123456789.+-*/^()[], \t\r\n")
_BARE_POINT = re.compile(r"\.(?![0-9])")

_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_NOT_A_NUMBER = re.compile(r"(?<![a-z])nan[ij]?(?![a-z])", re.IGNORECASE)
_NEARNESS = 0.01  # answers are asked for with three significant digits at least


def scorer(dataset: str, options: str) -> Callable[[str, str], float | None]:
    """The function that scores answers to a data set's problems.

    It takes a problem and an answer, both as text, and gives reasoning-gym's score, 0 for an answer that
    `contradicts` the reference, or None for one that is not harmless to a scorer that runs it. Scores
    outside [0, 1] count as 0: NaN, and shares of a wrong answer whose sum rounding took above 1.
    """
    import reasoning_gym

    generator = reasoning_gym.create_dataset(dataset, seed=0, size=1, **ast.literal_eval(options))
    evaluates = may_run(dataset, type(generator).__module__)

    def score(problem: str, answer: str) -> float | None:
        entry = ast.literal_eval(problem)
        if evaluates and not is_harmless(answer):
            return None
        if entry["answer"] is not None and contradicts(answer, str(entry["answer"])):
            return 0.0
        found = float(generator.score_answer(answer, entry))
        return found if 0.0 <= found <= 1.0 else 0.0

    return score


def may_run(dataset: str, module: str) -> bool:
    """Whether a data set's scorer may run an answer as Python: its module runs text, and not only its own.

    >>> import reasoning_gym.games.countdown
    >>> may_run("countdown", "reasoning_gym.games.countdown")
    True
    """
    return dataset not in _RUN_THEIR_OWN and bool(_EVALUATES.search(inspect.getsource(sys.modules[module])))


def is_harmless(answer: str) -> bool:
    """Whether running an answer as Python could do no more than compute: words alone, or a formula.

    A formula has numbers, single letters, known functions, operators, brackets and commas; no text in
    quotes, no attribute, no other name. What it costs to compute is not looked at.

    >>> is_harmless("[[1, 0], [0, 1]]"), is_harmless("(25 - 3) * x**2 + sin(x)"), is_harmless("Q _ _")
    (True, True, True)
    >>> is_harmless("__import__('os').system('id')"), is_harmless("x.real"), is_harmless("'x'")
    (False, False, False)
    """
    others = set(_NAME.sub(" ", answer))
    if others <= set(" \t\r\n0123456789"):
        return True  # names side by side: at most they are looked up
    known = all(len(name) == 1 or name in _FUNCTIONS for name in _NAME.findall(answer))
    return known and others <= _SYMBOLS and not _BARE_POINT.search(answer)


def contradicts(answer: str, reference: str) -> bool:
    """Whether an answer cannot be right, whatever a scorer says.

    Where the reference is True or False, the answer must be the same word; where it is a number, a number
    that differs by 1 % at most. Where the reference has digits, no part of the answer may be NaN. Digits
    other than 0 to 9 are taken from nobody.

    >>> contradicts("-12", "12"), contradicts("7/64", "0.109375"), contradicts("1,200.0", "1200")
    (True, False, False)
    >>> contradicts("nan", "4 - 7i"), contradicts("False", "True"), contradicts("red", "blue")
    (True, True, False)
    """
    if _has_foreign_digits(answer) and not _has_foreign_digits(reference):
        return True
    if reference.strip() in ("True", "False"):
        return answer.strip().casefold() != reference.strip().casefold()
    wanted = _number(reference)
    if wanted is None:
        return any(map(str.isdecimal, reference)) and bool(_NOT_A_NUMBER.search(answer))
    given = _number(answer)
    return given is None or not abs(given - wanted) <= _NEARNESS * abs(wanted)


def _has_foreign_digits(text: str) -> bool:
    return any(character.isdecimal() and not character.isascii() for character in text)


def _number(text: str) -> float | None:
    """What a number or a fraction of two is worth; None for anything else and for what no float holds."""
    numerator, slash, denominator = _THOUSANDS.sub("", text).partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        return None
    return value if math.isfinite(value) else None


def as_text(value: Any) -> str:
    """A problem as Python writes it, to be read with `ast.literal_eval`.

    NumPy's values become Python's. What has no such form, a `Fraction` among what a question was made from,
    becomes text: a scorer that needs one of those would fail with its own answer.

    >>> as_text({"answer": "3", "metadata": {"cells": (1, 2)}})
    "{'answer': '3', 'metadata': {'cells': (1, 2)}}"
    """
    return repr(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_plain, value))
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _plain(value.tolist())
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    return str(value)
