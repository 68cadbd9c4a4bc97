"""What a step takes: memory against tensors of known size, processor time, and what a run keeps of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tether.experiments import peak_memory as module
from tether.experiments.peak_memory import StepMeter, largest_peak, peak_memory
from tether.experiments.study_table import load_runs

MB = 2**20


# In a process of its own: the one that runs the tests gives back what earlier ones held, at any moment.
MEASURE = """
import json, torch
from tether.experiments.peak_memory import peak_memory

def use(megabytes):
    torch.ones(megabytes * 2**20, dtype=torch.uint8)

found = {}
memory = peak_memory("cpu")
if memory is not None:
    use(10)
    memory.restart()
    use(120)
    use(150)
    found["the larger of two"] = memory.peak()
    memory.restart()
    use(60)
    found["after a larger one"] = memory.peak()
    weights = torch.ones(100 * 2**20, dtype=torch.uint8)
    memory = peak_memory("cpu")
    memory.restart()
    use(60)
    found["beside what was there"] = memory.peak()
    del weights
    memory.restart()
    found["less than at the start"] = memory.peak()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    """What was measured in bytes, by case."""
    answer = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(answer.stdout)
    if not found:
        pytest.skip("this system keeps no resettable mark of the largest resident set")
    return found


@pytest.mark.parametrize(
    ("case", "megabytes"),
    [("the larger of two", 150), ("after a larger one", 60), ("beside what was there", 60)],
)
def test_a_peak_is_that_of_the_tensors_alive_at_once(
    peaks: dict[str, int], case: str, megabytes: int
) -> None:
    assert peaks[case] == pytest.approx(megabytes * MB, abs=15 * MB)


def test_less_than_at_the_start_is_no_negative_use(peaks: dict[str, int]) -> None:
    assert peaks["less than at the start"] == 0


def test_on_a_cuda_device_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name, answer in (("memory_allocated", 500), ("max_memory_allocated", 1700)):
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append(str(device)))
    memory = peak_memory("cuda:1")
    assert memory is not None
    memory.restart()
    assert (memory.metric, memory.peak(), asked) == ("device_bytes_max", 1200, ["cuda:1"])


def test_where_nothing_can_tell_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert peak_memory("mps") is None
    monkeypatch.setattr(module, "_CLEAR", tmp_path / "no" / "proc")
    assert peak_memory("cpu") is None


def test_a_finished_run_notes_its_largest_peak(make_run: Callable[..., Path]) -> None:
    peaks = [{"resident_bytes_max": value} for value in (3e6, 9e6, 4e6)]
    path = make_run("measured", peaks)
    end = json.loads((path / "FINISHED").read_text())
    assert end["peak_memory_bytes"] == 9_000_000
    assert end["peak_memory_of"].startswith("resident set")
    [run] = load_runs([path])
    assert run.peak_memory == ("resident_bytes_max", 9_000_000)
    before = json.loads((make_run("unmeasured", [{"loss": 1.0}]) / "FINISHED").read_text())
    assert before.keys() == {"time", "training_seconds"}


def test_of_both_kinds_that_of_the_device_counts() -> None:
    assert largest_peak([{"resident_bytes_max": 9}, {"device_bytes_max": 2}]) == ("device_bytes_max", 2)
    assert largest_peak([{"loss": 1.0}]) is None


def test_processor_time_is_work_and_not_waiting() -> None:
    meter = StepMeter("cpu")
    meter.begin()
    time.sleep(0.3)
    began = time.process_time()
    while time.process_time() < began + 0.1:
        pass
    assert meter.end()["processor_seconds"] == pytest.approx(0.1, abs=0.08)


def test_on_a_device_of_its_own_the_processors_time_says_little_and_is_left_out() -> None:
    meter = StepMeter("mps")
    meter.begin()
    assert meter.end() == {}
