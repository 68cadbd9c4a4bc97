"""Your own problems, from JSONL, checked by a verifier of your choice."""

from __future__ import annotations

import importlib
import json
import random
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tether.errors import ConfigError, DataError
from tether.llm.tasks.jsonl import BadRows, check_bad_rows, read_jsonl
from tether.llm.tasks.math_answers import MathVerifier, last_boxed
from tether.llm.tasks.protocol import Problem, Split, Verdict, check_request, split_of

Verifier = Callable[[str, str], "bool | float | Verdict"]
"""Takes a response and a reference answer; says whether it is right, its reward in [0, 1], or a verdict."""

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+", re.ASCII)
_CORRECT = 1.0


def exact(response: str, answer: str) -> bool:
    """Whether the response is the answer, white space at its ends aside.

    >>> exact(" yes\\n", "yes"), exact("Yes", "yes")
    (True, False)
    """
    return response.strip() == answer.strip()


def normalized(response: str, answer: str) -> bool:
    """Whether they are the same words, whatever the case, punctuation and white space.

    >>> normalized("The  capital: Paris!", "the capital paris")
    True
    """
    return _words(response) == _words(answer)


def number(response: str, answer: str) -> bool:
    """Whether the last number of the response equals the answer.

    >>> number("It is 1,250.50 dollars.", "1250.5"), number("none", "3")
    (True, False)
    """
    found = _NUMBER.findall(response)
    return bool(found) and _value(found[-1]) == _value(answer)


class MathVerdict:
    r"""The verifier ``"math"``: the answer in the last ``\boxed{}`` equals the reference, by math-verify.

    >>> MathVerdict()(r"\boxed{\frac{2}{4}}", "0.5").correct
    True
    """

    def __init__(self) -> None:
        self._verifier = MathVerifier()

    def __call__(self, response: str, answer: str) -> Verdict:
        boxed = last_boxed(response)
        correct = boxed is not None and self._verifier.check(f"\\boxed{{{boxed}}}", answer)
        return Verdict(float(correct), correct, {"boxed": float(boxed is not None)})


VERIFIERS: dict[str, Callable[[], Verifier]] = {
    "exact": lambda: exact,
    "normalized": lambda: normalized,
    "number": lambda: number,
    "math": MathVerdict,
}
"""Verifiers by name."""


class CustomTask:
    """Give a model the prompts of a JSONL file and check its responses with a verifier.

    Args:
        path: One JSONL file, divided into train (80 %), validation and test (10 % each) by a hash of each
            prompt; or a folder with ``train.jsonl``, ``test.jsonl`` and optionally ``validation.jsonl``
            (without it, a tenth of the training prompts).
        verifier: A name of `VERIFIERS`, or an import path ``"package.module:function"`` of a function that
            takes (response, answer) and gives a bool, a reward in [0, 1] or a `Verdict`. It runs in this
            process: it is your code. It must not execute the response.
        prompt_field: The field with the prompt, as text or as a list of messages.
        answer_field: The field with the reference answer: text, or anything else, which is given to the
            verifier as JSON.
        instruction: Appended to every text prompt.
        chat: Whether text prompts become a user's message, to be rendered by a chat template.
        max_response_tokens: A response length that suits the task.
        bad_rows: Whether a broken row is refused, or skipped with a warning that counts them.

    Raises:
        ConfigError: A verifier that is unknown, cannot be imported or called.
        DataError: (from `problems`) data that is missing, empty or malformed, naming file and line.

    >>> CustomTask("rows.jsonl", verifier="number").verify("about 7", "7").correct
    True
    """

    name = "custom"

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
        self._verifier_name = verifier
        self._verifier = _find_verifier(verifier)

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """Read the problems of a split, shuffled by `seed`; a test prompt is in no other split.

        Raises:
            InvalidInputError: An unknown split, or `limit` below 1.
            DataError: Data that is missing, empty or malformed, or a split without a problem.
        """
        check_request(split, limit)
        problems = [self._problem(where, row) for where, row in self._rows(split)]
        if not problems:
            raise DataError(
                f"The {split} split of {self.path} has no problem. Give more rows, or a folder with "
                "train.jsonl and test.jsonl."
            )
        random.Random(f"{self.name}/{split}/{seed}").shuffle(problems)
        return problems[:limit]

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """Ask the verifier; a reward of 1 counts as correct.

        Raises:
            ConfigError: The verifier gives something else than a bool, a number in [0, 1] or a verdict.
        """
        given = self._verifier(response, problem_answer)
        if isinstance(given, Verdict):
            return given
        if isinstance(given, (bool, int, float)) and 0 <= given <= 1:
            return Verdict(float(given), float(given) == _CORRECT, {})
        raise ConfigError(
            f"Verifier {self._verifier_name!r} gave {given!r:.100}. Let it return a bool, a reward in [0, 1] "
            "or a Verdict."
        )

    def _rows(self, split: Split) -> list[tuple[str, dict[str, Any]]]:
        if not self.path.is_dir():
            return [
                (where, row)
                for where, row in self._read(self.path)
                if split_of(self._key(where, row)) == split
            ]
        tested = self._read(self.path / "test.jsonl")
        if split == "test":
            return tested
        held_out = {self._key(where, row) for where, row in tested}
        given = self.path / "validation.jsonl"
        if given.is_file():
            validated = self._read(given)
            if split == "validation":
                return [(w, row) for w, row in validated if self._key(w, row) not in held_out]
            held_out |= {self._key(where, row) for where, row in validated}
        rows = [(w, r) for w, r in self._read(self.path / "train.jsonl") if self._key(w, r) not in held_out]
        if given.is_file():
            return rows
        return [(w, row) for w, row in rows if split_of(self._key(w, row), test_percent=0) == split]

    def _read(self, file: Path) -> list[tuple[str, dict[str, Any]]]:
        return read_jsonl(file, (), self.bad_rows, self._problem)

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
        if isinstance(prompt, str):
            content = f"{prompt}\n\n{self.instruction}" if self.instruction else prompt
            return Problem([{"role": "user", "content": content}] if self.chat else content, text)
        if not self.chat or not _is_conversation(prompt):
            raise DataError(
                f"{where}: field {self.prompt_field!r} must hold text"
                f"{' or messages with role and content' if self.chat else ''}, not {prompt!r:.100}. Fix the "
                "row."
            )
        return Problem(prompt, text)


def _find_verifier(name: str) -> Verifier:
    """A verifier by name or import path.

    >>> _find_verifier("operator:eq")("1", "1")
    True
    """
    if name in VERIFIERS:
        return VERIFIERS[name]()
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ConfigError(
            f"Unknown verifier {name!r}. Use one of: {', '.join(VERIFIERS)}, or an import path such as "
            "'package.module:function'."
        )
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"Verifier {name!r} cannot be imported: {error}. Check the path.") from error
    if not callable(found):
        raise ConfigError(f"Verifier {name!r} is a {type(found).__name__}. Name a function.")
    verifier: Verifier = found
    return verifier


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _words(text: str) -> list[str]:
    return text.casefold().translate(str.maketrans("", "", string.punctuation)).split()


def _value(text: str) -> float | None:
    try:
        return float(text.replace(",", "").strip().rstrip("."))
    except ValueError:
        return None
