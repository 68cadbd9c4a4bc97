"""GSM8K: grade-school word problems with a number as answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.errors import ConfigError, DataError
from tether.llm.tasks.hub import read_hub
from tether.llm.tasks.jsonl import BadRows, check_bad_rows, read_jsonl
from tether.llm.tasks.math_answers import MathVerifier
from tether.llm.tasks.protocol import Problem, Split, Verdict, check_request, split_of

HUB_NAME = "openai/gsm8k"
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

_FIELDS = ("question", "answer")
_Rows = list[tuple[str, dict[str, Any]]]


class GSM8KTask:
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

    name = "gsm8k"
    chat = True

    def __init__(
        self,
        path: str | Path | None = None,
        instruction: str = INSTRUCTION,
        require_boxed: bool = True,
        seconds: float = 2.0,
        bad_rows: BadRows = "refuse",
    ) -> None:
        if not isinstance(instruction, str):
            raise ConfigError(f"instruction is {instruction!r}; give text (empty for none).")
        self.path = None if path is None else Path(path)
        self.instruction = instruction
        self.require_boxed = require_boxed
        self.max_response_tokens = 512
        self.bad_rows = check_bad_rows(bad_rows)
        self._verifier = MathVerifier(seconds, require_boxed)

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """Read the problems of a split, shuffled by `seed`.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            limit: How many at most; None gives all.
            seed: Their order, and so which ones a limit keeps.

        Raises:
            InvalidInputError: An unknown split, or `limit` below 1.
            DataError: Data that is missing, empty or malformed, or a split without a problem.
            MissingDependencyError: `datasets`, which reads the hub, is not installed.
        """
        check_request(split, limit)
        rows = self._rows(split)
        if not rows:
            raise DataError(
                f"The {split} split of {self.path or HUB_NAME} has no problem. Give more rows, or a "
                "folder with "
                "train.jsonl and test.jsonl."
            )
        problems = [self._problem(where, row) for where, row in rows]
        random.Random(f"{self.name}/{split}/{seed}").shuffle(problems)
        return problems[:limit]

    def verify(self, response: str, problem_answer: str) -> Verdict:
        r"""Reward 1 if the answer in the response's last ``\boxed{}`` equals the reference, 0 otherwise.

        Only what follows the response's thinking counts, and a last box that is not closed is no answer.
        Equality is math-verify's: ``\frac{10}{2}``, ``5.0`` and ``\$5`` equal 5. Part ``"boxed"`` is 1 when
        the response ends in a complete box.
        """
        return self.verify_many([response], [problem_answer])[0]

    def verify_many(self, responses: Sequence[str], problem_answers: Sequence[str]) -> list[Verdict]:
        """The verdicts `verify` would give, in order, several checked at a time."""
        return [
            Verdict(float(correct), correct, {"boxed": float(boxed)})
            for correct, boxed in self._verifier.check_many(responses, problem_answers)
        ]

    def close(self) -> None:
        """Let go of the process that checks; a later check starts another."""
        self._verifier.close()

    def _rows(self, split: Split) -> _Rows:
        if self.path is not None and not self.path.is_dir():
            rows = read_jsonl(self.path, _FIELDS, self.bad_rows, self._problem)
            return [(where, row) for where, row in rows if split_of(row["question"]) == split]
        tested = self._source("test")
        if split == "test":
            return tested
        held_out = {row["question"] for _, row in tested}
        return [
            (where, row)
            for where, row in self._source("train")
            if row["question"] not in held_out and split_of(row["question"], test_percent=0) == split
        ]

    def _source(self, part: str) -> _Rows:
        if self.path is not None:
            return read_jsonl(self.path / f"{part}.jsonl", _FIELDS, self.bad_rows, self._problem)
        return read_hub(HUB_NAME, part, _FIELDS, "main", self.bad_rows, self._problem)

    def _problem(self, where: str, row: dict[str, Any]) -> Problem:
        solution, marker, answer = row["answer"].rpartition("####")
        answer = answer.strip().replace(",", "")
        if not marker or not _is_number(answer):
            raise DataError(
                f"{where}: the answer does not end in '#### <number>' but in {row['answer'][-40:]!r}. "
                "Fix or remove the row."
            )
        question = row["question"].strip()
        content = f"{question}\n\n{self.instruction}" if self.instruction else question
        return Problem([{"role": "user", "content": content}], answer, {"solution": solution.strip()})


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-").replace(".", "", 1)
    return digits.isascii() and digits.isdigit()
