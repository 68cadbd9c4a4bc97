"""Settings, dates and values as a page shows them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from tether.experiments.report.tinted import visible


def setting_text(value: object) -> str:
    """A setting's value as a reader would write it.

    >>> setting_text(("gsm8k", "math")), setting_text(()), setting_text(None), setting_text({"terms": 3})
    ('gsm8k, math', '-', '-', 'terms: 3')
    >>> setting_text(True), setting_text(1e-4)
    ('yes', '0.0001')
    """
    if value is None or value == () or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {setting_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(setting_text(inner) for inner in value)
    return visible(str(value))


def date_text(moment: str) -> str:
    """A moment in ISO 8601 as people write it.

    >>> date_text("2026-11-03T14:54:11+00:00")
    '3 November 2026, 14:54 UTC'
    """
    there = datetime.fromisoformat(moment).astimezone(UTC)
    return f"{there.day} {there:%B %Y, %H:%M} UTC"


def two_lines(text: str) -> tuple[str, str]:
    """A value and its interval apart, for a narrow column.

    >>> two_lines("50 % (40-60)"), two_lines("-")
    (('50 %', '(40-60)'), ('-', ''))
    """
    value, opened, interval = text.partition(" (")
    return value, opened.strip() + interval
