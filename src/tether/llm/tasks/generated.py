"""Drawing distinct problems of one split from a task that generates them."""

from __future__ import annotations

import random
from collections.abc import Callable

from tether.errors import DataError
from tether.llm.tasks.protocol import Problem, Split, split_of

DEFAULT_SIZES: dict[Split, int] = {"train": 8192, "validation": 512, "test": 512}
"""How many problems a generated task gives when nobody says."""

_PATIENCE = 20_000


def draw_distinct(
    draw: Callable[[random.Random], tuple[str, Problem]],
    name: str,
    split: Split,
    limit: int | None,
    seed: int,
) -> list[Problem]:
    """Draw problems until `limit` distinct ones of `split` are found.

    Args:
        draw: Gives a problem's canonical key and the problem, from a random generator.
        name: The task's name, for the random stream and for errors.
        split: The split to keep.
        limit: How many problems; None takes `DEFAULT_SIZES`.
        seed: Seed of the random stream.

    Raises:
        DataError: No new problem turned up in 20,000 draws: the split is smaller than `limit`.

    >>> tiny = lambda rng: (key := str(rng.randint(0, 99)), Problem(key, key))
    >>> len(draw_distinct(tiny, "tiny", "test", 3, seed=0))
    3
    """
    wanted = DEFAULT_SIZES[split] if limit is None else limit
    rng = random.Random(f"{name}/{split}/{seed}")
    found: dict[str, Problem] = {}
    misses = 0
    while len(found) < wanted:
        key, problem = draw(rng)
        if key in found or split_of(key) != split:
            misses += 1
            if misses > _PATIENCE:
                raise DataError(
                    f"The {split} split of task {name!r} holds about {len(found)} distinct problems, but "
                    f"{wanted} were asked for. Lower the limit or make the problems larger."
                )
            continue
        misses = 0
        found[key] = problem
    return list(found.values())
