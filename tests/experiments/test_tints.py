"""Words stay readable on every tint of a token, in both themes of both pages."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import tether

ROOT = Path(tether.__file__).parent
PAGES = ("experiments/report/page.html.jinja", "llm/evaluation_page.html.jinja")


def luminance(colour: np.ndarray) -> float:
    """Relative luminance of an sRGB colour from 0 to 255 (WCAG 2.1)."""
    share = colour / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear)


def hexadecimal(text: str) -> np.ndarray:
    return np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)], dtype=float)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_words_are_readable_on_every_tint(page: str, theme: int) -> None:
    style = (ROOT / page).read_text()
    values = re.findall(r"--(text|card|code|tint): ([^;]+);", style)
    names = dict(values[len(values) // 2 * theme :][: len(values) // 2])
    assert set(names) == {"text", "card", "code", "tint"}
    shares = [
        float(share) for share in re.search(r"rgba\(var\(--tint\), \{\{ \[([^]]+)\]", style)[1].split(",")
    ]  # type: ignore[index]
    (strongest,) = set(re.findall(r"[ks.]5[^{]*\{ color: (#\w{6})", style))
    tint = np.array([float(part) for part in names["tint"].split(",")])
    for level, share in enumerate(shares):
        word = hexadecimal(strongest if level == 5 else names["text"])
        for ground in ("card", "code"):
            mixed = share * tint + (1 - share) * hexadecimal(names[ground])
            lighter, darker = sorted((luminance(word), luminance(mixed)), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (level, ground)  # WCAG 2.1, text
