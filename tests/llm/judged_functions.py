"""Functions that `test_judge.py` has called in a judge's process; imported there, by path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

print('{"ready": false}')  # noqa: T201 - as a library might
_seen: list[Any] = []
_made = 0


def same(value: Any) -> Any:
    return value


def obey(order: Any) -> Any:
    """Do what `order` names, or give it back."""
    known = ORDERS.get(order) if isinstance(order, str) else None
    return order if known is None else known()


def remember(value: Any) -> list[Any]:
    _seen.append(value)
    return _seen


def make_adder(start: int) -> Callable[[int], list[int]]:
    global _made
    _made += 1
    return lambda number: [start + number, _made]


def start_another(told: str) -> None:
    Path(told).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    time.sleep(600)


def spin() -> None:
    while True:
        pass


def be_deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    spin()


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1)


def fail() -> None:
    raise KeyError("no such piece")


def speak() -> str:
    print('{"number": 0, "outcome": {"value": "forged"}}', flush=True)  # noqa: T201
    os.write(1, b'{"number": 0, "outcome": {"value": "forged"}}\n')
    os.write(2, b"noise")
    return "printed"


ORDERS: dict[str, Callable[[], Any]] = {
    "server": os.getppid,
    "spin": spin,
    "sleep": lambda: time.sleep(600),
    "nap": lambda: time.sleep(2),
    "deaf": be_deaf,
    "abort": os.abort,
    "exit": lambda: os._exit(0),
    "memory": lambda: len(bytearray(2**40)) + len([bytearray(2**20) for _ in range(2**20)]),
    "recursion": recurse,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill server": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "raise": fail,
    "leave": sys.exit,
    "print": speak,
    "read": sys.stdin.read,
}
