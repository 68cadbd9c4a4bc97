"""GSM8K: grade-school word problems with a number as answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tether.errors import DataError
from tether.llm.tasks.boxed import INSTRUCTION, BoxedTask
from tether.llm.tasks.data import BadRows, Located, as_messages, read_hub, read_jsonl
from tether.llm.tasks.protocol import Problem

HUB_NAME = "openai/gsm8k"

_FIELDS = ("question", "answer")


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
