"""What a judge's process runs to check mathematics; imported there by path, since math-verify takes long.

math-verify guards its own work with signals; here the judge keeps the time, so they stay off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Eq  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

# Else a box that is no formula (\neq 4) would count as the last number in it.
_WITH_UNITS = LatexExtractionConfig()
# Where letters at the end are variables: math-verify would take an m off for metres.
_WITHOUT = LatexExtractionConfig(normalization_config=replace(_WITH_UNITS.normalization_config, units=False))


def check(forms: list[tuple[str, bool, bool]], answer: str, variable: bool) -> bool:
    """Whether one of the forms of a response gives `answer`.

    Each is a text, whether it is a formula, and whether it ends in variables, as `variable` is of the answer.
    """
    wanted = _parse(answer, formula=True, variable=variable)
    for text, formula, ends_in_variable in forms:
        found = _parse(text, formula, ends_in_variable)
        if not any(_is_absurd(each) for each in found) and verify(wanted, found, timeout_seconds=None):
            return True
    return False


def _parse(text: str, formula: bool, variable: bool) -> list[Any]:
    if formula:
        config = [_WITHOUT if variable else _WITH_UNITS]
        return list(parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None))
    return list(parse(text, parsing_timeout=None))


def _is_absurd(found: Any) -> bool:
    """Whether it holds an equation between numbers that is not true, such as 3 = 4."""
    if not isinstance(found, Basic):
        return False
    return any(
        not verify(equation.lhs, equation.rhs, timeout_seconds=None)
        for equation in found.atoms(Eq)
        if not equation.free_symbols and not equation.atoms(AppliedUndef)  # f(2) = 4 names what is asked
    )


# What first checks load and tabulate, in sympy and in the grammar, the children then find ready. A reference
# written in another way is given along, since equal texts are not looked at any further.
_EXAMPLES = (
    *("x + 1", "x^2 + 3x - 1", "p - q", r"3x^3 - \frac{2y}{5}", "y = 2x + 3", "f(x) = x^{2}", "x > 4"),
    *("17", "-0.5", "10^5", "4:5", "50%", r"\frac{3}{4}", r"-\frac{1}{2}", r"3\sqrt{13}", r"2 + \sqrt{3}"),
    *(r"2\pi", r"\frac{\pi}{2}", r"90^\circ", "3 + 4i", r"\log_2 6", r"\sin 4", r"5\text{ cm}^2"),
    *("(3,4)", r"\left(-3, \frac{\pi}{2}\right)", "[2,4)", r"(-\infty, 2) \cup (3, \infty)", "x = 2, 3"),
    *("5, 3, 7", r"\{1, 2\}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\text{even}", r"\text{(B)}"),
)
for _example in _EXAMPLES:
    check(
        [(_example, True, False), (_example, True, True), (f"The answer is ${_example}$.", False, False)],
        f"{_example} + 1",
        False,
    )
