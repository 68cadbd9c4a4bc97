"""Wrong answers to problems of reasoning-gym, of several kinds, for `benchmarks.reasoning_gym_audit`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

Answer = tuple[str, str]
"""What kind of answer it is, and the answer."""

CONSTANTS = (
    *("", " \n\t ", "nan", "NaN", "[NaN]", "nan + nani", "inf", "-inf", "1e999"),
    *("0", "1", "-1", "0.5", "0/1", "true", "false", "yes", "no", "None", "null"),
    *("[]", "{}", "[[]]", "()", '{"a": 1}', "A", "...", "٣"),
)
"""Answers that need no look at the problem."""

_ORDER = ("characters reversed", "words reversed")
_ANOTHERS = "another problem's answer"

MAY_BE_RIGHT: dict[str, tuple[tuple[str, ...], str]] = {
    "countdown": (_ORDER, "sums and products commute"),
    "cryptarithm": (("one number changed",), "any digits with which the sum holds are right"),
    "n_queens": ((_ANOTHERS,), "any way to complete the board is right"),
    "polynomial_multiplication": (_ORDER, "sums commute"),
    "prime_factorization": (_ORDER, "products commute"),
    "puzzle24": (_ORDER, "sums and products commute"),
    "quantum_lock": ((*_ORDER, _ANOTHERS), "any sequence as short that opens the lock is right"),
    "shortest_path": (_ORDER, "any path as short is right"),
    "simple_integration": (_ORDER, "sums commute"),
}
"""Kinds of answers that are left out for a data set because they may happen to be right, and why."""

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_DECIMAL = re.compile(r"(?<=[0-9])\.(?=[0-9]*[1-9])[0-9]+")
_EXPRESSION = re.compile(r"[0-9+\-*/() .^x]+")


def wrong(
    dataset: str, question: str, reference: str | None, others: Sequence[str]
) -> Iterator[tuple[bool, str, str]]:
    """Answers that are wrong; `others` answer other problems of the data set.

    Each comes as whether it was made without the right answer, its kind, and itself.
    """
    left_out, _ = MAY_BE_RIGHT.get(dataset, ((), ""))
    made = [(True, *answer) for answer in _blind(question, others)]
    if reference is not None:
        made += [(False, *answer) for answer in _near(reference, others)]
    for blind, kind, answer in made:
        if kind not in left_out and (reference is None or not same(answer, reference)):
            yield blind, kind, answer


def _blind(question: str, others: Sequence[str]) -> Iterator[Answer]:
    yield from (("a constant", constant) for constant in CONSTANTS)
    yield "very long", "x" * 20_000
    yield "very long", "0 " * 10_000
    yield "the question", question
    expressions = [found.strip() for found in _EXPRESSION.findall(question)]
    yield "a formula of the question", max(expressions, key=len, default="")
    yield from ((_ANOTHERS, other) for other in others[:4])


def _near(reference: str, others: Sequence[str]) -> Iterator[Answer]:
    numbers = list(_NUMBER.finditer(reference))
    for number in numbers[:1] + numbers[1:][-1:]:
        yield "one number changed", reference[: number.start()] + _off(number[0]) + reference[number.end() :]
    if reference.count(".") >= 2 and _DECIMAL.search(reference):
        yield "decimals dropped", _DECIMAL.sub("", reference)
    negated = _negated(reference)
    if negated is not None:
        yield "negated", negated
        yield "negated", f"The answer is {negated}."
    words = reference.split()
    yield "characters reversed", reference[::-1]
    yield "words reversed", " ".join(words[::-1])
    if len(words) >= 4:
        yield "its first half", " ".join(words[: len(words) // 2])
    if reference[-1:].isalpha() and not numbers:
        yield "a letter doubled", reference + reference[-1]
        yield "a letter short", reference[:-1]
    for separator in (", ", "\n"):
        if others:
            yield "one of several guesses", separator.join([*others[:2], reference, *others[2:4]])


def forms(reference: str) -> Iterator[Answer]:
    """The right answer with something around it, or written differently."""
    yield "words before", f"The answer is {reference}"
    yield "words after", f"{reference} is the answer."
    yield "noise before", f"xyzzy %$ {reference}"
    yield "noise after", f"{reference} xyzzy %$"
    yield "twice", f"{reference} {reference}"
    yield "twice", f"{reference}\n{reference}"
    yield "quoted", repr(reference)
    yield "in brackets", f"({reference})"
    yield "a sum with 0", f"{reference} + 0"
    yield "digits of another script", reference.translate({48 + digit: 0x660 + digit for digit in range(10)})


HOSTILE: tuple[Answer, ...] = (
    ("power of a sum", "(x+y+z+w+a+b+c)**99"),
    ("tower of powers", "9**9**9"),
    ("deep brackets", "(" * 50_000 + "1" + ")" * 50_000),
    ("nested lists", "[" * 50_000 + "]" * 50_000),
    ("spaces", " " * 100_000),
    ("inner spaces", "1" + " " * 99_998 + "1"),
    ("digits", "9" * 100_000),
    ("a large exponent", "1e99999999"),
)
"""Answers that cost time, memory or depth of the stack."""


def same(answer: str, reference: str) -> bool:
    """Whether two answers are the same text, whatever the case and spacing, or the same number."""
    first, second = (" ".join(text.casefold().split()) for text in (answer, reference))
    if first == second:
        return True
    try:
        return float(first.replace(",", "")) == float(second.replace(",", ""))
    except ValueError:
        return False


def _off(number: str) -> str:
    """A number that is larger by a tenth and by 1 at least: no scorer should take that for rounding."""
    if "." not in number:
        return str(int(number) + max(1, int(number) // 10))
    places = len(number.partition(".")[2])
    return f"{float(number) + max(1.0, float(number) / 10):.{places}f}"


def _negated(reference: str) -> str | None:
    try:
        value = float(reference)
    except ValueError:
        return None
    return None if value == 0 else reference[1:] if reference.startswith("-") else f"-{reference}"
