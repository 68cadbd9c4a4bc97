"""MATH: competition problems with an expression as answer; MATH-500, AMC and AIME to be measured by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args

from tether.errors import ConfigError, DataError
from tether.llm.tasks.data import BadRows, Located, as_messages, read_hub, read_jsonl
from tether.llm.tasks.gsm8k import INSTRUCTION, BoxedTask
from tether.llm.tasks.math_answers import last_boxed
from tether.llm.tasks.protocol import Problem

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


class MathTask(BoxedTask):
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

    name = stream = "math"

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
        super().__init__(path, instruction, seconds, require_boxed, bad_rows)
        self.name = "math" if benchmark == "math500" else benchmark
        self.benchmark = benchmark
        self.box_reward = box_reward
        self.max_response_tokens = 1024

    def _file(self, part: str) -> Path:
        name = FILES[self.benchmark if part == "test" else part] if part else ""
        return Path(str(self.path)) / name

    def _part(self, part: str) -> Located:
        if self.path is not None:
            return read_jsonl(self._file(part), ("problem",), self.bad_rows, self._problem)
        name, split = TRAIN_HUB if part == "train" else BENCHMARK_HUB[self.benchmark]
        return read_hub(name, split, ("problem",), None, self.bad_rows, self._problem)

    def _key(self, where: str, row: dict[str, Any]) -> str:
        """Its text without differences in white space."""
        return " ".join(row["problem"].split())

    def _problem(self, where: str, row: dict[str, Any]) -> Problem:
        metadata = {name: row[name] for name in ("solution", "level", "subject", "type") if row.get(name)}
        return Problem(as_messages(row["problem"].strip(), self.instruction), _answer(where, row), metadata)


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
