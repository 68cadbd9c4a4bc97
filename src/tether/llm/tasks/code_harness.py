"""What calls a candidate's function inside the sandbox; its source is sent there, so it imports nothing of
Tether.

What a call returns leaves as one line of text that stands for plain data: None, numbers, text, bytes, lists,
tuples, sets, dicts, and what iterates over such. A line holds no expected value and is worth nothing by
itself: it is read and compared outside (`tether.llm.tasks.code_values`), so a program that writes the lines
itself gains only what it knew.

A value is read by its type, through the methods of the plain type itself, so a class that overrides them, or
says it is another, has no say. A subclass (a named tuple, a Counter, an IntEnum) counts as the plain value it
holds; an object of any other class makes its call fail.
"""

from __future__ import annotations

import builtins
import collections
import itertools
import sys
import types
from json.encoder import encode_basestring_ascii
from os import _exit, dup, dup2, write
from typing import Any

# Functions defined below look names up in this copy, whatever a program does to the module itself.
globals()["__builtins__"] = dict(vars(builtins))

DEPTH = 100
"""How deeply lists and the like may be nested."""
OUTPUT = 2**20
"""Bytes that a program may write to each of its streams."""
ROOM = OUTPUT - 2**16
"""Characters that all results of one program may take together."""

_ITERABLES = list(
    {
        *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
        *(enumerate, filter, map, range, reversed, zip, types.GeneratorType, collections.deque),
        *(type({}.keys()), type({}.values()), type({}.items())),
        *map(type, map(iter, [(), [], {}, {}.values(), {}.items(), set(), "", b"", range(0)])),
        *map(type, [reversed([]), reversed({}), reversed(range(0))]),
    }
)


class TooLargeError(ValueError):
    """A value nested too deeply, or with too much in it, to leave the sandbox."""


def encode(value: Any, room: int = ROOM) -> str:
    """Write plain data as JSON in which tagged lists stand for what JSON lacks.

    >>> encode([1, (2.5, "x")])
    '["list",1,["tuple",["float","0x1.4000000000000p+1"],"x"]]'
    """
    left = [room]
    pieces: list[str] = []

    def put(piece: str) -> None:
        left[0] -= len(piece)
        if left[0] < 0:
            raise TooLargeError(f"more than {room} characters")
        pieces.append(piece)

    def put_all(tag: str, items: Any, depth: int) -> None:
        if depth == DEPTH:
            raise TooLargeError(f"nested more than {DEPTH} deep")
        put(f'["{tag}"')
        for item in items:
            put(",")
            put_value(item, depth + 1)
        put("]")

    def put_value(value: Any, depth: int) -> None:
        kind = type(value)
        scalar = _scalar(value, kind, left[0])
        if scalar is not None:
            put(scalar)
        elif issubclass(kind, dict):
            put_all("dict", (part for item in dict.items(value) for part in item), depth)
        else:
            for plain in (list, tuple, set, frozenset):
                if issubclass(kind, plain):
                    put_all(plain.__name__, plain.__iter__(value), depth)
                    return
            if not any(kind is iterable for iterable in _ITERABLES):
                raise TypeError(f"{type.__repr__(kind)} is no plain data")
            put_all("iterable", value, depth)

    put_value(value, 0)
    return "".join(pieces)


def _scalar(value: Any, kind: type, room: int) -> str | None:
    """A value without parts, written through the methods of its plain type; None for any other."""
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if issubclass(kind, int):
        number = int.__add__(value, 0)
        return repr(number) if -(2**63) < number < 2**63 else f'["int","{hex(number)}"]'
    if issubclass(kind, float):
        return f'["float","{float.hex(value)}"]'
    if issubclass(kind, complex):
        exact = complex.__pos__(value)
        return f'["complex","{exact.real.hex()}","{exact.imag.hex()}"]'
    for plain in (str, bytes, bytearray):
        if issubclass(kind, plain) and plain.__len__(value) > room:
            raise TooLargeError(f"more than {room} characters")
    if issubclass(kind, str):
        return encode_basestring_ascii(str.__str__(value))
    for plain in (bytes, bytearray):
        if issubclass(kind, plain):
            return f'["{plain.__name__}","{plain.hex(value)}"]'
    return None


def main(preamble: str, code: str, calls: list[str], entry: str) -> None:
    """Run preamble and candidate, then evaluate every call and write what it gives as a line; end.

    A line is ``[<value>]``, or ``[]`` for a call that fails or gives no plain data. The calls' arguments see
    what the preamble defined, not what the candidate made of it. The candidate's own output goes to standard
    error, so that the results stand alone, and nothing it left behind (threads, exit handlers) is waited for.
    """
    results = dup(1)
    dup2(2, 1)
    inputs = _module("preamble", {})
    exec(compile(preamble, "preamble.py", "exec"), inputs)
    candidate = _module("solution", inputs)
    compiled = [compile(call, "test.py", "eval") for call in calls]
    try:
        exec(compile(code, "solution.py", "exec"), candidate)
    except BaseException:  # noqa: BLE001 - the candidate's own failure: there are no results
        sys.excepthook(*sys.exc_info())
        _exit(1)
    if entry in candidate:
        inputs[entry] = candidate[entry]
    room = ROOM
    for call in compiled:
        try:
            line = f"[{encode(eval(call, inputs), room)}]\n"  # noqa: S307 - inside the sandbox
        except BaseException:  # noqa: BLE001 - the candidate's own failure is the result
            line = "[]\n"
        room -= len(line)
        _write_all(results, line.encode("ascii"))
    _exit(0)


def _module(name: str, names: dict[str, Any]) -> dict[str, Any]:
    """The namespace of a module that Python knows, as dataclasses and others want it."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    vars(module).update({**names, "__name__": name, "__builtins__": builtins})
    return vars(module)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[write(descriptor, data) :]
