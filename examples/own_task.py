"""A verifiable task of your own, trained and measured without a change to Tether.

    PYTHONPATH=examples tether llm train --task own_task:Totals --task-options terms 3
    PYTHONPATH=examples tether llm eval --task own_task:Totals

A task gives problems and checks responses; its keywords are its options on the command line, in YAML and in
Python. Run as a script, this file trains on it for a few steps.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tether.errors import ConfigError
from tether.llm.tasks import Problem, Split, Verdict
from tether.llm.tasks.generated import draw_distinct


class Totals:
    """Problems such as ``23+45+17=``, answered by the total; each right digit is rewarded."""

    name = "totals"
    chat = False
    max_response_tokens = 6

    def __init__(self, terms: int = 3) -> None:
        if not 2 <= terms <= 9:
            raise ConfigError(f"terms is {terms}; this task takes 2 to 9.")
        self.terms = terms

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """Problems of one split; which one a problem belongs to follows from its numbers."""
        return draw_distinct(self._draw, self.name, split, limit, seed)

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        numbers = [rng.randint(10, 99) for _ in range(self.terms)]
        return str(sorted(numbers)), Problem(f"{'+'.join(map(str, numbers))}=", str(sum(numbers)))

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """The share of right digits if the response has as many as the answer."""
        given = response.strip()
        if len(given) != len(problem_answer):
            return Verdict(0.0, False)
        right = sum(digit == wanted for digit, wanted in zip(given, problem_answer, strict=True))
        return Verdict(right / len(problem_answer), given == problem_answer)


def main(output: Path) -> None:
    """Train the embedded model on it for two batches."""
    from tether.llm.config import TrainConfig
    from tether.llm.train import train

    train(
        TrainConfig(
            output=output, task="own_task:Totals", steps=8, updates_per_rollout=4, prompts_per_rollout=8,
            eval_problems=20, eval_every=8, save_every=8, preflight="off",
        )
    )  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "run")
