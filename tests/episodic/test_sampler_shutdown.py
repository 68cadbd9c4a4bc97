"""The worker processes must not outlive whoever started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

SCRIPT = """
import signal
import sys
import numpy as np
# Whoever started the tests in the background made them ignore Ctrl-C, and us after them.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {here!r})
from tether.episodic.sampler import EpisodeSampler

if __name__ == "__main__":
    with EpisodeSampler("misbehaving_envs:test/{way}-v0", num_workers=2) as sampler:
        sampler.reset(2)
        print(*[process.pid for process in sampler._backend._processes], flush=True)
        while True:
            sampler.execute(np.zeros((2, 5, 1)), np.zeros((2, 5, 1)))
"""


Start = Callable[[str], tuple[subprocess.Popen[str], list[int]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the script in an environment: its process and its workers' ids. Nothing outlives the test."""
    processes = []

    def run(way: str) -> tuple[subprocess.Popen[str], list[int]]:
        script = tmp_path / "collect.py"
        script.write_text(SCRIPT.format(here=str(HERE), way=way))
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        assert process.stdout is not None
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield run
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # where there is one, a process waiting for burial counts as gone
    return not state.exists() or ") Z " not in state.read_text()


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("way", ["well", "sleeps"])
def test_ctrl_c_ends_the_program_and_its_workers_within_seconds(start: Start, way: str) -> None:
    process, workers = start(way)
    assert len(workers) == 2
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends: to the whole group
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert errors.count("Traceback") == 1  # the program's own; the workers stay quiet
    assert gone_within(workers, 60)


def test_workers_leave_when_their_parent_is_killed(start: Start) -> None:
    process, workers = start("well")
    assert len(workers) == 2
    process.kill()
    process.wait()
    assert gone_within(workers, 60)


def test_a_program_that_closes_nothing_ends(tmp_path: Path) -> None:
    script = tmp_path / "careless.py"
    script.write_text(
        "from tether.episodic.sampler import EpisodeSampler\n"
        "if __name__ == '__main__':\n"
        "    sampler = EpisodeSampler('tether/PointReach-v0', num_workers=1)\n"
        "    print(sampler._backend._processes[0].pid)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert gone_within([int(ended.stdout)], 10)
