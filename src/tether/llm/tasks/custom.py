"""Your own problems, from JSONL, checked by a verifier of your choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.errors import ConfigError, DataError
from tether.llm.tasks.custom_verifiers import find_verifier, refuse_answer
from tether.llm.tasks.data import BadRows, DataTask, Located, as_messages, check_bad_rows, read_jsonl
from tether.llm.tasks.protocol import Problem, Verdict


class CustomTask(DataTask[dict[str, Any]]):
    """Give a model the prompts of a JSONL file and check its responses with a verifier.

    Args:
        path: One JSONL file, divided into train (80 %), validation and test (10 % each) by a hash of each
            prompt; or a folder with ``train.jsonl``, ``test.jsonl`` and optionally ``validation.jsonl``
            (without it, a tenth of the training prompts).
        verifier: A name of `VERIFIERS`, or an import path ``"package.module:function"`` of a function that
            takes (response, answer) and gives a bool, a reward in [0, 1] or a `Verdict`. It is your code,
            runs with your rights in a process of its own, and must not execute the response.
        prompt_field: The field with the prompt, as text or as a list of messages.
        answer_field: The field with the reference answer: text, or anything else, which is given to the
            verifier as JSON.
        instruction: Appended to every text prompt.
        chat: Whether text prompts become a user's message, to be rendered by a chat template.
        max_response_tokens: A response length that suits the task.
        bad_rows: Whether a broken row is refused, or skipped with a warning that counts them.
        seconds: Time limit of checking one answer; a check that takes longer counts as wrong.

    Raises:
        ConfigError: A verifier that is unknown, cannot be imported or called.
        DataError: (from `problems`) data that is missing, empty or malformed, naming file and line.

    >>> CustomTask("rows.jsonl", verifier="number").verify("about 7", "7").correct
    True
    """

    name = stream = "custom"

    def __init__(
        self,
        path: str | Path,
        verifier: str = "exact",
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        instruction: str = "",
        chat: bool = True,
        max_response_tokens: int = 256,
        bad_rows: BadRows = "refuse",
        seconds: float = 2.0,
    ) -> None:
        if max_response_tokens < 1:
            raise ConfigError(f"max_response_tokens is {max_response_tokens}; give at least 1.")
        self.path = Path(path)
        self.bad_rows = check_bad_rows(bad_rows)
        self.prompt_field = prompt_field
        self.answer_field = answer_field
        self.instruction = instruction
        self.chat = chat
        self.max_response_tokens = max_response_tokens
        self._verifier = find_verifier(verifier, seconds)

    def verify_many(self, responses: Sequence[str], problem_answers: Sequence[str]) -> list[Verdict]:
        """Ask the verifier, several checks at a time; a reward of 1 counts as correct.

        Verifiers by name read what follows a response's thinking; one by import path gets all of it.

        Raises:
            ConfigError: The verifier raises, or gives something else than a bool, a number in [0, 1] or a
                verdict of finite numbers.
        """
        return self._verifier.verdicts(responses, problem_answers)

    def close(self) -> None:
        """Let go of the process that checks; a later check starts another."""
        self._verifier.close()

    def _part(self, part: str) -> Located:
        return read_jsonl(self._file(part), (), self.bad_rows, self._problem)

    def _validation(self) -> Located | None:
        return self._part("validation") if self._file("validation").is_file() else None

    def _key(self, where: str, row: dict[str, Any]) -> str:
        return " ".join(str(self._field(where, row, self.prompt_field)).split())

    def _field(self, where: str, row: dict[str, Any], name: str) -> Any:
        value = row.get(name)
        if value is None or (isinstance(value, (str, list)) and not value):
            raise DataError(
                f"{where}: nothing in field {name!r} (the row has: {', '.join(map(str, row)) or 'nothing'}). "
                "Fix the row, or set prompt_field and answer_field to its names."
            )
        return value

    def _problem(self, where: str, row: dict[str, Any]) -> Problem:
        prompt = self._field(where, row, self.prompt_field)
        answer = self._field(where, row, self.answer_field)
        text = answer if isinstance(answer, str) else _json(answer)
        refuse_answer(where, self._verifier.check_answer(text))
        if isinstance(prompt, str):
            messages = as_messages(prompt, self.instruction)
            return Problem(messages if self.chat else messages[0]["content"], text)
        if not self.chat or not _is_conversation(prompt):
            raise DataError(
                f"{where}: field {self.prompt_field!r} must hold text"
                f"{' or messages with role and content' if self.chat else ''}, not {prompt!r:.100}. Fix the "
                "row."
            )
        return Problem(prompt, text)


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
