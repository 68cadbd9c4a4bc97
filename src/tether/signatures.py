"""What a loss or an estimator can be told, read from its signature: the one place where it says so."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tether.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Option:
    """A setting of a function."""

    name: str
    type: Any
    """Its annotation; of a function without annotations, the type of the default."""
    default: Any
    help: str
    """The entry of the docstring's Args; empty if there is none."""


def options_of(function: Callable[..., Any], name: str, given: Collection[str] = ()) -> dict[str, Option]:
    """The settings a function can be given: its keyword-only parameters.

    Args:
        function: whose keywords are settings, but for some.
        name: of the function in messages.
        given: keywords that are handed over and not chosen.

    Raises:
        ConfigError: a setting without a default.

    >>> def cut(ratio, *, low: float = 0.2, seed=None):
    ...     '''Cut a ratio.
    ...
    ...     Args:
    ...         low: how far down.
    ...     '''
    >>> options_of(cut, "cut", given={"seed"})
    {'low': Option(name='low', type=<class 'float'>, default=0.2, help='how far down.')}
    """
    return dict(_options_of(function, name, frozenset(given)))


@functools.cache  # a table of a thousand runs asks a thousand times
def _options_of(function: Callable[..., Any], name: str, given: frozenset[str]) -> dict[str, Option]:
    keywords = {key: value for key, value in _keywords(function).items() if key not in given}
    without = [key for key, parameter in keywords.items() if parameter.default is parameter.empty]
    if without:
        raise ConfigError(f"{name}'s options {', '.join(without)} need defaults.")
    types, texts = _types_of(function, keywords, name), _argument_texts(function)
    return {
        key: Option(key, types.get(key, type(parameter.default)), parameter.default, texts.get(key, ""))
        for key, parameter in keywords.items()
    }


def _types_of(function: Callable[..., Any], keywords: Collection[str], name: str) -> dict[str, Any]:
    """Of the keywords alone: what else is annotated may be known to type checkers only."""
    plain = _written(function)
    chosen = {key: value for key, value in getattr(plain, "__annotations__", {}).items() if key in keywords}
    try:
        return typing.get_type_hints(
            SimpleNamespace(__annotations__=chosen), getattr(plain, "__globals__", None)
        )
    except NameError as error:
        raise ConfigError(
            f"{name}'s annotations cannot be read ({error}). Import what its keywords are annotated with "
            "outside of TYPE_CHECKING."
        ) from error


def check_known(name: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse settings that a function does not have.

    Raises:
        ConfigError: naming the setting, and those that there are.

    >>> check_known("cut", {"hihg": 1}, ["low", "high"])
    Traceback (most recent call last):
    ...
    tether.errors.ConfigError: cut has no option 'hihg'. Did you mean 'high'? It has low, high.
    """
    for option in options:
        if option not in known:
            has = f"It has {', '.join(known)}." if known else "It has none."
            raise ConfigError(f"{name} has no option {option!r}.{did_you_mean(option, known)} {has}")


def places_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a function is given by place."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def keywords_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names of all keywords of a function."""
    return frozenset(_keywords(function))


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it was written: of a partial one or an object that is called, that behind it."""
    plain = inspect.unwrap(function)
    if isinstance(plain, functools.partial):
        return _written(plain.func)
    return plain if inspect.isroutine(plain) or inspect.isclass(plain) else type(plain).__call__


def _argument_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Name -> text of the docstring's Args; "low, high: text" is the text of both."""
    _, _, text = (inspect.getdoc(_written(function)) or "").partition("Args:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", "\n" + re.split(r"\n(?=\S)", text)[0]):
        names, colon, meaning = entry.partition(":")
        if colon:
            found |= dict.fromkeys(names.replace(",", " ").split(), " ".join(meaning.split()))
    return found
