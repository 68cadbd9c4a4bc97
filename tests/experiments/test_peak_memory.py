"""What a step takes: memory against tensors of known size, processor time, and what a run keeps of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tether.experiments import peak_memory as module
from tether.experiments.peak_memory import PeakMemory, largest, peak_memory
from tether.experiments.step_meter import StepMeter
from tether.experiments.summary import load_runs

MB = 2**20


@pytest.fixture
def resident() -> PeakMemory:
    memory = peak_memory("cpu")
    if memory is None:
        pytest.skip("this system keeps no resettable mark of the largest resident set")
    return memory


def use(megabytes: int) -> None:
    """Touch this much memory and give it back."""
    block = torch.ones(megabytes * MB, dtype=torch.uint8)
    assert block.numel() == megabytes * MB


def test_a_peak_is_that_of_the_tensors_alive_at_once(resident: PeakMemory) -> None:
    resident.restart()
    use(120)
    use(150)
    assert resident.peak() == pytest.approx(150 * MB, abs=15 * MB)


def test_a_restart_forgets_what_was_larger_before(resident: PeakMemory) -> None:
    resident.restart()
    use(150)
    resident.restart()
    use(60)
    assert resident.peak() == pytest.approx(60 * MB, abs=15 * MB)


def test_what_was_there_at_the_start_is_left_out() -> None:
    weights = torch.ones(100 * MB, dtype=torch.uint8)
    memory = peak_memory("cpu")
    if memory is None:
        pytest.skip("this system keeps no resettable mark of the largest resident set")
    memory.restart()
    use(60)
    assert memory.peak() == pytest.approx(60 * MB, abs=15 * MB)
    del weights
    memory.restart()
    assert memory.peak() == 0  # less than at the start is no negative use


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
    assert largest([{"resident_bytes_max": 9}, {"device_bytes_max": 2}]) == ("device_bytes_max", 2)
    assert largest([{"loss": 1.0}]) is None


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
