"""Signals while training: noted once, put back, passed on to whom they were for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from tether.experiments.interrupts import Interrupts


@pytest.fixture(autouse=True)
def _handlers_put_back() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_noted_signal_is_passed_on_once_to_the_handler_there_was() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with Interrupts(lambda: None) as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert (interrupts.noted, heard) == (signal.SIGTERM, [])
        interrupts.pass_on()
        interrupts.pass_on()
    assert (interrupts.noted, heard) == (None, [signal.SIGTERM])


def test_what_is_ignored_stays_ignored() -> None:
    """As Ctrl-C is in what a shell runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts(lambda: None) as interrupts:
        signal.raise_signal(signal.SIGINT)
    assert interrupts.noted is None


def test_another_thread_is_told_of_no_signals() -> None:
    entered: list[bool] = []

    def work() -> None:
        with Interrupts(lambda: None):
            entered.append(True)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]
    assert signal.getsignal(signal.SIGTERM) is before
