"""What calls a candidate's function inside the sandbox; its source is sent there, so it imports nothing of
Tether.

A value leaves the sandbox as plain data in one canonical form, so that comparing it outside runs none of
the candidate's code. Equal values of Python have equal forms: 1, 1.0 and True have one, and the elements of
a set or the items of a dict are sorted by theirs.
"""

from __future__ import annotations

import json
import os
from typing import Any


def canonical(value: Any) -> list[Any]:
    """Turn a value into lists and text, the same for equal values; an unknown type equals nothing.

    >>> canonical([1, 2.5]), canonical(True) == canonical(1.0)
    (['list', [['int', '0x1'], ['float', '2.5']]], True)
    """
    if value is None:
        return ["none"]
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        integral = value - value == 0 and value == int(value)
        return ["int", hex(int(value))] if integral else ["float", repr(float(value))]
    if isinstance(value, complex):
        return ["complex", repr(complex(value))] if value.imag else canonical(value.real)
    if isinstance(value, str):
        return ["str", str(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", [canonical(item) for item in value]]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted((canonical(item) for item in value), key=json.dumps)]
    if isinstance(value, dict):
        items = [[canonical(key), canonical(item)] for key, item in value.items()]
        return ["dict", sorted(items, key=json.dumps)]
    return ["other", type(value).__name__]


def main(code: str, calls: list[str], names: list[str]) -> None:
    """Define what the candidate defines, evaluate every call, and write the results as one line of JSON.

    The candidate's own output goes to standard error, so that the results stand alone.
    """
    results_stream = os.dup(1)
    os.dup2(2, 1)
    namespace: dict[str, Any] = {"__name__": "solution"}
    results: list[list[Any]] = []
    try:
        exec(compile(code, "solution.py", "exec"), namespace)
        for name in names:  # what tests call the candidate, besides its own name
            namespace.setdefault(name, namespace.get(names[0]))
    except BaseException as error:  # noqa: BLE001 - the candidate's own failure is the result
        results = [["error", f"{type(error).__name__}: {error}"[:200]] for _ in calls]
        calls = []
    for call in calls:
        try:
            results.append(["value", canonical(eval(call, namespace))])  # noqa: S307 - inside the sandbox
        except BaseException as error:  # noqa: BLE001
            results.append(["error", f"{type(error).__name__}: {error}"[:200]])
    with os.fdopen(results_stream, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(results) + "\n")
