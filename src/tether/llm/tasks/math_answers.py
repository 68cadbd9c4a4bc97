"""Whether a response's mathematical answer is the reference: where it stands, and math-verify's judgement."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tether.errors import MissingDependencyError
from tether.llm.tasks.judge import Judge
from tether.llm.tasks.math_numbers import (
    WORDS,
    agree,
    ends_in_variable,
    read_number,
    unit_of,
    units_differ,
    with_scales,
)
from tether.llm.tasks.protocol import after_thinking

_log = logging.getLogger(__name__)

_CHECK = f"{Path(__file__).with_name('math_worker.py')}:check"
_LONGEST_FORMULA = 4096
_LONGEST_LINE = 200

_BOX = re.compile(r"\\boxed(?![A-Za-z])(?:\s*(\{))?")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Relations other than equality, of which math-verify passes over some.
_RELATION = re.compile(
    r"\\(?:not|neq?|geq?|leq?|gt|lt|geqslant|leqslant|gtr|less|approx|simeq|sim|cong|equiv|propto|nless|ngtr)"
    r"(?![A-Za-z])|(?<!\\left)(?<!\\right)[<>]|[≠≤≥≈≉∼≃≅≡]|!=|~="
)
# A remark inside a formula, which math-verify takes for a unit: 4 \text{ or 5}.
_REMARK = re.compile(r"\\(?:text[a-z]*|mbox|mathrm|rm)\s*\{[^{}]*?(?:(?<![\^\d])\d|\bnot\b)", re.ASCII)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_LETTER, _DIGIT = re.compile("[A-Za-z]"), re.compile("[0-9]")
# What math-verify passes over: the base of a numeral (52_8) and the power of a unit (\\text{ cm}^2).
_MARKS = (
    re.compile(r"\d_\{?(\d+)\}?", re.ASCII),
    re.compile(r"\\(?:text|mbox|mathrm|rm)\s*\{[^{}]*\}\s*\^\{?(\d+)\}?", re.ASCII),
)


# Text in a formula, with the power of a unit.
_TEXT = re.compile(r"\\(?:text[a-z]*|mbox|mathrm|mathbf|rm)\s*\{([^{}]*)\}(?:\s*\^\{?\d\}?)?", re.ASCII)
# What names a quantity, or counts nothing: text, commands, indices and what a function is of.
_NAMING = re.compile(
    rf"{WORDS}|\\mathit\s*\{{[^{{}}]*\}}|\\[A-Za-z]+|_(?:\{{[^{{}}]*\}}|\w)|[A-Za-z]\([^()]*\)"
)

_Form = tuple[str, bool, bool]  # a text, whether it is a formula as a whole, whether it ends in variables
_Question = tuple[list[_Form], str, bool]  # the forms of a response, the reference and whether that does


class Checked(NamedTuple):
    """What checking one response found."""

    correct: bool
    """Whether its answer is the reference."""
    boxed: bool
    """Whether it ends in a complete box."""


def last_boxed(text: str) -> str | None:
    r"""Give what the last ``\boxed{...}`` of a text holds, or None where there is none or it is not closed.

    Of boxes inside one another the outer one counts. Braces that TeX would print (``\{``) do not.

    >>> last_boxed(r"so \boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> last_boxed(r"\boxed{3}, no: \boxed{unfinished") is None
    True
    """
    found = None
    opening = _BOX.search(text)
    while opening is not None:
        end = _closing(text, opening.end()) if opening[1] else None
        if end is None:
            return None
        found = text[opening.end() : end]
        opening = _BOX.search(text, end)
    return found


def _closing(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` is closed."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def _unwrapped(content: str) -> str:
    r"""A box's content; where that is one more box and nothing else, or a number as text, what is in there.

    >>> _unwrapped(r"\boxed{3}"), _unwrapped(r"\text{18 dollars}"), _unwrapped(r"\text{4 or 5}")
    ('3', '18\\text{ dollars}', '\\text{4 or 5}')
    """
    content = content.strip()
    if only := _TEXT.fullmatch(content):
        text = only[1].strip().removesuffix(".")
        number, _, what = text.rpartition(" ")
        if read_number(text) is not None:
            return text
        if what.isalpha() and read_number(number) is not None:
            return rf"{number}\text{{ {what}}}"
    opening = _BOX.match(content)
    if opening is None or not opening[1] or _closing(content, opening.end()) != len(content) - 1:
        return content
    return content[opening.end() : -1]


class MathVerifier:
    r"""Decide whether the answer in a response's last ``\boxed{}`` equals a reference, within a time limit.

    Equality is math-verify's, which runs in a `Judge`: some expressions keep a computer-algebra system busy
    for ever. Plain numbers are compared here, exactly. Not paid are, beside wrong values: another unit, base
    or power than the reference's, an equation between numbers that is not true, and what stands in the
    response's thinking.

    >>> with MathVerifier() as verifier:
    ...     verifier.check(r"\boxed{0.5}", "1/2")
    Checked(correct=True, boxed=True)
    """

    def __init__(self, seconds: float = 2.0, require_boxed: bool = True) -> None:
        self.require_boxed = require_boxed
        self._judge = Judge(_CHECK, seconds=seconds)

    def check(self, response: str, answer: str) -> Checked:
        """Check one response."""
        return self.check_many([response], [answer])[0]

    def check_many(self, responses: Sequence[str], answers: Sequence[str]) -> list[Checked]:
        """Check responses against their answers, in order; a few at a time, each on its own clock."""
        boxes: list[bool] = []
        known: dict[int, bool] = {}
        asked: dict[int, _Question] = {}
        for place, (response, answer) in enumerate(zip(responses, answers, strict=True)):
            final, answer = with_scales(after_thinking(response)), with_scales(answer)
            boxed = last_boxed(final)
            boxes.append(boxed is not None)
            forms = self._forms(final, boxed, answer)
            same = agree(forms[0][0], answer) if forms else False
            if same is None:
                asked[place] = (forms, answer, ends_in_variable(answer))
            else:
                known[place] = same
        known |= self._judged(asked)
        return [Checked(known[place], boxed) for place, boxed in enumerate(boxes)]

    def close(self) -> None:
        """Let go of the process; a later check starts another."""
        self._judge.close()

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _forms(self, final: str, boxed: str | None, answer: str) -> list[_Form]:
        """The texts that may hold the answer."""
        if boxed is not None:
            content = _unwrapped(boxed)
            forms = [] if r"\boxed" in content or r"\fbox" in content else [_formula(content, answer)]
        elif self.require_boxed or _BOX.search(final) or not final.strip():
            forms = []
        else:
            forms = _prose(final.strip(), answer)
        return [form for form in forms if _may_equal(form[0], form[1], answer)]

    def _judged(self, asked: dict[int, _Question]) -> dict[int, bool]:
        """Math-verify's judgement; the same question is asked once."""
        calls = {repr(question): question for question in asked.values()}
        try:
            outcomes = dict(zip(calls, self._judge.ask_many(list(calls.values())), strict=True))
        except MissingDependencyError as error:
            raise MissingDependencyError(
                f"Mathematics is checked with math-verify: {error} Install tether-rl[llm]."
            ) from error
        failed = [outcome for outcome in outcomes.values() if outcome.failure is not None]
        if failed:
            _log.warning(
                "%d of %d different answers count as wrong because they could not be checked: %d took longer "
                "than %g s. The first: %s",
                *(len(failed), len(outcomes), sum(each.failure == "timeout" for each in failed)),
                *(self._judge.seconds, failed[0].reason),
            )
        return {place: bool(outcomes[repr(question)].value) for place, question in asked.items()}


def _prose(plain: str, answer: str) -> list[_Form]:
    """The forms of a response without a box: a formula, or a text that ends in one, or perhaps either."""
    line = plain.rpartition("\n")[2][-_LONGEST_FORMULA:]
    if not _relations_agree(line, answer):
        return []
    prose = (plain[-_LONGEST_FORMULA:], False, False)
    if len(plain) > _LONGEST_LINE or line != plain or plain.count("{") != plain.count("}"):
        return [prose]
    if _says_more(plain, answer):
        return []
    formula = _formula(plain, answer)
    return [formula, prose] if _WORD.search(_COMMAND.sub(" ", plain)) else [formula]


def _formula(text: str, answer: str) -> _Form:
    return text, True, ends_in_variable(text, answer)


def _may_equal(given: str, formula: bool, reference: str) -> bool:
    """Whether math-verify is to be asked: not of endless texts, nor where it would pass over a difference."""
    fitting = len(given) <= _LONGEST_FORMULA + 2 * len(reference) or agree(given, reference) is not None
    return (
        fitting
        and _marks_agree(given, reference)
        and not (formula and not _relations_agree(given, reference))
        and not units_differ(given, reference)
        and (_REMARK.search(given) is None or _REMARK.search(reference) is not None)
        and not (formula and _says_more(given, reference))
    )


def _says_more(given: str, reference: str) -> bool:
    r"""Whether a formula says something else besides a number that is the reference, which would pass for it.

    An equation does of which a side has variables and numbers: its right side is not what is asked.

    >>> _says_more("6x = 5", "5"), _says_more("x = 5", "5"), _says_more("2 + 3 = 5", "5")
    (True, False, False)
    >>> _says_more(r"5\text{ h } 6\text{ min}", "5"), _says_more(r"1\text{ and }2", "1, 2")
    (True, False)
    """
    if unit_of(reference) is None and read_number(reference) is None:
        return False
    if _counts_twice(given.rpartition("=")[2]):
        return True
    *sides, _ = _NAMING.sub(" ", given).split("=")
    return "=" not in reference and any(_LETTER.search(side) and _DIGIT.search(side) for side in sides)


def _counts_twice(formula: str) -> bool:
    r"""Whether a formula has numbers on both sides of text, as in 5 \text{ hours and } 6 \text{ minutes}."""
    digits = [found.start() for found in _DIGIT.finditer(formula)]
    words = [found for found in _TEXT.finditer(formula) if _LETTER.search(found[1])]
    return bool(digits) and any(digits[0] < found.start() and found.end() <= digits[-1] for found in words)


def _relations_agree(given: str, reference: str) -> bool:
    r"""Whether a text states another relation than equality only where the reference does.

    >>> _relations_agree("x = 4", "4"), _relations_agree(r"\neq 4", "4"), _relations_agree("x > 4", "4 < x")
    (True, False, True)
    """
    return _RELATION.search(given) is None or _RELATION.search(reference) is not None


def _marks_agree(given: str, reference: str) -> bool:
    r"""Whether bases of numerals and powers of units, where both texts have them, are the same.

    >>> _marks_agree("52_{8}", "52_8"), _marks_agree("52_9", "52_8"), _marks_agree("52", "52_8")
    (True, False, True)
    """
    for pattern in _MARKS:
        found, wanted = pattern.findall(given), pattern.findall(reference)
        if found and wanted and found != wanted:
            return False
    return True
