"""Sums and differences of two numbers, answered at once."""

from __future__ import annotations

import random
import re

from tether.errors import ConfigError
from tether.llm.tasks.generated import GeneratedTask
from tether.llm.tasks.protocol import Problem, Verdict

_ANSWER = re.compile(r"(-?\d{1,30})\s*", re.ASCII)


class ArithmeticTask(GeneratedTask):
    """Give a model problems such as ``374+258=`` and check that it says ``632`` and stops.

    Problems are generated, so there is no data to fetch. Both operands have exactly `digits` digits and a
    difference is never negative. The order of a sum's operands does not count when problems are split:
    374+258 and 258+374 fall in the same split.

    Args:
        digits: Digits of both operands.
        operations: Which of ``+`` and ``-`` occur.

    Raises:
        ConfigError: `digits` is not 1 to 9, or `operations` holds anything but ``+`` and ``-``.

    >>> task = ArithmeticTask()
    >>> problem = task.problems("train", limit=1)[0]
    >>> task.verify(problem.answer, problem.answer).correct
    True
    >>> task.verify("633", "632").reward
    0.0
    """

    name = "arithmetic"
    chat = False

    def __init__(self, digits: int = 3, operations: str = "+-") -> None:
        if not 1 <= digits <= 9:
            raise ConfigError(f"digits is {digits}; the arithmetic task takes 1 to 9.")
        if not operations or set(operations) - set("+-") or len(set(operations)) != len(operations):
            raise ConfigError(f"operations is {operations!r}; use '+', '-' or '+-'.")
        self.digits = digits
        self.operations = operations
        self.max_response_tokens = digits + 3

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        first, second = rng.randint(low, high), rng.randint(low, high)
        sign = rng.choice(self.operations)
        if sign == "+":
            key, value = f"{min(first, second)}+{max(first, second)}", first + second
        else:
            first, second = max(first, second), min(first, second)
            key, value = f"{first}-{second}", first - second
        return key, Problem(f"{first}{sign}{second}=", str(value), {"solution": str(value)})

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """Reward 1 if the response is the number and nothing else, 0 otherwise.

        Part ``"well_formed"`` is 1 when the response is one number, right or wrong.

        >>> ArithmeticTask().verify("632 or so", "632").parts
        {'well_formed': 0.0}
        """
        match = _ANSWER.fullmatch(response.lstrip())
        correct = match is not None and int(match.group(1)) == int(problem_answer)
        return Verdict(float(correct), correct, {"well_formed": float(match is not None)})
