"""What a model wrote is read in linear time, whatever it repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from reading_time import grows_linearly

from tether.llm.tasks import ArithmeticTask, ChainedTask
from tether.llm.tasks.custom import exact, normalized, number
from tether.llm.tasks.judge import Outcome
from tether.llm.tasks.math_answers import MathVerifier, last_boxed
from tether.llm.tasks.math_numbers import read_number, unit_of, with_scales
from tether.llm.tasks.protocol import after_thinking

SIZE = 8_000

FAMILIES = [
    *(
        "\\boxed{",
        "\\boxed",
        "\\boxed ",
        "\\boxed{4} ",
        "\\boxed{4} {",
        "{",
        "}",
        "{}",
        "{\\boxed{",
        "\\{",
        "\\",
    ),
    *(
        "<think>",
        "</think>",
        "<think></think>",
        "<",
        "</",
        "<think",
        "\\text{",
        "\\text{4",
        "\\text {",
        "\\text{m}",
    ),
    *(
        "1",
        "1,",
        "1,111",
        "1,111.",
        ",",
        ".",
        "1.",
        "0",
        "-",
        "-1",
        "1e",
        "1e1",
        "10^",
        "10^{",
        "1/",
        "1 / ",
        "1^",
        "- ",
        "- 1",
        "=- 1",
        "a - ",
        "½",
        "1½",
        "1 ½",
        "²",
        "1²",
        "1⁄",
    ),
    *("\\frac", "\\frac1", "\\frac{1", "$", "$1", "1x", "1\\times", "1 x 10^", "1_", "1_{", "1_{1}"),
    *(
        " ",
        "\n",
        "\t ",
        "a",
        "a ",
        "a.",
        "3 m ",
        "m/",
        "square ",
        "\\circ",
        "^\\circ",
        "é",
        "\u2212",
        "=",
        "3=4",
        "\\neq ",
    ),
    *("#", "#1", "#1 ", ";", "1+1=2;", "1+", "\\!", "1,\\!", "{,}", "1{,}111", "_", "'", "’", "…"),
]
PLAIN = ["{}", "4{}x"]
FRAMES = [*PLAIN, "\\boxed{{{}}}", "\\boxed{{4{}x}}", "<think>{}</think>\\boxed{{4}}", "{}\\boxed{{4}}"]


class Silent:
    """In the place of a judge, whose time is limited in any case: all that comes before it is measured."""

    seconds = 1.0

    def ask_many(self, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        return [Outcome(False) for _ in calls]


def mathematics(require_boxed: bool) -> Callable[[str], object]:
    verifier = MathVerifier(require_boxed=require_boxed)
    verifier._judge = Silent()  # type: ignore[assignment]
    return lambda text: verifier.check(text, r"4\text{ km}")


READERS: dict[str, Callable[[str], object]] = {
    "last_boxed": last_boxed,
    "after_thinking": after_thinking,
    "read_number": read_number,
    "with_scales": with_scales,
    "unit_of": unit_of,
    "math": mathematics(require_boxed=True),
    "math without a box": mathematics(require_boxed=False),
    "exact": lambda text: exact(text, "4"),
    "normalized": lambda text: normalized(text, "4"),
    "number": lambda text: number(text, "4"),
    "arithmetic": lambda text: ArithmeticTask().verify(text, "4"),
    "chained": lambda text: ChainedTask().verify(text, "4"),
}


@pytest.mark.parametrize("name", READERS)
def test_reading_takes_linear_time_whatever_is_repeated(name: str) -> None:
    slow = [
        (family, frame)
        for family in FAMILIES
        for frame in (FRAMES if "math" in name or "box" in name else PLAIN)
        if not grows_linearly(
            READERS[name],
            lambda size, f=family, g=frame: g.format(f * (size // len(f))),  # type: ignore[misc]
            SIZE,
        )
    ]
    assert not slow


def test_the_measure_tells_quadratic_reading() -> None:
    def quadratic(text: str) -> int:
        return sum(text[start:].count("z") for start in range(0, len(text), 16))

    assert not grows_linearly(quadratic, lambda size: "a" * size, SIZE)
    assert grows_linearly(lambda text: text.count("z"), lambda size: "a" * size, SIZE)
