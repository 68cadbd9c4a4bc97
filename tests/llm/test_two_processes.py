"""`tether llm train` in two processes over gloo, against one process with the same global batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from short_run import config, record
from two_processes_train import train_scripted

from ranks import rank_environment
from tether.errors import ConfigError
from tether.experiments import RunFolder
from tether.llm.process import end_process_group, is_main_process, process_count
from tether.llm.trainers import _responses_per_process

WORKER = Path(__file__).with_name("two_processes_train.py")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("two")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**rank_environment(), "TRL_EXPERIMENTAL_SILENCE": "1"}
    with (output / "log").open("w") as log:
        process = subprocess.Popen(
            [*launcher, str(WORKER), str(output)], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        code = process.wait(timeout=300)
    finally:
        process.terminate()
        process.wait()
    assert code == 0, (output / "log").read_text()[-3000:]
    return output


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        train_scripted(output, patch.setattr)
    return output


def test_two_processes_log_what_one_logs(together: Path, alone: Path) -> None:
    one, two = (record(folder / "straight") for folder in (alone, together))
    assert one["eval"][0] == two["eval"][0], "the starting point"
    assert len(one["metrics"]) == len(two["metrics"]) == 8
    for ours, theirs in zip(two["metrics"], one["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("loss", "reward", "grad_norm", "kl_mean", "kl_max", "completion_length", "truncated"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def test_two_processes_train_the_model_one_trains(together: Path, alone: Path) -> None:
    one, two = (
        load_file(folder / "straight" / "model" / "model.safetensors") for folder in (alone, together)
    )
    halfway = load_file(RunFolder.open(alone / "straight").checkpoints()[0].path / "model.safetensors")
    moved = max((one[name] - halfway[name]).abs().max() for name in one)
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=float(moved) * 0.05)


@pytest.mark.parametrize("processes", ["together", "alone"])
def test_a_run_stopped_in_one_process_resumes_as_if_nothing_happened(
    request: pytest.FixtureRequest, processes: str
) -> None:
    """Where only the first process was asked to stop, all stop at the end of the same batch."""
    folder: Path = request.getfixturevalue(processes)
    straight, resumed = folder / "straight", folder / "resumed"
    assert [checkpoint.step for checkpoint in RunFolder.open(resumed).checkpoints()] == [4, 8]
    assert RunFolder.open(resumed).finished
    assert record(straight)["metrics"] == record(resumed)["metrics"]
    one, other = (load_file(run / "model" / "model.safetensors") for run in (straight, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_process_writes_and_each_keeps_its_random_numbers(together: Path) -> None:
    checkpoint = RunFolder.open(together / "straight").latest_checkpoint()
    assert checkpoint is not None
    states = {path.name for path in checkpoint.path.glob("rng_state*")}
    assert states == {"rng_state_0.pth", "rng_state_1.pth"}
    log = (together / "log").read_text()
    assert log.count("8/8") == 2, "one display for each run"
    assert log.count("Stopped at step 4 of 8") == 1


def test_a_command_lets_go_of_its_group(tmp_path: Path) -> None:
    end_process_group()  # there is none
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    end_process_group()
    assert not torch.distributed.is_initialized()


def test_batches_that_processes_cannot_share_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    assert (process_count(), is_main_process()) == (3, False)
    with pytest.raises(ConfigError, match="4 responses at a time cannot be split evenly among 3"):
        _responses_per_process(config(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        process_count()
