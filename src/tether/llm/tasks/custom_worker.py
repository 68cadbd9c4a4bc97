"""What a judge's process runs to ask a verifier of the user's; imported there, by path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def verifier(name: str) -> Callable[[str, str], dict[str, Any]]:
    """The verifier at an import path ``package.module:function``, its answers in a form JSON can hold."""
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise TypeError(f"it is a {type(found).__name__}, not a function")

    def ask(response: str, answer: str) -> dict[str, Any]:
        return _portable(found(response, answer))

    return ask


def _portable(given: Any) -> dict[str, Any]:
    if all(hasattr(given, part) for part in ("reward", "correct", "parts")):
        parts = {str(name): _plain(value) for name, value in given.parts.items()}
        return {"reward": _plain(given.reward), "correct": _plain(given.correct), "parts": parts}
    return {"reward": _plain(given)}


def _plain(value: Any) -> Any:
    """A bool or number, also of numpy's or torch's; of anything else the text that shows it."""
    holds_one = getattr(value, "shape", None) == ()
    value = value.item() if holds_one else value
    return value if isinstance(value, (bool, int, float)) else {"shown": repr(value)[:100]}
