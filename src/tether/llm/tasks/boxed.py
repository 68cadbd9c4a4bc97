"""What tasks with a mathematical answer in a box share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.llm.tasks.data import BadRows, DataTask, check_bad_rows
from tether.llm.tasks.math_answers import MathVerifier
from tether.llm.tasks.protocol import Verdict

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


class BoxedTask(DataTask[dict[str, Any]]):
    r"""Problems whose answer is what a response's last ``\boxed{}`` holds, compared by math-verify."""

    chat = True
    box_reward = 0.0

    def __init__(
        self,
        path: str | Path | None,
        instruction: str,
        seconds: float,
        require_boxed: bool,
        bad_rows: BadRows,
    ) -> None:
        if not isinstance(instruction, str):
            raise ConfigError(f"instruction is {instruction!r}; give text (empty for none).")
        self.path = None if path is None else Path(path)
        self.instruction = instruction
        self.bad_rows = check_bad_rows(bad_rows)
        self._verifier = MathVerifier(seconds, require_boxed)

    def verify_many(self, responses: Sequence[str], problem_answers: Sequence[str]) -> list[Verdict]:
        r"""Reward 1 if the answer in a response's last ``\boxed{}`` equals the reference, 0 otherwise.

        Only what follows the response's thinking counts, and a last box that is not closed is no answer.
        Equality is math-verify's: fractions and decimals, sets, intervals, matrices and equations are
        compared by meaning. Parts: ``"boxed"`` is 1 when the response ends in a complete box, ``"correct"``
        when its answer is right.
        """
        return [
            Verdict(
                float(correct) + self.box_reward * boxed,
                correct,
                {"correct": float(correct), "boxed": float(boxed)},
            )
            for correct, boxed in self._verifier.check_many(responses, problem_answers)
        ]

    def close(self) -> None:
        """Let go of the process that checks; a later check starts another."""
        self._verifier.close()
