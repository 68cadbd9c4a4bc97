"""GSM8K: grade-school word problems with a number as answer; and what tasks with a boxed answer share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.errors import ConfigError, DataError
from tether.llm.tasks.data import (
    BadRows,
    DataTask,
    Located,
    as_messages,
    check_bad_rows,
    read_hub,
    read_jsonl,
)
from tether.llm.tasks.math_answers import MathVerifier
from tether.llm.tasks.protocol import Problem, Verdict

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
HUB_NAME = "openai/gsm8k"

_FIELDS = ("question", "answer")


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


class GSM8KTask(BoxedTask):
    r"""Give a model the word problems of GSM8K and check the number it puts in ``\boxed{}``.

    The data comes from the hub (``openai/gsm8k``) or from JSONL files whose rows have ``question`` and
    ``answer``, the answer ending in ``#### <number>``. A tenth of the training questions, chosen by a hash
    of their text, is the validation split; a question of the test split is never trained on.

    Args:
        path: None for the hub; a folder with ``train.jsonl`` and ``test.jsonl``; or one JSONL file,
            which is then divided into the three splits by a hash of each question.
        instruction: Appended to every question.
        require_boxed: Whether an answer counts in ``\boxed{}`` alone. False also accepts the last
            expression of a response without a box, which helps models too small to follow the instruction.
        seconds: Time limit of checking one answer; a check that takes longer counts as wrong.
        bad_rows: Whether a broken row is refused, or skipped with a warning that counts them.

    Raises:
        ConfigError: `instruction` is not text.
        DataError: (from `problems`) data that is missing, empty or malformed, naming file and line.

    Source: Cobbe et al. 2021, arXiv 2110.14168.

    >>> task = GSM8KTask()
    >>> task.verify(r"He pays \$2 + \$3, so \boxed{5}.", "5").correct
    True
    """

    name = stream = "gsm8k"

    def __init__(
        self,
        path: str | Path | None = None,
        instruction: str = INSTRUCTION,
        require_boxed: bool = True,
        seconds: float = 2.0,
        bad_rows: BadRows = "refuse",
    ) -> None:
        super().__init__(path, instruction, seconds, require_boxed, bad_rows)
        self.max_response_tokens = 512

    def _part(self, part: str) -> Located:
        if self.path is not None:
            return read_jsonl(self._file(part), _FIELDS, self.bad_rows, self._problem)
        return read_hub(HUB_NAME, part, _FIELDS, "main", self.bad_rows, self._problem)

    def _key(self, where: str, row: dict[str, Any]) -> str:
        return str(row["question"])

    def _problem(self, where: str, row: dict[str, Any]) -> Problem:
        solution, marker, answer = row["answer"].rpartition("####")
        answer = answer.strip().replace(",", "")
        if not marker or not _is_number(answer):
            raise DataError(
                f"{where}: the answer does not end in '#### <number>' but in {row['answer'][-40:]!r}. "
                "Fix or remove the row."
            )
        prompt = as_messages(row["question"].strip(), self.instruction)
        return Problem(prompt, answer, {"solution": solution.strip()})


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-").replace(".", "", 1)
    return digits.isascii() and digits.isdigit()
