"""Sums and differences of two numbers, answered at once."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from tether.errors import ConfigError
from tether.llm.tasks.generated import draw_distinct
from tether.llm.tasks.protocol import Problem, Split, Verdict, check_request

_ANSWER = re.compile(r"(-?\d{1,30})\s*", re.ASCII)


class ArithmeticTask:
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

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """Generate distinct problems of a split; the same arguments always give the same list.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            limit: How many; by default 8192 for training and 512 for each of the others.
            seed: Which ones, and their order.

        Raises:
            InvalidInputError: An unknown split, or `limit` below 1.
            DataError: The split holds fewer problems than asked for.

        >>> [problem.prompt for problem in ArithmeticTask(digits=1).problems("train", limit=2)]
        ['9-4=', '7-5=']
        """
        check_request(split, limit)
        return draw_distinct(self._draw, self.name, split, limit, seed)

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
