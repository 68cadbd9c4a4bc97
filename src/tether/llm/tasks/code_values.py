"""Reading what a sandboxed program gave, which may be anything, as plain data of bounded cost.

The lines come from `tether.llm.tasks.code_harness.main`, or from a program that wrote its own. Reading is
linear in their length and never raises: what is no well-formed value is None here, and its call has failed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn

from tether.llm.tasks.code_harness import DEPTH

BITS = 2**17
"""Bits of the largest integer that is worked with."""
_SAME_HASH = 64


class Items:
    """What iterates over plain data and is no data itself, such as a generator; it equals nothing.

    >>> list(Items([1, 2]))
    [1, 2]
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = tuple(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class Value:
    """One value that a call gave.

    >>> Value((1, 2)).data
    (1, 2)
    """

    def __init__(self, data: Any) -> None:
        self.data = data


def read_results(text: str, calls: int) -> list[Value | None]:
    """The values of `calls` calls, in order, None for each that failed.

    Lines that are missing at the end stand for calls that were not reached. More lines than calls are not
    the harness's: then nothing counts.

    >>> [value and value.data for value in read_results('[["tuple",1]]\\n[]\\n', 3)]
    [(1,), None, None]
    """
    found: list[Value | None] = []
    start = 0
    while (end := text.find("\n", start)) >= 0:
        if len(found) == calls:
            return [None] * calls
        found.append(_read_line(text[start:end]))
        start = end + 1
    if start != len(text) and len(found) == calls:
        return [None] * calls
    return found + [None] * (calls - len(found))


def _read_line(line: str) -> Value | None:
    try:
        form = _DECODER.decode(line)
        if type(form) is not list or len(form) != 1:
            return None
        return Value(decode(form[0]))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _refuse(written: object) -> NoReturn:
    raise ValueError("the harness writes no such thing")


def _small(digits: str) -> int:
    """Only short integers are written in decimal, whose reading takes quadratic time."""
    if len(digits) > 20:
        raise ValueError("too many digits")
    return int(digits)


_DECODER = json.JSONDecoder(
    parse_float=_refuse, parse_constant=_refuse, object_pairs_hook=_refuse, parse_int=_small
)


def decode(form: Any, depth: int = 0) -> Any:
    """Make a value of what `encode` wrote, once it is read as JSON.

    >>> decode(["dict", "a", ["set", 1, 2]])
    {'a': {1, 2}}
    """
    kind = type(form)
    if form is None or kind is bool or kind is int or kind is str:
        return form
    if kind is not list or not form or type(form[0]) is not str or depth > DEPTH:
        raise ValueError("no form of a value")
    tag, parts = form[0], form[1:]
    if tag in _SCALARS:
        if not all(type(part) is str for part in parts):
            raise ValueError("a number or bytes are written as text")
        return _SCALARS[tag](*parts)
    if tag not in _CONTAINERS:
        raise ValueError(f"no type {tag[:40]!r}")
    return _CONTAINERS[tag]([decode(part, depth + 1) for part in parts])


def bounded(number: int) -> int:
    """Refuse an integer too large to work with."""
    if number.bit_length() > BITS:
        raise OverflowError(f"an integer of more than {BITS} bits")
    return number


def distinct(items: Iterable[Any]) -> list[Any]:
    """Elements on their way into a set or dict; chosen with equal hashes, they would take quadratic time.

    >>> distinct([3, 1, 3])
    [3, 1, 3]
    """
    listed = list(items)
    by_hash = sorted(listed, key=hash)
    for _, group in itertools.groupby(by_hash, hash):
        kept: list[Any] = []
        for item in group:
            if item not in kept:
                kept.append(item)
            if len(kept) > _SAME_HASH:
                raise OverflowError("too many elements of one hash")
    return listed


def make_dict(pairs: Collection[Any]) -> dict[Any, Any]:
    """A dict of pairs whose keys passed `distinct`."""
    distinct(key for key, _ in pairs)
    return dict(pairs)


def _pairs(parts: list[Any]) -> dict[Any, Any]:
    if len(parts) % 2:
        raise ValueError("a key without a value")
    return make_dict(list(zip(parts[::2], parts[1::2], strict=True)))


_SCALARS: dict[str, Callable[..., Any]] = {
    "int": lambda text: bounded(int(text, 16)),  # linear for this base
    "float": float.fromhex,
    "complex": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
    "bytes": bytes.fromhex,
    "bytearray": lambda text: bytearray.fromhex(text),
}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda items: items,
    "tuple": tuple,
    "set": lambda items: set(distinct(items)),
    "frozenset": lambda items: frozenset(distinct(items)),
    "dict": _pairs,
    "iterable": Items,
}
