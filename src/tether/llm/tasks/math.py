"""MATH: competition problems with an expression as answer; MATH-500, AMC and AIME to be measured by."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from tether.errors import ConfigError, DataError
from tether.llm.tasks.gsm8k import INSTRUCTION
from tether.llm.tasks.hub import read_hub
from tether.llm.tasks.jsonl import BadRows, check_bad_rows, read_jsonl
from tether.llm.tasks.math_answers import MathVerifier, last_boxed
from tether.llm.tasks.protocol import Problem, Split, Verdict, check_request, split_of

Benchmark = Literal["math500", "amc", "aime"]
"""What the test split is: 500 problems of MATH, AMC 12 of 2022 and 2023, or AIME 2024."""

TRAIN_HUB = ("DigitalLearningGmbH/MATH-lighteval", "train")
"""Where the training problems are on the hub: name and split."""
BENCHMARK_HUB: dict[Benchmark, tuple[str, str]] = {
    "math500": ("HuggingFaceH4/MATH-500", "test"),
    "amc": ("AI-MO/aimo-validation-amc", "train"),
    "aime": ("HuggingFaceH4/aime_2024", "train"),
}
"""Where each benchmark is on the hub: name and split."""
FILES: dict[str, str] = {
    "train": "train.jsonl",
    "math500": "test.jsonl",
    "amc": "amc_test.jsonl",
    "aime": "aime_test.jsonl",
}
"""What the files of a data folder are called."""

_Rows = list[tuple[str, dict[str, Any]]]


class MathTask:
    r"""Give a model competition problems and check the expression it puts in ``\boxed{}``.

    Training problems are MATH's; the test split is the benchmark of choice. A tenth of the training
    problems, chosen by a hash of their text, is the validation split, and a problem of the benchmark is
    never trained on. Rows have ``problem`` and ``answer`` (LaTeX, or a number), or ``problem`` and a
    ``solution`` that ends in a box.

    Args:
        path: None for the hub; a folder with the files of `FILES`; or one JSONL file, which is then
            divided into the three splits by a hash of each problem.
        benchmark: What the test split holds.
        instruction: Appended to every problem.
        require_boxed: Whether an answer counts in ``\boxed{}`` alone. False also accepts a bare
            expression, or the last expression of a text.
        box_reward: Added to the reward of a response with a complete box, right or wrong; 0 for none.
        seconds: Time limit of checking one answer; a check that takes longer counts as wrong.
        bad_rows: Whether a broken row is refused, or skipped with a warning that counts them.

    Raises:
        ConfigError: An unknown benchmark, or `box_reward` outside [0, 1).
        DataError: (from `problems`) data that is missing, empty or malformed, naming file and line.

    Source: Hendrycks et al. 2021, arXiv 2103.03874; MATH-500: Lightman et al. 2023, arXiv 2305.20050.

    >>> MathTask().verify(r"so \boxed{\frac{2}{4}}", r"\frac12").correct
    True
    """

    name = "math"
    chat = True

    def __init__(
        self,
        path: str | Path | None = None,
        benchmark: Benchmark = "math500",
        instruction: str = INSTRUCTION,
        require_boxed: bool = True,
        box_reward: float = 0.0,
        seconds: float = 2.0,
        bad_rows: BadRows = "refuse",
    ) -> None:
        if benchmark not in get_args(Benchmark):
            raise ConfigError(
                f"Unknown benchmark {benchmark!r}. Use one of: {', '.join(get_args(Benchmark))}."
            )
        if not 0 <= box_reward < 1:
            raise ConfigError(
                f"box_reward is {box_reward}; give at least 0 and less than 1, an answer's reward."
            )
        self.name = "math" if benchmark == "math500" else benchmark
        self.path = None if path is None else Path(path)
        self.benchmark = benchmark
        self.instruction = instruction
        self.require_boxed = require_boxed
        self.box_reward = box_reward
        self.max_response_tokens = 1024
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
        problems = [self._problem(where, row) for where, row in self._rows(split)]
        if not problems:
            raise DataError(
                f"The {split} split of {self.path or 'MATH'} has no problem. Give more rows, or a folder "
                f"with {' and '.join(FILES.values())}."
            )
        random.Random(f"math/{split}/{seed}").shuffle(problems)
        return problems[:limit]

    def verify(self, response: str, problem_answer: str) -> Verdict:
        r"""Reward 1 if the answer in the response's last ``\boxed{}`` equals the reference, 0 otherwise.

        Only what follows the response's thinking counts, and a last box that is not closed is no answer.
        Equality is math-verify's: fractions and decimals, sets, intervals, matrices and equations are
        compared by meaning. Part ``"boxed"`` is 1 when the response ends in a complete box.
        """
        return self.verify_many([response], [problem_answer])[0]

    def verify_many(self, responses: Sequence[str], problem_answers: Sequence[str]) -> list[Verdict]:
        """The verdicts `verify` would give, in order, several checked at a time."""
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

    def _rows(self, split: Split) -> _Rows:
        if self.path is not None and not self.path.is_dir():
            rows = read_jsonl(self.path, ("problem",), self.bad_rows, self._problem)
            return [(where, row) for where, row in rows if split_of(_key(row)) == split]
        tested = self._source(self.benchmark)
        if split == "test":
            return tested
        held_out = {_key(row) for _, row in tested}
        return [
            (where, row)
            for where, row in self._source("train")
            if _key(row) not in held_out and split_of(_key(row), test_percent=0) == split
        ]

    def _source(self, part: Benchmark | Literal["train"]) -> _Rows:
        if self.path is not None:
            return read_jsonl(self.path / FILES[part], ("problem",), self.bad_rows, self._problem)
        name, split = TRAIN_HUB if part == "train" else BENCHMARK_HUB[part]
        return read_hub(name, split, ("problem",), None, self.bad_rows, self._problem)

    def _problem(self, where: str, row: dict[str, Any]) -> Problem:
        question = row["problem"].strip()
        content = f"{question}\n\n{self.instruction}" if self.instruction else question
        metadata = {name: row[name] for name in ("solution", "level", "subject", "type") if row.get(name)}
        return Problem([{"role": "user", "content": content}], _answer(where, row), metadata)


def _key(row: dict[str, Any]) -> str:
    """A problem's identity: its text without differences in white space."""
    return " ".join(row["problem"].split())


def _answer(where: str, row: dict[str, Any]) -> str:
    """The reference of a row: text, a number (142.0 is 142), or the last box of its solution.

    >>> _answer("rows.jsonl:1", {"answer": 142.0})
    '142'
    """
    answer = row.get("answer")
    if answer is None and isinstance(row.get("solution"), str):
        answer = last_boxed(row["solution"])
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool) and math.isfinite(answer):
        return str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(
            f"{where}: no answer (the row has: {', '.join(map(str, row))}). Give text or a number in field "
            r"'answer', or a 'solution' that ends in \boxed{...}."
        )
    return answer.strip()
