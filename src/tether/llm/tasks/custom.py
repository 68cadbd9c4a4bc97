"""Your own problems, from JSONL, checked by a verifier: by name, or a function of yours."""

from __future__ import annotations

import json
import logging
import re
import string
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tether.errors import ConfigError, DataError, MissingDependencyError
from tether.llm.tasks.data import BadRows, DataTask, Located, as_messages, check_bad_rows, read_jsonl
from tether.llm.tasks.judge import Judge, Outcome
from tether.llm.tasks.math_answers import MathVerifier
from tether.llm.tasks.math_numbers import MINUS, WHOLE, read_number, with_scales
from tether.llm.tasks.protocol import Problem, Verdict, after_thinking


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
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, sort_keys=True)
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


_log = logging.getLogger(__name__)

_WORKER = f"{Path(__file__).with_name('custom_worker.py')}:verifier"
_CORRECT = 1.0

_TEN_TO = r"10\ ?\^\ ?(?:\{-?\d{1,12}\}|-?\d{1,12})"
_FRACTIONS = "¼-¾⅐-⅟↉"
_RAISED = "²³¹⁰-ⁿ"
_CURRENCIES = dict.fromkeys(map(ord, "£€"))
# A sign that stands apart follows nothing, a relation, a bracket or a word that introduces a value. After a
# number, a variable or what is counted (10 apples - 5) it would subtract, on a line of its own it may be a
# list's, and after a word an en dash is a dash.
_INTRODUCING = (
    *("is", "are", "was", "were", "be", "equals", "equal", "gives", "get", "gets", "makes", "becomes"),
    *("of", "to", "by", "at"),
)
_INTRODUCED = "|".join(rf"(?<=\b{word}\ )" for word in _INTRODUCING)
_SPACED_SIGN = rf"(?:(?:\A|(?<=[=≈:,;<>]\ )|(?<=[=≈:,;<>(\[{{$*]))[{MINUS}]|(?:{_INTRODUCED})[-\u2212])\ "
# A fraction, a power and a power of ten are one number, so that neither 3/4 ends in 4 nor 2½ begins as 2. The
# points of an ellipsis or a version are no number's.
_LAST = re.compile(
    rf"\\[dtc]?frac\W{{0,2}}\d+(?:\W{{1,3}}\d+)?"
    rf"|(?:(?<![\w.)\]}}])[{MINUS}]|{_SPACED_SIGN})?(?:\\?\$|[£€])?(?:{WHOLE}(?:\.\d+)?|(?<![\w.])\.\d+)"
    rf"(?:[eE][-+]?\d{{1,12}}(?!\d)|\ ?(?:\\times|\\cdot|[×x*])\ ?{_TEN_TO}"
    rf"|\ ?\^\ ?\{{?-?\d+\}}?|(?:\ ?[/⁄∕]\ ?\d+)+|\ ?[{_FRACTIONS}]|[{_RAISED}]+)?|[{_FRACTIONS}]",
    re.ASCII,
)
_SIGN = re.compile(rf"(?<!\w)[{MINUS}](?=[$£€]?\.?\d)", re.ASCII)
_INSIDE_NUMBER = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
# Between digits, or before the first, punctuation is part of a number; elsewhere prose's is dropped.
_DROPPED = re.escape("".join(sign for sign in string.punctuation if sign not in "+=<>^") + "“”‘’…–—")
_PUNCTUATION = re.compile(rf"(?<=\d)[^\w\s](?=\d)|(?<![\w.])\.(?=\d)|([{_DROPPED}])")


class Verifier:
    """Judges responses against reference answers."""

    def check_answer(self, answer: str) -> str:
        """What is wrong with a reference that no response could equal; empty for nothing."""
        return ""

    def verdicts(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """A verdict a response, in order."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what is held beside memory."""


def exact(response: str, answer: str) -> bool:
    """Whether the response is the answer, white space at its ends aside.

    >>> exact(" yes\\n", "yes"), exact("Yes", "yes")
    (True, False)
    """
    return response.strip() == answer.strip()


def normalized(response: str, answer: str) -> bool:
    """Whether they are the same words and numbers, whatever the case, white space and prose's punctuation.

    Of numbers the sign, the point and whatever else stands between two digits count; thousands separators
    do not.

    >>> normalized("The  well-known capital: Paris!", "the wellknown capital paris")
    True
    >>> normalized("-5", "5"), normalized("1.5", "15"), normalized("1,500", "1500")
    (False, False, True)
    """
    return _words(response) == _words(answer)


def number(response: str, answer: str) -> bool:
    """Whether the last number of the response equals the answer, exactly.

    >>> number("It is 1,250.50 dollars.", "1250.5"), number("none", "3"), number("3/4", "4")
    (True, False, False)
    """
    last, wanted = last_number(with_scales(response)), read_number(answer)
    return last is not None and wanted is not None and read_number(last.translate(_CURRENCIES)) == wanted


def last_number(response: str) -> str | None:
    """The last number of a response, as it is written; a fraction or a power is one number.

    >>> last_number("12 + 30 = 42 apples"), last_number("none")
    ('42', None)
    """
    found = deque(_LAST.finditer(response.strip()), maxlen=1)
    return found[0][0] if found else None


class Named(Verifier):
    """A verifier of this file, a function of what follows the response's thinking."""

    def __init__(self, function: Callable[[str, str], bool]) -> None:
        self.function = function

    def check_answer(self, answer: str) -> str:
        """Of references, `number` needs numbers."""
        if self.function is number and read_number(answer) is None:
            return f"{answer!r:.60} is no number, as the verifier 'number' needs it"
        return ""

    def verdicts(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """1 where the function holds, else 0."""
        found = [self.function(after_thinking(r), a) for r, a in zip(responses, answers, strict=True)]
        return [Verdict(float(correct), correct) for correct in found]


class Mathematical(Verifier):
    r"""The verifier ``"math"``: the answer in the last ``\boxed{}`` equals the reference, by math-verify.

    >>> Mathematical(seconds=10).verdicts([r"\boxed{\frac{2}{4}}"], ["0.5"])[0].correct
    True
    """

    def __init__(self, seconds: float) -> None:
        self._verifier = MathVerifier(seconds)

    def verdicts(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """1 where the answer is right; part ``"boxed"``: whether there is a complete box at the end."""
        checked = self._verifier.check_many(responses, answers)
        return [Verdict(float(correct), correct, {"boxed": float(boxed)}) for correct, boxed in checked]

    def close(self) -> None:
        """Let go of the process that checks."""
        self._verifier.close()


class Imported(Verifier):
    """A function of the user's, by import path, called in a process that is stopped at the time limit.

    A call that takes too long, or too much memory, counts as wrong, with a warning. An exception or a
    senseless result is a mistake in the verifier, which must not pass for wrong answers: it stops.

    >>> Imported("operator:eq", seconds=10).verdicts(["1", "2"], ["1", "1"])[1].correct
    False
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self._judge = Judge(_WORKER, seconds=seconds, setup=[name])
        try:
            self._judge.start()
        except MissingDependencyError as error:
            reason = str(error).partition("cannot be used: ")[2] or str(error)
            raise ConfigError(f"Verifier {name!r} cannot be imported: {reason} Check the path.") from error

    def verdicts(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """What the function gives."""
        outcomes = self._judge.ask_many(list(zip(responses, answers, strict=True)))
        stopped = [outcome for outcome in outcomes if outcome.failure in ("timeout", "crash")]
        if stopped:
            _log.warning(
                "Verifier %r judged %d of %d responses as wrong because it had to be stopped: %d took longer "
                "than %g s, %d ended its process (%s).",
                *(self.name, len(stopped), len(outcomes)),
                *(sum(each.failure == "timeout" for each in stopped), self._judge.seconds),
                *(sum(each.failure == "crash" for each in stopped), stopped[0].reason),
            )
        return [self._verdict(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Let go of the process that calls."""
        self._judge.close()

    def _verdict(self, outcome: Outcome) -> Verdict:
        if outcome.failure == "raised":
            reason = outcome.reason.partition("gave no verdict: ")[2]
            raise ConfigError(
                f"Verifier {self.name!r} raised {reason} Mend it: it must judge whatever a model writes."
            )
        if outcome.failure is not None:
            return Verdict(0.0, False)
        given: dict[str, Any] = outcome.value
        reward, parts = given["reward"], given.get("parts", {})
        if "correct" in given:
            sound = _is_number(reward) and isinstance(given["correct"], bool)
            if sound and all(map(_is_number, parts.values())):
                return Verdict(float(reward), given["correct"], parts)
        elif _is_number(reward) and 0 <= reward <= 1:
            return Verdict(float(reward), float(reward) == _CORRECT)
        shown = reward["shown"] if isinstance(reward, dict) else given if "correct" in given else reward
        raise ConfigError(
            f"Verifier {self.name!r} gave {shown}. Let it return a bool, a reward in [0, 1] or a Verdict of "
            "finite numbers."
        )


VERIFIERS: dict[str, Callable[[float], Verifier]] = {
    "exact": lambda seconds: Named(exact),
    "normalized": lambda seconds: Named(normalized),
    "number": lambda seconds: Named(number),
    "math": Mathematical,
}
"""Verifiers by name, made with the time limit of one check."""


def find_verifier(name: str, seconds: float) -> Verifier:
    """A verifier by name or import path.

    >>> find_verifier("exact", seconds=2).verdicts(["yes"], ["yes"])[0].reward
    1.0
    """
    if name in VERIFIERS:
        return VERIFIERS[name](seconds)
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ConfigError(
            f"Unknown verifier {name!r}. Use one of: {', '.join(VERIFIERS)}, or an import path such as "
            "'package.module:function'."
        )
    if module == "__main__":
        raise ConfigError(f"Verifier {name!r} is in the program that runs. Move it to a module of its own.")
    return Imported(name, seconds)


def refuse_answer(where: str, reason: str) -> None:
    """Raise for a row whose reference no response could equal."""
    if reason:
        raise DataError(f"{where}: the answer {reason}. Fix the row, or choose another verifier.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and abs(value) <= sys.float_info.max


def _words(text: str) -> list[str]:
    # The minus sign, which is not dropped, for whatever serves as one.
    signed = _SIGN.sub("\u2212", _INSIDE_NUMBER.sub("", text.casefold()))
    return _PUNCTUATION.sub(lambda found: "" if found[1] else found[0], signed).split()
