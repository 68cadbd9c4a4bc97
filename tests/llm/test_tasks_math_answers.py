r"""What a box pays for: relations, hedges, thinking, units, long integers, endless expressions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tether.llm.tasks.math_answers import MathVerifier, last_boxed
from tether.llm.tasks.math_numbers import agree, read_number
from tether.llm.tasks.protocol import after_thinking

SECONDS = 2.0
# Beside the limit of each, what a loaded machine takes to fork and to check sound answers.
SLACK = 30.0


@pytest.fixture(scope="module")
def strict() -> Iterator[MathVerifier]:
    with MathVerifier(seconds=30) as verifier:
        yield verifier


@pytest.fixture(scope="module")
def lenient() -> Iterator[MathVerifier]:
    with MathVerifier(seconds=30, require_boxed=False) as verifier:
        yield verifier


def table(text: str) -> list[tuple[str, str]]:
    """Rows of what is given and the reference."""
    return [
        (given.strip(), reference.strip())
        for given, reference in (r.split("|") for r in text.split("\n") if r)
    ]


PAID = {
    "letters at the end": r"""
m + 4h|4h + m
m + n|n + m
3 + 2m|2m + 3
\frac{1}{2} m|\frac{m}{2}
2\pi hr|2\pi rh
4s|4s
5 m|5
5m|5
5 cm|5\text{ cm}
\frac{3}{4} m|\frac{3}{4}
5 g|5 g
5|5 m
""",
    "a number as text": r"""
\text{18}|18
\textbf{18}|18
\mathrm{18}|18
\text{1,800}|1800
\text{18 dollars}|18
\text{\$18}|18
\text{18}|18\text{ cm}
""",
    "numbers in names": r"""
x_1 + x_2 = 5|5
x + y = 5|5
\text{Area of circle } A_1 = 5|5
x = 2 \cdot 2 = 4|4
2\text{ dozen} = 24|24
12\text{ cm}^2|12
1\text{ and }2|1, 2
""",
    "equations": r"""
x=4|4
x = 4|4
4|x = 4
x = 2+2 = 4|4
2 + 2 = 4|4
15 \times 4 = 60|60
15 \times 4 = 60\text{ miles}|60
f(2) = 4|4
P(A) = \frac{1}{2}|0.5
S_{10} = 55|55
\text{Total} = 4|4
\frac{1}{2} = 0.5|0.5
y = 2x+1|y=1+2x
""",
    "relations": r"""
x > 4|4 < x
x \le 4|x \leq 4
x \ge 4|4 \leq x
x \in [2,4)|[2,4)
[2,4)|2 \le x < 4
""",
    "units": r"""
3|3\text{ m}
3\text{ m}|3
3\text{ meters}|3\text{ m}
3 km|3\text{ kilometers}
15\text{ cm}^2|15\mbox{ cm}^2
15\text{ square centimeters}|15\text{ cm}^2
15\text{ cm$^2$}|15\text{ cm}^2
60\text{ mph}|60\text{ miles per hour}
6\text{ people}|6\text{ students}
45|45^\circ
45\text{ degrees}|45^\circ
\$5|5
5\%|5
0.05|5\%
5\text{ million}|5000000
5 million|5{,}000{,}000
5.5\text{ million dollars}|5500000
\frac{1}{2}\text{ million}|500000
5,000,000|5\text{ million}
5\text{ million}|5\text{ million}
""",
    "numbers": r"""
12345678901234567|12345678901234567
1,000,000|1000000
1{,}000{,}000|10^6
11,\! 111,\! 100|11111100
10^{400}|10^{400}
2.5 \times 10^{3}|2500
-5|-5
+5|5
007|7
4.0|4
0.3333333|\frac{1}{3}
""",
    "alternatives": r"""
1 \text{ or } 2|2, 1
x=1 \text{ or } x=2|x=1 \text{ or } x=2
\{1,2\}|\{2,1\}
\boxed{4}|4
""",
}

UNPAID = {
    "letters at the end": r"""
4|4s
\frac{1}{2}|\frac{1}{2} b h
6|6t
5|5h
x^2|x^2 m
4|4h + m
5 km|5 m
""",
    "a number as text": r"""
\text{4 or 5}|5
\text{not 18}|18
\text{17}|18
""",
    "more than was asked": r"""
5 \text{ hours and } 6 \text{ minutes}|5
5\text{ apples and }6\text{ pears}|5
6x = 5|5
x+6=5|5
x^2=5|5
2(x + 1) = 5|5
""",
    "relations": r"""
\neq 4|4
\ne 4|4
\not= 4|4
≠ 4|4
\geq 4|4
\ge 4|4
≥ 4|4
\le 4|4
\leqslant 4|4
< 4|4
> 4|4
\approx 4|4
\sim 4|4
\equiv 4|4
x \neq 4|4
x > 4|4
x \approx 4|4
x \ge 4|x > 4
x > 4|x < 4
4 \to 5|5
4 \Rightarrow 5|5
""",
    "equations": r"""
3=4|4
3 = 4|4
5 = 3 = 4|4
x = 3 = 4|4
4 = 5|4
x = 5|4
""",
    "units": r"""
3\text{ m}|3\text{ km}
3 m|3 km
3m|3km
3\text{ meters}|3 km
15\text{ cm}^3|15\mbox{ cm}^2
15\text{ cm}|15\text{ cm}^2
3\text{ hours}|3\text{ minutes}
60\text{ km/h}|60\text{ miles per hour}
3\text{ cents}|\$3
45\text{ radians}|45^\circ
5\text{ million}|5
5\text{ hundred dollars}|5
5\text{ million}|5\text{ billion}
\frac{1}{2}\text{ million}|\frac{1}{2}
""",
    "numbers": r"""
12345678901234567|12345678901234568
100000000000000000000.5|100000000000000000000
10^{400}|10^{401}
10^{400}|400
-5|5
−5|5
5|-5
4.0000001|4
1,00|100
""",
    "alternatives": r"""
4, 5|4
4 \text{ or } 5|4
4 \text{ or 5}|4
4 \text{ not}|4
\text{not } 4|4
\pm 4|4
5 \boxed{4}|4
\boxed{4} \boxed{5}|5
\fbox{4}|4
""",
}


def cases(tables: dict[str, str]) -> list[object]:
    return [
        pytest.param(*row, id=f"{kind}: {row[0]} for {row[1]}")
        for kind in tables
        for row in table(tables[kind])
    ]


@pytest.mark.parametrize(("given", "reference"), cases(PAID))
def test_a_box_that_says_the_reference_is_paid(strict: MathVerifier, given: str, reference: str) -> None:
    assert strict.check(f"So it is $\\boxed{{{given}}}$, as asked.", reference) == (True, True)


@pytest.mark.parametrize(("given", "reference"), cases(UNPAID))
def test_a_box_that_says_something_else_is_not_paid(
    strict: MathVerifier, lenient: MathVerifier, given: str, reference: str
) -> None:
    assert not strict.check(f"So it is $\\boxed{{{given}}}$, as asked.", reference).correct
    if "box" not in given:
        assert not lenient.check(given, reference).correct


def test_a_relation_counts_on_whichever_line_of_the_box_it_stands(strict: MathVerifier) -> None:
    assert strict.check("\\boxed{x =\n4}", "4").correct
    assert not strict.check("\\boxed{x \\approx\n4}", "4").correct


@pytest.mark.parametrize("last", ["1", "2"])
@pytest.mark.parametrize("size", [17, 400, 5000, 100_000])
def test_integers_are_compared_to_their_last_digit(strict: MathVerifier, size: int, last: str) -> None:
    reference = "7" * (size - 1) + "1"
    given = reference[:-1] + last
    assert strict.check(f"\\boxed{{{given}}}", reference).correct is (last == "1")
    assert agree(f"-{given}", reference) is False


@pytest.mark.parametrize(
    ("response", "content", "paid"),
    [
        (r"\boxed{4}", "4", True),
        (r"\boxed {4}", "4", True),
        (r"\boxed{5} or \boxed{4}", "4", True),
        (r"\boxed{4} or \boxed{5}", "5", False),
        (r"\boxed{4} no wait \boxed{5", None, False),
        (r"\boxed{4} no wait \boxed{\frac{5}{6}", None, False),
        (r"\boxed{4} no wait \boxed 5", None, False),
        (r"\boxed{4} no wait \boxed", None, False),
        (r"\boxed{5 \boxed{4}", None, False),
        (r"\boxed{\boxed{4}}", r"\boxed{4}", True),
        (r"\boxed{4} \boxedtext", "4", True),
        (r"\boxed{\left\{ 4 \right.}", r"\left\{ 4 \right.", False),
        (r"\boxed{4\}", None, False),
        (r"\boxed{}", "", False),
        ("4", None, False),
    ],
)
def test_the_last_box_decides_and_an_unfinished_one_decides_nothing(
    strict: MathVerifier, lenient: MathVerifier, response: str, content: str | None, paid: bool
) -> None:
    assert last_boxed(response) == content
    assert strict.check(response, "4") == (paid, content is not None)
    assert lenient.check(response, "4").correct is (paid or response == "4")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("no thinking", "no thinking"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>a", ""),
        ("b<think>a", ""),
        ("<think>a</think>b<think>c", ""),
        ("<think>a</think>", ""),
        ("<think><think>a</think>b</think>c", "c"),
    ],
)
def test_what_follows_the_thinking_is_the_answer(response: str, answer: str) -> None:
    assert after_thinking(response) == answer


@pytest.mark.parametrize(
    "thinking", ["<think>{}</think>", "{}</think>", "<think>{}", "<think>{}</think>It is 5."]
)
def test_a_box_in_the_thinking_is_not_paid(
    strict: MathVerifier, lenient: MathVerifier, thinking: str
) -> None:
    response = thinking.format(r"\boxed{4}")
    assert strict.check(response, "4") == lenient.check(response, "4") == (False, False)
    assert strict.check(f"<think>{response}</think>\\boxed{{4}}", "4") == (True, True)


def test_without_a_box_the_last_expression_counts_where_allowed(
    strict: MathVerifier, lenient: MathVerifier
) -> None:
    for response in ("The answer is 18.", "18", "x = 18", "First 3.\n\nThen it is $18$."):
        assert lenient.check(response, "18") == (True, False)
        assert strict.check(response, "18") == (False, False)
    for response in ("The answer is 17.", "It is not 17 but \\geq 18", "  ", "\\boxed{18"):
        assert lenient.check(response, "18") == (False, False)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1,250.50", r"\$1{,}250.5"),
        ("1.2505e3", "1250.5"),
        (r"1.2505 \times 10^{3}", "+1250.5"),
        ("-0", "0.00"),
        ("0012.", "12"),
        (".5", "5e-1"),
        ("10^-2", "0.01"),
    ],
)
def test_numbers_in_other_spellings_are_the_same(first: str, second: str) -> None:
    assert read_number(first) == read_number(second) is not None


@pytest.mark.parametrize(
    "text", ["", ".", "-", "1,2,3", "1 000", "x", "1/2", "10^", "1e", "--1", "١٢", "1,2345"]
)
def test_what_is_no_plain_number_is_not_read_as_one(text: str) -> None:
    assert read_number(text) is None


ENDLESS = [
    "9^{9^{9^{9^9}}}",
    "99999999!",
    r"\sum_{k=1}^{10^{12}} \frac{1}{k^k}",
    "(" * 2000 + "4" + ")" * 2000,
    r"\sqrt{" * 400 + "4" + "}" * 400,
    "+".join(f"x^{{{n}}}" for n in range(500)),
    "{" * 50_000 + "}" * 50_000,
    " " * 99_000,
    "1," * 49_000,
]


def test_answers_that_would_take_for_ever_cost_two_seconds_each_and_the_others_are_judged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    responses = [f"\\boxed{{{given}}}" for endless in ENDLESS for given in (endless, r"\frac{8}{2}")]
    with MathVerifier(seconds=SECONDS) as verifier:
        verifier.check(r"\boxed{x}", "4")
        started = time.monotonic()
        checked = verifier.check_many(responses, ["4"] * len(responses))
        took = time.monotonic() - started
    assert [each.correct for each in checked[1::2]] == [True] * len(ENDLESS)
    assert not checked[0].correct
    assert took < SECONDS * len(ENDLESS) + SLACK
    assert "count as wrong because they could not be checked" in caplog.text
