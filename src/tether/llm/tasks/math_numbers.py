"""Plain numbers in text, read in linear time and compared exactly however long they are."""

from __future__ import annotations

import re
from dataclasses import dataclass

MINUS = "-\u2212\u2013"
"""Hyphen, minus and en dash: what writers use as a sign."""

_SEPARATOR = r"(?:,(?:\\!\ ?)?|\{,\}|\\,)"
_WHOLE = rf"(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+)"
_TEN_TO = r"10\ ?\^\ ?(?:\{\ ?(?P<braced>[-+]?\d{1,12})\ ?\}|(?P<bare>-?\d{1,12}))"
_NUMBER = re.compile(
    rf"(?P<sign>[{MINUS}+]?)\ ?(?:\\?\$)?\ ?(?:{_TEN_TO}"
    rf"|(?P<whole>{_WHOLE})?(?:\.(?P<part>\d*))?"
    rf"(?:[eE](?P<e>[-+]?\d{{1,12}})|\ ?(?:\\times|\\cdot|[×x*])\ ?{_TEN_TO.replace('P<', 'P<times_')})?)",
    re.ASCII,
)
_MOST_DIGITS_OF_FLOATS = 15


@dataclass(frozen=True)
class Number:
    """The value 0.digits × 10^exponent, in the one form that has no zero at either end."""

    negative: bool
    digits: str
    exponent: int

    @property
    def is_integer(self) -> bool:
        return self.exponent >= len(self.digits)

    @property
    def is_long(self) -> bool:
        """Whether floating-point numbers cannot tell it from its neighbours."""
        return len(self.digits) > _MOST_DIGITS_OF_FLOATS


def read_number(text: str) -> Number | None:
    r"""The number that a text is, or None: digits with sign, thousands separators, point, power of ten.

    >>> read_number("1,250.50") == read_number(r"\$1{,}250.5") == read_number(r"1.2505 \times 10^3")
    True
    >>> read_number("12 apples") is None
    True
    """
    match = _NUMBER.fullmatch(text.strip().removesuffix("."))
    if match is None:
        return None
    found = match.groupdict()
    if found["braced"] or found["bare"]:
        whole, part = "1", ""
    else:
        whole, part = re.sub(r"[^0-9]", "", found["whole"] or ""), found["part"] or ""
        if not whole + part:
            return None
    powers = ("braced", "bare", "times_braced", "times_bare", "e")
    power = next((int(found[name]) for name in powers if found[name]), 0)
    return _number(found["sign"] in tuple(MINUS), whole, part, power)


def _number(negative: bool, whole: str, part: str, power: int) -> Number:
    whole = whole.lstrip("0")
    digits = (whole + part).rstrip("0")
    kept = digits.lstrip("0")
    if not kept:
        return Number(False, "", 0)
    return Number(negative, kept, len(whole) + power - (len(digits) - len(kept)))


def agree(given: str, reference: str) -> bool | None:
    r"""Whether two plain numbers are the same; None where it takes more than reading them to say.

    Equal ones are. Different integers are not, nor are different numbers of more digits than a
    floating-point number holds. What is left (3.14 for 3.1400001) is a matter of rounding.

    >>> agree("1,800.0", "1800"), agree("12345678901234567", "12345678901234568")
    (True, False)
    >>> agree(r"\frac{1}{2}", "0.5") is None
    True
    """
    found, wanted = read_number(given), read_number(reference)
    if found is None or wanted is None:
        return None
    if found == wanted:
        return True
    exact = (found.is_integer and wanted.is_integer) or found.is_long or wanted.is_long
    return False if exact else None
