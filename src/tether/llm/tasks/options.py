"""A task's options, as a command line or a file gives them, held to the signature of the task."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from tether.errors import ConfigError
from tether.experiments.settings_file import as_truth

_TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "text"),
    Path: (os.PathLike, "a path"),
    NoneType: (NoneType, "None"),
}
"""Of each type that is checked, what its values are and how it reads."""


def bind_options(task: str, factory: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options as the task's signature asks for them.

    "true" and "false" become bools, texts numbers and numbers paths where such are asked for: a command line
    cannot say which it means.

    Raises:
        ConfigError: An option is unknown, missing, or of another type than its annotation says.

    >>> def make(path: str | Path, chat: bool = True): ...
    >>> bind_options("demo", make, {"path": 2024, "chat": "false"})
    {'path': '2024', 'chat': False}
    >>> def make(seconds: float): ...
    >>> bind_options("demo", make, {"seconds": "1e1"})
    {'seconds': 10.0}
    """
    try:
        signature = inspect.signature(factory, eval_str=True)
    except (NameError, AttributeError, SyntaxError, TypeError):  # annotations for a type checker alone
        signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"Task {task!r}: {error}. Its options are: {known}.") from error
    asked = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    return {name: _as_asked(task, name, value, asked.get(name)) for name, value in options.items()}


def _as_asked(task: str, name: str, value: Any, annotation: Any) -> Any:
    """The value, of the annotation's type; as it is where that is none of `_TYPES` or a union of them."""
    asked = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if not all(isinstance(kind, type) and kind in _TYPES for kind in asked):
        return value
    if bool in asked:
        value = as_truth(value)
    for kind in (int, float):
        if kind in asked and isinstance(value, str) and str not in asked:
            with suppress(ValueError):
                value = kind(value)
    is_bool = isinstance(value, bool)  # which to Python is a number, too
    if Path in asked and isinstance(value, Real) and not is_bool:
        return str(value)
    if any(isinstance(value, _TYPES[kind][0]) and is_bool <= (kind is bool) for kind in asked):
        return value
    wanted = " or ".join(_TYPES[kind][1] for kind in asked)
    raise ConfigError(f"Task {task!r}: {name} is {value!r}; give {wanted}.")
