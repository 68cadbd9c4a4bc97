"""Drawing distinct problems of one split from a task that generates them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from tether.errors import ConfigError, DataError
from tether.llm.tasks.protocol import Problem, Split, check_request, split_of

DEFAULT_SIZES: dict[Split, int] = {"train": 8192, "validation": 512, "test": 512}
"""How many problems a generated task gives when nobody says."""

MOST_EXAMPLES = 8
"""Problems that may be shown with their solutions before each one."""

_PATIENCE = 20_000

_Choice = TypeVar("_Choice")


class GeneratedTask:
    """Problems made by a generator; a subclass draws one, with the key that tells it from others."""

    name: str

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """Generate distinct problems of a split; the same arguments always give the same list.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            limit: How many at most; by default 8192 for training and 512 for each of the others.
            seed: Which ones, and their order.

        Raises:
            InvalidInputError: An unknown split, or `limit` below 1.
            DataError: The split holds no problem.
        """
        check_request(split, limit)
        return draw_distinct(self._draw, self.name, split, limit, seed, self._split_key)

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        raise NotImplementedError

    def _split_key(self, key: str) -> str:
        """What of a problem's key says which split it is in: problems that share it stay together."""
        return key


def draw_distinct(
    draw: Callable[[random.Random], tuple[str, Problem]],
    name: str,
    split: Split,
    limit: int | None,
    seed: int,
    split_key: Callable[[str], str] = str,
) -> list[Problem]:
    """Draw problems, each with its canonical key, until `limit` distinct ones of `split` are found.

    Of a smaller split that is all of it: those found before 20,000 draws in a row give no new one.

    `split_key` takes from a key what problems share that must be in the same split; by default all of it.

    Raises:
        DataError: The split holds no problem.

    >>> tiny = lambda rng: (key := str(rng.randint(0, 99)), Problem(key, key))
    >>> len(draw_distinct(tiny, "tiny", "test", 3, seed=0))
    3
    """
    wanted = DEFAULT_SIZES[split] if limit is None else limit
    rng = random.Random(f"{name}/{split}/{seed}")
    found: dict[str, Problem] = {}
    misses = 0
    while len(found) < wanted and misses <= _PATIENCE:
        key, problem = draw(rng)
        if key in found or split_of(split_key(key)) != split:
            misses += 1
        else:
            misses = 0
            found[key] = problem
    if not found:
        raise DataError(f"The {split} split of task {name!r} holds no problem. Make the problems larger.")
    return list(found.values())


def after_examples(
    problems: Iterable[Problem],
    name: str,
    draws: Iterable[Callable[[random.Random], tuple[str, Problem]]],
    split_key: Callable[[str], str] = str,
) -> list[Problem]:
    """Each problem after the same solved ones: a conversation that a pretrained model goes on with.

    Args:
        problems: what is asked.
        name: of the task; for the same one the examples are the same.
        draws: of each example. It is drawn until it is in the training split.
        split_key: as of `draw_distinct`.

    >>> def tiny(rng):
    ...     key = str(rng.randint(0, 99))
    ...     return key, Problem([{"role": "user", "content": key}], key, {"solution": f"It is {key}."})
    >>> [problem] = after_examples([tiny(random.Random(0))[1]], "tiny", [tiny])
    >>> [turn["role"] for turn in problem.prompt]
    ['user', 'assistant', 'user']
    """
    rng = random.Random(f"{name}/examples")
    turns: list[dict[str, str]] = []
    for draw in draws:
        key, example = draw(rng)
        while split_of(split_key(key)) != "train":
            key, example = draw(rng)
        assert not isinstance(example.prompt, str)
        turns += [*example.prompt, {"role": "assistant", "content": example.metadata["solution"]}]
    return [replace(problem, prompt=[*turns, *problem.prompt]) for problem in problems]


def spread(choices: Sequence[_Choice], count: int) -> list[_Choice]:
    """So many of them, as far apart as they stand.

    >>> spread("abcdef", 3)
    ['a', 'c', 'e']
    """
    return [choices[place * len(choices) // count] for place in range(count)]


def check_examples(examples: int, task: str) -> None:
    """Refuse a number of examples that no conversation should begin with.

    Raises:
        ConfigError: fewer than none, or more than 8.
    """
    if not 0 <= examples <= MOST_EXAMPLES:
        raise ConfigError(f"examples is {examples}; the {task} task takes 0 to {MOST_EXAMPLES}.")
