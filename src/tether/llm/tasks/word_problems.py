"""Short stories with numbers and one question, of one calculation or two."""

from __future__ import annotations

import functools
import operator
import random
import re
from collections.abc import Sequence

from tether.errors import ConfigError
from tether.llm.tasks.custom import last_number, number
from tether.llm.tasks.data import as_messages
from tether.llm.tasks.generated import GeneratedTask, after_examples, check_examples, spread
from tether.llm.tasks.protocol import Problem, Split, Verdict

INSTRUCTION = "Answer in one short sentence."

_NAMES = ("Ana", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ivy", "Jonas", "Kim", "Leo")
_THINGS = (
    "apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stamps",
    "stones", "tickets",
)  # fmt: skip
_BOXES = ("bags", "baskets", "boxes", "jars")
_LARGEST_FACTOR = 12
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}

# By the steps to take: stories, each with the calculation on its numbers a, b and c.
_STORIES: dict[int, tuple[tuple[str, str], ...]] = {
    1: (
        ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "a + b"),
        ("{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} is that?", "a + b"),
        ("There are {a} {things} on a table and {b} on a chair. How many {things} are there?", "a + b"),
        ("{name} had {a} {things} and gave away {b} of them. How many {things} are left?", "a - b"),
        ("A shop had {a} {things} and sold {b}. How many {things} does the shop still have?", "a - b"),
        ("{name} has {a} {things}, a friend has {b}. How many more {things} does {name} have?", "a - b"),
        ("{name} fills {a} {boxes} with {b} {things} each. How many {things} is that?", "a * b"),
        ("{name} pays {a} dollars for each of {b} {things}. How many dollars is that?", "a * b"),
        ("{name} shares {a} {things} among {b} children. How many does each child get?", "a // b"),
        ("{name} puts {a} {things} into {b} {boxes}, as many in each. How many does each hold?", "a // b"),
    ),
    2: (
        ("{name} has {a} {things}, buys {b} and gives away {c}. How many {things} are left?", "a + b - c"),
        ("{name} had {a} {things}, lost {b} and found {c}. How many {things} is that now?", "a - b + c"),
        ("{a} {things} lie here, {b} there and {c} in a box. How many {things} is that?", "a + b + c"),
        (
            "{name} fills {a} {boxes} with {b} {things} each and has {c} left. How many {things} is that?",
            "a * b + c",
        ),
        ("{name} fills {a} {boxes} with {b} {things} each and sells {c}. How many are left?", "a * b - c"),
    ),
}


class WordProblemsTask(GeneratedTask):
    """Tell a model a short story with numbers and check the last number of what it answers.

    Problems are generated, so there is no data to fetch. Two stories with the same calculation on the same
    numbers, in another order or about other things, are in the same split: no calculation of the test
    problems occurs in training.

    Args:
        steps: 1 or 2 calculations.
        largest: The largest number of a sum or difference, which is never negative. The second factor of a
            product goes to 12; what is divided is such a product.
        operations: Which of ``+``, ``-``, ``*`` and ``/`` occur; products and quotients are the harder ones.
        instruction: Appended to every story.
        examples: Stories told and answered before each problem, as turns of its conversation, up to 8: what a
            pretrained model needs that was taught no conversation. The same ones always, of the training
            split, answered with their calculation.

    Raises:
        ConfigError: `steps` is not 1 or 2, `largest` is not 10 to 1000, `examples` is not 0 to 8, or there is
            no story with the `operations`.

    >>> task = WordProblemsTask()
    >>> task.verify("Ana has 12 + 30 = 42 apples now.", "42")
    Verdict(reward=1.0, correct=True, parts={'number': 1.0})
    """

    name = "word_problems"
    chat = True
    max_response_tokens = 40

    def __init__(
        self,
        steps: int = 1,
        largest: int = 30,
        operations: str = "+-",
        instruction: str = INSTRUCTION,
        examples: int = 0,
    ) -> None:
        if steps not in _STORIES:
            raise ConfigError(f"steps is {steps}; the word_problems task takes 1 or 2.")
        if not 10 <= largest <= 1000:
            raise ConfigError(f"largest is {largest}; the word_problems task takes 10 to 1000.")
        if not operations or set(operations) - set("+-*/") or len(set(operations)) < len(operations):
            raise ConfigError(f"operations is {operations!r}; take each at most once from '+-*/'.")
        check_examples(examples, self.name)
        self.steps, self.largest, self.instruction, self.examples = steps, largest, instruction, examples
        self._stories = [
            (story, calculation)
            for story, calculation in _STORIES[steps]
            if set(calculation) & set("+-*/") <= set(operations)
        ]
        if not self._stories:
            raise ConfigError(
                f"No story of steps={steps} has the operations {operations!r} alone. Add '+' or '-'."
            )

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """As any generated task's, each with the examples before it."""
        draws = [functools.partial(self._tell, *story) for story in spread(self._stories, self.examples)]
        return after_examples(super().problems(split, limit, seed), self.name, draws, self._split_key)

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """Reward 1 if the last number of the response is the answer, 0 otherwise.

        Part ``"number"`` is 1 when there is a number at all, right or wrong.

        >>> WordProblemsTask().verify("I do not know.", "42").parts
        {'number': 0.0}
        """
        correct = number(response, problem_answer)
        return Verdict(float(correct), correct, {"number": float(last_number(response) is not None)})

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        return self._tell(*rng.choice(self._stories), rng)

    def _tell(self, story: str, calculation: str, rng: random.Random) -> tuple[str, Problem]:
        """A problem and its key."""
        numbers = dict.fromkeys("abc", 0)
        while True:
            for name in numbers:
                numbers[name] = rng.randint(2, self.largest)
            if "*" in calculation or "//" in calculation:
                numbers["b"] = rng.randint(2, _LARGEST_FACTOR)
            if "//" in calculation:
                numbers["a"] *= numbers["b"]
            written = re.sub("[abc]", lambda found: str(numbers[found[0]]), calculation)
            value = _value(written)
            if value > 0 and (not calculation.startswith("a - b") or numbers["a"] > numbers["b"]):
                break
        text = story.format(
            **numbers, name=rng.choice(_NAMES), things=rng.choice(_THINGS), boxes=rng.choice(_BOXES)
        )
        return f"{_canonical(written)}: {text}", Problem(
            as_messages(text, self.instruction), str(value),
            {"solution": f"{written.replace('//', '/')} = {value}"},
        )  # fmt: skip

    def _split_key(self, key: str) -> str:
        """The calculation alone."""
        return key.partition(":")[0]


def _value(written: str) -> int:
    """What a calculation gives, from left to right; a product or quotient is its first.

    >>> _value("12 * 3 - 6"), _value("36 // 12")
    (30, 3)
    """
    first, *rest = written.split()
    value = int(first)
    for sign, operand in zip(rest[::2], rest[1::2], strict=True):
        value = _OPERATIONS[sign](value, int(operand))
    return value


def _canonical(written: str) -> str:
    """A calculation in the order of its numbers, where their order does not matter.

    >>> _canonical("7 + 12 - 5"), _canonical("12 * 7 + 5"), _canonical("12 // 6")
    ('+12 +7 -5', '12 * 7 + 5', '12 // 6')
    """
    if "//" in written:
        return written
    if "*" in written:
        first, _, second, *rest = written.split()
        return " ".join((min(first, second), "*", max(first, second), *rest))
    return " ".join(sorted(("+" + written).replace(" ", "").replace("+", " +").replace("-", " -").split()))
