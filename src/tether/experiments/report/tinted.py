"""Responses token by token on a page: what is the same whatever the tint stands for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Token:
    """One token as it is shown."""

    text: str
    breaks: bool
    """Whether a new line begins after it."""
    tip: str
    """The numbers, in words."""


def tint(value: float, levels: Sequence[float]) -> int:
    """How many of the rising levels a value reaches; none where it is NaN.

    >>> tint(0.5, (0.1, 0.5, 1.0)), tint(float("nan"), (0.1, 0.5, 1.0))
    (2, 0)
    """
    return sum(value >= level for level in levels)


def tint_texts(edges: Sequence[str]) -> list[str]:
    """What each tint means, from the weakest.

    >>> tint_texts(("0.1", "0.5"))
    ['< 0.1', '0.1-0.5', '> 0.5']
    """
    return [f"< {edges[0]}", *(f"{low}-{high}" for low, high in pairwise(edges)), f"> {edges[-1]}"]


def verdict(right: bool, reward: float) -> str:
    """``"right"``, ``"partly right"`` or ``"wrong"``."""
    return "right" if right else "partly right" if reward > 0 else "wrong"


def probability_text(log_prob: float) -> str:
    """In per cent; what rounding made of a certain token is not more than that."""
    return f"{100 * math.exp(min(log_prob, 0.0)):.3g} %"


def prompt_text(prompt: object) -> str:
    """A prompt as one text, the turns of a conversation below each other.

    >>> prompt_text([{"role": "user", "content": "2 + 2?"}])
    'user: 2 + 2?'
    """
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n\n".join(_turn(turn) for turn in prompt)


def _turn(turn: object) -> str:
    if not isinstance(turn, Mapping):
        return str(turn)
    content = str(turn.get("content", ""))
    return f"{turn['role']}: {content}" if turn.get("role") else content


def visible(text: str) -> str:
    """A token's text with line ends, tabs and control characters made visible; nothing else is changed.

    >>> visible("a\\n"), visible("\\x00"), visible("")
    ('a↵', '␀', '∅')
    """
    if not text:
        return "∅"
    shown = []
    for character in text:
        code = ord(character)
        if character == "\n":
            shown.append("↵")
        elif code < 0x20:
            shown.append(chr(0x2400 + code))  # Unicode's pictures of control characters
        elif 0xD800 <= code < 0xE000 or code == 0x7F or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
            shown.append("\ufffd")  # half a pair, delete, and what would turn the reading direction
        else:
            shown.append(character)
    return "".join(shown)
