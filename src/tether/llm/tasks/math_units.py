"""Units at the end of an answer: whether two quantities are measured in the same one."""

from __future__ import annotations

import re

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
    "g": "g gram",
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
    found, wanted = unit_of(given), unit_of(reference)
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
