"""Chained arithmetic: the answer follows written intermediate steps."""

from __future__ import annotations

import random
import re
from itertools import pairwise

from tether.errors import ConfigError
from tether.llm.tasks.generated import GeneratedTask
from tether.llm.tasks.protocol import Problem, Verdict

_FINAL = re.compile(r"#(-?\d{1,30})\s*\Z", re.ASCII)
_STEP = re.compile(r"(-?\d{1,30})([+-])(\d{1,30})=(-?\d{1,30})", re.ASCII)


class ChainedTask(GeneratedTask):
    """Give a model ``23+45-17+80:`` and check the number it ends on after working step by step.

    A full response reads ``23+45=68;68-17=51;51+80=131;#131``. Only the number after ``#`` is rewarded;
    how the steps hold together is reported beside it. Operands have two digits and no partial result is
    negative. Two chains of the same signed terms in another order count as the same problem when they are
    split.

    Args:
        terms: Numbers in a chain; a response writes `terms` - 1 steps.

    Raises:
        ConfigError: `terms` is not 3 to 8.

    >>> task = ChainedTask()
    >>> task.verify("23+45=68;68-17=51;51+80=131;#131", "131").parts
    {'well_formed_steps': 1.0, 'correct_steps': 1.0}
    """

    name = "chained"
    chat = False

    def __init__(self, terms: int = 4) -> None:
        if not 3 <= terms <= 8:
            raise ConfigError(f"terms is {terms}; the chained task takes 3 to 8 numbers.")
        self.terms = terms
        self.max_response_tokens = 11 * (terms - 1) + 8

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        total = rng.randint(10, 99)
        terms, prompt, steps = [total], str(total), []
        for _ in range(self.terms - 1):
            operand = rng.randint(10, 99)
            sign = rng.choice("+-") if operand <= total else "+"
            result = total + operand if sign == "+" else total - operand
            steps.append(f"{total}{sign}{operand}={result};")
            prompt += f"{sign}{operand}"
            terms.append(operand if sign == "+" else -operand)
            total = result
        key = " ".join(f"{term:+d}" for term in sorted(terms))
        return key, Problem(f"{prompt}:", str(total), {"solution": f"{''.join(steps)}#{total}"})

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """Reward 1 if the response ends in ``#`` and the right number, 0 otherwise.

        Parts, both fractions of the steps the problem needs: ``"well_formed_steps"`` (written as
        ``a+b=c`` and starting from the previous result) and ``"correct_steps"`` (well formed and the sum
        is right).

        >>> ChainedTask(terms=3).verify("23+45=68;68-17=52;#52", "51")
        Verdict(reward=0.0, correct=False, parts={'well_formed_steps': 1.0, 'correct_steps': 0.5})
        """
        body, _, _ = response.partition("#")
        final = _FINAL.search(response)
        correct = response.count("#") == 1 and final is not None and int(final[1]) == int(problem_answer)
        return Verdict(float(correct), correct, self._step_parts(body))

    def _step_parts(self, body: str) -> dict[str, float]:
        needed = self.terms - 1
        matches = [_STEP.fullmatch(text) for text in body.split(";")[:needed]]
        linked = [matches[0] is not None] + [
            after is not None and before is not None and after[1] == before[4]
            for before, after in pairwise(matches)
        ]
        right = [
            is_linked and match is not None and _apply(match) == int(match[4])
            for is_linked, match in zip(linked, matches, strict=True)
        ]
        return {"well_formed_steps": sum(linked) / needed, "correct_steps": sum(right) / needed}


def _apply(step: re.Match[str]) -> int:
    left, right = int(step[1]), int(step[3])
    return left + right if step[2] == "+" else left - right
