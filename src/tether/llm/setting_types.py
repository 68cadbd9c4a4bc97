"""Whether a value that was read from a word is one that a setting takes, by the setting's annotation."""

from __future__ import annotations

import functools
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tether.errors import ConfigError


@functools.cache  # a grid of a thousand runs asks a thousand times
def types_of(kind: type) -> dict[str, Any]:
    """The annotation of each field of a config or a choice.

    >>> from tether.llm.config import TrainConfig
    >>> types_of(TrainConfig)["steps"]
    <class 'int'>
    """
    return get_type_hints(kind)


def of_its_type(name: str, value: Any, hint: Any) -> Any:
    """The value as the setting takes it: as it is, and none as the word where that is one of its words.

    Args:
        name: of the setting, for the message.
        value: a number, a truth, a word or None.
        hint: the setting's annotation.

    Raises:
        ConfigError: a value of another type.

    >>> of_its_type("learning_rate", 1, float), of_its_type("quantization", None, Literal["none", "nf4"])
    (1, 'none')
    >>> of_its_type("steps", 8.5, int)
    Traceback (most recent call last):
    ...
    tether.errors.ConfigError: steps takes int, got 8.5.
    """
    # None's own type alone says nothing: an option without annotation whose default is None.
    if hint is NoneType or _fits(value, hint):
        return value
    if value is None and _fits("none", hint) and not _fits("no such word", hint):
        return "none"
    shown = hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)
    raise ConfigError(f"{name} takes {shown.replace('typing.', '')}, got {value!r}.")


def _fits(value: Any, hint: Any) -> bool:
    if hint is NoneType:
        return value is None
    origin = get_origin(hint)
    if origin is Annotated:
        return _fits(value, get_args(hint)[0])
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    plain = hint if origin is None else origin
    return isinstance(value, plain) if isinstance(plain, type) else True
