"""The process that writes rollouts: it leaves signals to the trainer, and says that it lives."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.experimental.async_grpo import async_rollout_worker

from tether.integrations import trl_async_worker
from tether.integrations.trl_async_worker import RecordingLoop


def _start_and_wait(ready: Any, asked: Any, answered: Any) -> None:
    async_rollout_worker._AsyncRolloutLoop.__init__ = lambda *_, **__: None
    RecordingLoop(report_top_k=6, tools=[print], processing_class=None)
    ready.set()
    asked.wait()
    # What it starts, a sandbox for instance, heeds them as usual.
    program = "import signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    answered.value = ran.stdout == "True\n"
    time.sleep(600)


def test_signals_to_the_whole_group_are_left_to_the_trainer() -> None:
    """Ctrl-C reaches all of a terminal's processes: to finish the batch and save takes more rollouts."""
    context = torch.multiprocessing.get_context("fork")
    ready, asked, answered = context.Event(), context.Event(), context.Value("b", 0)
    child = context.Process(target=_start_and_wait, args=(ready, asked, answered), daemon=True)
    child.start()
    try:
        assert ready.wait(30)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(child.pid, number)
        asked.set()
        deadline = time.monotonic() + 30
        while not answered.value:
            assert child.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.kill()
        child.join()


def test_a_program_that_ends_does_not_wait_for_it() -> None:
    """It leaves the signal, by which multiprocessing ends its children, to the trainer."""
    program = (
        "import multiprocessing, signal, time\n"
        "from types import SimpleNamespace\n"
        "from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop\n"
        "from tether.integrations.trl_async_worker import record\n"
        "context = multiprocessing.get_context('fork')\n"
        "ready = context.Event()\n"
        "def run():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "    ready.set()\n"
        "    while True:\n"
        "        time.sleep(1)\n"
        "child = context.Process(target=run, daemon=True)\n"
        "worker = SimpleNamespace(_loop_cls=_AsyncRolloutLoop, _loop_kwargs={}, start=child.start,"
        " _process=child, check_health=None, stop=None, rollout_buffer=context.Queue())\n"
        "record(worker, 6, lambda: None)\n"
        "worker.start()\n"
        "assert ready.wait(30)\n"
        "raise SystemExit(5)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert ended.returncode == 5


@pytest.mark.parametrize("judging", [3, 1])
def test_rewards_that_take_long_are_signs_of_life(monkeypatch: pytest.MonkeyPatch, judging: int) -> None:
    """For as long as a group may take to be judged; a reward that hangs is told then."""
    monkeypatch.setattr(trl_async_worker, "_JUDGING", judging)
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    async def score(self: Any, group: Any) -> list[Any]:
        for _ in range(20):
            await real(0)
        return []

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(async_rollout_worker._AsyncRolloutLoop, "_score_group", score)
    loop = object.__new__(RecordingLoop)
    loop._heartbeat_value = SimpleNamespace(value=0.0)
    before = time.time()
    assert asyncio.run(loop._score_group(SimpleNamespace(completions_sequences=[]))) == []
    assert before <= loop._heartbeat_value.value <= time.time()
    assert slept == [1.0] * judging
