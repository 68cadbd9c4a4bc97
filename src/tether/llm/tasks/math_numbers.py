"""Plain numbers in text, compared exactly however long they are, and the units behind them."""

from __future__ import annotations

import re
from dataclasses import dataclass

MINUS = "-\u2212\u2013"
"""Hyphen, minus and en dash: what writers use as a sign."""

_SEPARATOR = r"(?:,(?:\\!\ ?)?|\{,\}|\\,|[\u00a0\u2009\u202f])"
WHOLE = rf"(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+)"
"""A whole number, with the thousands separators of prose and of TeX, thin and unbreakable spaces included."""

_TEN_TO = r"10\ ?\^\ ?(?:\{\ ?(?P<braced>[-+]?\d{1,12})\ ?\}|(?P<bare>-?\d{1,12}))"
_NUMBER = re.compile(
    rf"(?P<sign>[{MINUS}+]?)\ ?(?:\\?\$)?\ ?(?:{_TEN_TO}"
    rf"|(?P<whole>{WHOLE})?(?:\.(?P<part>\d*))?"
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


_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(
    rf"(?<=[\d}}])(?:[\s~]|\\[ ,;!])*(?:\\(?:text|textrm|mbox|mathrm|rm)\s?(?P<open>\{{)\s*)?"
    rf"(?P<word>{'|'.join(_SCALES)})s?\b(?(open)\s*(?P<close>\}})?)"
)


def with_scales(text: str) -> str:
    r"""A text whose numbers have powers of ten for words behind them, which would pass for units.

    >>> with_scales(r"5\text{ million}"), with_scales(r"1.5 million"), with_scales(r"5\text{ thousand men}")
    ('5\\times 10^{6}', '1.5\\times 10^{6}', '5\\times 10^{3}\\text{ men}')
    """

    def power(found: re.Match[str]) -> str:
        rest = r"\text{ " if found["open"] and not found["close"] else ""
        return rf"\times 10^{{{_SCALES[found['word']]}}}{rest}"

    return _SCALE.sub(power, text)


_LONGEST = 120  # characters at the end of an answer in which a unit is looked for

_TEXT = (
    r"\\(?:text|textrm|mbox|mathrm|rm)\s?\{(?P<text>[^{}]*)\}"
    r"|(?<=[\d)}.,;!~\s])(?P<bare>[A-Za-z][A-Za-z./ ]*)"
)
_ENDING = re.compile(rf"(?:{_TEXT})\s?(?:\^\s?\{{?\s?(?P<power>\d)\s?\}}?)?\s?\$?\.?\Z")
_DEGREES = re.compile(r"(?:\^\s?\{?\s?\\circ\s?\}?|°)\s?\$?\.?\Z")
_DOLLARS = re.compile(r"\s{0,9}-?\s?\\?\$\s?-?\.?\d")

_NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gm gram",
    "kg": "kg kilogram",
    "oz": "oz ounce",
    "lb": "lb pound",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
    "gal": "gal gallon",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "wk week",
    "month": "month",
    "year": "yr year",
    "dollar": "dollar",
    "cent": "cent",
    "degree": "deg degree",
    "radian": "rad radian",
    "celsius": "celsius",
    "fahrenheit": "fahrenheit",
}
_UNITS = {word: unit for unit, words in _NAMES.items() for word in words.split()}
_UNITS |= {f"{word}s": unit for word, unit in _UNITS.items() if len(word) > 1}
_SPEEDS = {"mph": ("mi", "/h"), "kmh": ("km", "/h"), "kmph": ("km", "/h"), "kph": ("km", "/h")}


# Where math-verify takes off a unit that is not marked as text.
_SHORT = re.compile(r"(?:\d|[})~\s]|\\[ ,;:!])(?P<word>[A-Za-z]{1,2})\s?\$?\.?\Z")
_FRACTION = re.compile(rf"[{MINUS}]?\s?(?:\\[dt]?frac\s?\{{\d+\}}\s?\{{\d+\}}|\d+\s?/\s?\d+)", re.ASCII)
_SPACE = re.compile(r"(?:[\s~]|\\[ ,;:!])*\Z")
WORDS = r"\\(?:text[a-z]*|mbox|mathrm|rm)\s*\{[^{}]*\}"
"""Words inside a formula."""

_NO_LETTERS = re.compile(rf"{WORDS}|\\[A-Za-z]+")


def ends_in_variable(answer: str, reference: str | None = None) -> bool:
    r"""Whether one or two letters at an answer's end are variables, and no unit of what is before them.

    A unit is a known one behind a number. One letter right behind it (4s) is a variable of a reference, and
    in a response to one that has that letter.

    Args:
        answer: a reference, or a response's if its `reference` is given.

    >>> [ends_in_variable(text) for text in ("4h + m", r"2\pi hr", "4s", "5 m", "5cm", "7")]
    [True, True, True, False, False, False]
    >>> ends_in_variable("5m", "5"), ends_in_variable(r"\frac{1}{2} m", r"\frac{m}{2}")
    (False, True)
    """
    answer = answer.strip()
    ending = answer[-_LONGEST:]
    match = _SHORT.search(ending)
    if match is None:
        return False
    word, before = match["word"], answer[: match.start("word") - len(ending)]
    number = _SPACE.sub("", before) if len(before) <= _LONGEST else ""
    if word not in _UNITS or (read_number(number) is None and _FRACTION.fullmatch(number) is None):
        return True
    if reference is None:
        return len(word) == 1 and number == before
    return not set(word).isdisjoint(_variables(reference))


def _variables(reference: str) -> set[str]:
    """Letters of a reference that are in no command, no text and no unit."""
    reference = reference.strip()
    if not ends_in_variable(reference):
        reference = _SHORT.sub("", reference)
    return set(re.findall("[A-Za-z]", _NO_LETTERS.sub(" ", reference)))


def unit_of(answer: str) -> tuple[str, ...] | None:
    r"""The unit an answer ends in, in one spelling; None for none or one that is not known here.

    >>> unit_of(r"3\text{ square meters}") == unit_of("3 m^2")
    True
    >>> unit_of("3 miles per hour"), unit_of("3x"), unit_of("3")
    (('mi', '/h'), None, None)
    """
    ending = answer.strip()[-_LONGEST:].replace("²", "^2").replace("³", "^3")
    if _DEGREES.search(ending):
        return ("degree",)
    match = _ENDING.search(ending)
    if match is None:
        return ("dollar",) if _DOLLARS.match(answer) else None
    return _canonical(match["text"] or match["bare"] or "", match["power"])


def units_differ(given: str, reference: str) -> bool:
    r"""Whether both texts carry a unit and not the same: 3 m is not 3 km, but 3 may stand for either.

    >>> units_differ(r"3\text{ m}", "3 km"), units_differ("3", "3 km"), units_differ("3 kilometers", "3 km")
    (True, False, False)
    """
    found = None if ends_in_variable(given, reference) else unit_of(given)
    wanted = None if ends_in_variable(reference) else unit_of(reference)
    return found is not None and wanted is not None and found != wanted


def _canonical(text: str, power: str | None) -> tuple[str, ...] | None:
    inside = re.search(r"\^\W?(\d)", text)
    power = inside[1] if inside else power
    words = re.sub(r"[^a-z/ ]", "", text.lower().replace(" per ", "/")).strip()
    if words in _SPEEDS:
        return _SPEEDS[words]
    numerator, *denominators = (part.split() for part in words.split("/"))
    for names, squared in ((("square", "sq", "squared"), "2"), (("cubic", "cu", "cubed"), "3")):
        if any(name in numerator for name in names):
            numerator = [word for word in numerator if word not in names]
            power = squared
    parts = [" ".join(numerator), *(" ".join(part) for part in denominators)]
    if any(part not in _UNITS for part in parts):
        return None
    unit = _UNITS[parts[0]] + (f"^{power}" if power and power != "1" else "")
    return unit, *(f"/{_UNITS[part]}" for part in parts[1:])
