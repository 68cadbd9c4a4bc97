"""Values of settings against the types that their fields declare, as files hold them."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, Union

from tether.errors import ConfigError

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def typed_value(value: Any, hint: Any, path: str) -> Any:
    """A plain value as the type of its setting has it: lists as tuples, 3e-4 (to YAML a text) as a number.

    Types other than plain ones, tuples, mappings, choices and unions of those are taken as they are.

    Args:
        value: what a file or a caller gave.
        hint: the field's type.
        path: the setting's dotted name, for the message.

    Raises:
        ConfigError: a value of another type; the message names the setting, the value and what is wanted.

    >>> typed_value([64, 64], tuple[int, ...], "policy.hidden_sizes"), typed_value("3e-4", float, "rate")
    ((64, 64), 0.0003)
    >>> typed_value(2.5, int, "episodes")
    Traceback (most recent call last):
    ...
    tether.errors.ConfigError: episodes is 2.5; give a whole number.
    """
    found = _converted(value, hint)
    if found is _REFUSED:
        raise ConfigError(f"{path} is {value!r}; give {_wanted(hint)}.")
    return found


_REFUSED = object()


def _converted(value: Any, hint: Any) -> Any:
    """The value as the type has it, or `_REFUSED`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        tried = (_converted(value, one) for one in inner)
        return next((found for found in tried if found is not _REFUSED), _REFUSED)
    if origin is Literal:
        return value if value in inner else _REFUSED
    if origin is tuple:
        return _as_tuple(value, inner)
    if hint is types.NoneType:
        return None if value is None else _REFUSED
    if hint in _PLAIN:
        return _as_plain(value, hint)
    if dict in (hint, origin):
        return value if isinstance(value, Mapping) else _REFUSED
    return tuple(value) if isinstance(value, list) else value


def _as_tuple(value: Any, inner: tuple[Any, ...]) -> Any:
    if not isinstance(value, list | tuple):
        return _REFUSED
    kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
    if len(kinds) != len(value):
        return _REFUSED
    found = tuple(_converted(one, kind) for one, kind in zip(value, kinds, strict=True))
    return _REFUSED if any(one is _REFUSED for one in found) else found


def _as_plain(value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return _REFUSED
    if isinstance(value, bool) or kind in (bool, str):
        return value if isinstance(value, kind) and isinstance(value, bool) == (kind is bool) else _REFUSED
    return value if isinstance(value, Integral if kind is int else Real) else _REFUSED


def _wanted(hint: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(one) for one in inner)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        kinds = dict.fromkeys(_wanted(one) for one in inner if one is not ...)
        return f"a list, each {' or '.join(kinds)}" if kinds else "a list"
    if hint is types.NoneType:
        return "none"
    return _PLAIN.get(hint, "values by names")
