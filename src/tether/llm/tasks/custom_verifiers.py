"""Verifiers of custom problems: by name, or a function of the user's in a process that can be stopped."""

from __future__ import annotations

import logging
import re
import string
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tether.errors import ConfigError, DataError, MissingDependencyError
from tether.llm.tasks.judge import Judge, Outcome
from tether.llm.tasks.math_answers import MathVerifier
from tether.llm.tasks.math_numbers import MINUS, read_number
from tether.llm.tasks.protocol import Verdict
from tether.llm.tasks.thinking import after_thinking

_log = logging.getLogger(__name__)

_WORKER = f"{Path(__file__).with_name('custom_worker.py')}:verifier"
_CORRECT = 1.0

_TEN_TO = r"10\ ?\^\ ?(?:\{-?\d{1,12}\}|-?\d{1,12})"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
# A fraction, a power and a power of ten are one number, so that 3/4 does not end in 4.
_LAST = re.compile(
    rf"\\[dtc]?frac\W{{0,2}}\d+(?:\W{{1,3}}\d+)?"
    rf"|(?:(?<![\w.)\]}}])[{MINUS}])?\$?(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
    rf"(?:[eE][-+]?\d{{1,12}}(?!\d)|\ ?(?:\\times|\\cdot|[×x*])\ ?{_TEN_TO}"
    r"|\ ?\^\ ?\{?-?\d+\}?|(?:\ ?/\ ?\d+)+)?",
    re.ASCII,
)
_SIGN = re.compile(rf"(?<!\w)[{MINUS}](?=[$£€]?\.?\d)", re.ASCII)
_INSIDE_NUMBER = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
# Between digits, or before the first, punctuation is part of a number; elsewhere prose's is dropped.
_DROPPED = re.escape("".join(sign for sign in string.punctuation if sign not in "+=<>^") + "“”‘’…–—")
_PUNCTUATION = re.compile(rf"(?<=\d)[^\w\s](?=\d)|(?<![\w.])\.(?=\d)|([{_DROPPED}])")


class Verifier(Protocol):
    """Judges responses against reference answers."""

    def check_answer(self, answer: str) -> str:
        """What is wrong with a reference that no response could equal; empty for nothing."""
        ...

    def verdicts(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """A verdict a response, in order."""
        ...

    def close(self) -> None:
        """Give back what is held beside memory."""
        ...


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
    last, wanted = deque(_LAST.finditer(response), maxlen=1), read_number(answer)
    return bool(last) and wanted is not None and read_number(last[0][0]) == wanted


class Named:
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

    def close(self) -> None:
        """Nothing is held."""


class Mathematical:
    r"""The verifier ``"math"``: the answer in the last ``\boxed{}`` equals the reference, by math-verify.

    >>> Mathematical(seconds=10).verdicts([r"\boxed{\frac{2}{4}}"], ["0.5"])[0].correct
    True
    """

    def __init__(self, seconds: float) -> None:
        self._verifier = MathVerifier(seconds)

    def check_answer(self, answer: str) -> str:
        """Any text may be a reference."""
        return ""

    def verdicts(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """1 where the answer is right; part ``"boxed"``: whether there is a complete box at the end."""
        checked = self._verifier.check_many(responses, answers)
        return [Verdict(float(correct), correct, {"boxed": float(boxed)}) for correct, boxed in checked]

    def close(self) -> None:
        """Let go of the process that checks."""
        self._verifier.close()


class Imported:
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

    def check_answer(self, answer: str) -> str:
        """Any text may be a reference."""
        return ""

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
