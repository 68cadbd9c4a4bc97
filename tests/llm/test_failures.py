"""Training that runs out of something: it says where, keeps the last good checkpoint, and goes on."""

from __future__ import annotations

import errno
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from short_run import assert_same_run, config, record

from tether.errors import (
    CheckpointError,
    ConfigError,
    InvalidInputError,
    TetherWarning,
    TrainingStoppedError,
)
from tether.experiments import RunFolder
from tether.integrations.decoding import draw
from tether.llm import callbacks, failures
from tether.llm.failures import cause_of
from tether.llm.train import train


def at_step(step: int, monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Call `act(trainer's model)` before the optimizer step of `step`."""
    look = failures.FiniteGradients.on_pre_optimizer_step

    def acting(self: Any, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step + 1 == step:
            act(model)
        look(self, args, state, control, model=model, **more)

    monkeypatch.setattr(failures.FiniteGradients, "on_pre_optimizer_step", acting)


def spoil(model: torch.nn.Module) -> None:
    next(model.parameters()).grad[3, 5] = float("nan")


def exhaust(model: torch.nn.Module) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it.")


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A disk that refuses the rest of any larger file, as a full one would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    ("act", "words", "cause"),
    [
        (spoil, ["no longer finite", "model.embed_tokens.weight", "learning_rate"], "numbers"),
        (exhaust, ["Memory ran out", "Tried to allocate 2.00 GiB", "micro_batch_size (now 4)"], "memory"),
    ],
)
def test_it_stops_with_step_batch_and_last_good_checkpoint(tmp_path, monkeypatch, act, words, cause):
    at_step(11, monkeypatch, act)
    with pytest.raises(TrainingStoppedError) as stopped:
        train(config(tmp_path / "run"))
    message = str(stopped.value)
    for expected in [*words, "at step 11", "update 3 of 4 on batch 3", "checkpoint: step 8"]:
        assert expected in message
    note = json.loads((tmp_path / "run" / failures.FAILURE_FILE).read_text())
    assert (note["cause"], note["step"], note["batch"], note["update"]) == (cause, 11, 3, 3)
    assert len(note["problems"]) == 4
    run = RunFolder.open(tmp_path / "run")
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [4, 8]
    assert [line["step"] for line in run.metrics()] == list(range(1, 11)), "no bad step was written"


def test_the_problems_named_are_those_of_the_batch(tmp_path, monkeypatch):
    """The trainer's own record of the rollouts is the independent account."""
    seen: list[set[str]] = []

    def note_rows(trainer: Any, *_: Any) -> None:
        seen.append({row["prompt"] for row in trainer.rollout_rows})

    watch = callbacks.SamplesCallback.watch

    def watching(self: Any, trainer: Any) -> None:
        watch(self, trainer)
        trainer.on_tokens = note_rows

    monkeypatch.setattr(callbacks.SamplesCallback, "watch", watching)
    at_step(6, monkeypatch, exhaust)
    with pytest.raises(TrainingStoppedError):
        train(config(tmp_path / "run"))
    note = json.loads((tmp_path / "run" / failures.FAILURE_FILE).read_text())
    assert set(note["problems"]) == seen[-1] != seen[0]


def test_after_running_out_of_memory_smaller_micro_batches_continue_the_same_run(
    tmp_path, monkeypatch, uninterrupted
):
    at_step(6, monkeypatch, exhaust)
    with pytest.raises(TrainingStoppedError, match="continue with --resume"):
        train(config(tmp_path / "run"))
    monkeypatch.undo()
    train(config(tmp_path / "run", resume=True, micro_batch_size=2))
    ours, theirs = record(tmp_path / "run"), record(uninterrupted)
    assert ours["eval"][0] == theirs["eval"][0]
    assert len(ours["metrics"]) == 16
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        if mine["step"] <= 5:  # the next batch of responses may differ by rounding's consequences
            assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_a_full_disk_leaves_the_last_good_checkpoint_and_the_run_continues(
    tmp_path, monkeypatch, uninterrupted
):
    folder = tmp_path / "run"
    save = callbacks.CheckpointCallback.on_step_end
    limits: list[Any] = []

    def filling(self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
        if state.global_step == 12:  # room for the weights, not for the optimizer's state
            limits.append(files_up_to(3_000_000))
            limits[0].__enter__()
        return save(self, args, state, control, **more)

    monkeypatch.setattr(callbacks.CheckpointCallback, "on_step_end", filling)
    try:
        with pytest.raises(TrainingStoppedError, match=r"disk refused .* at step 12 while saving") as stopped:
            train(config(folder))
    finally:
        limits[0].__exit__(None, None, None)
    monkeypatch.undo()
    assert "Last good checkpoint: step 8" in str(stopped.value)
    run = RunFolder.open(folder)
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [4, 8]
    assert run.latest_checkpoint() is not None, "its files are as they were written"
    assert not (folder / ".unfinished-checkpoint").exists(), "the room it took is free again"
    train(config(folder, resume=True))
    assert_same_run(folder, uninterrupted)


def test_a_disk_full_of_numbers_is_named_too(tmp_path, monkeypatch, uninterrupted):
    """Not even a line fits any more; the half line is dropped and the run goes on."""
    folder = tmp_path / "run"
    log = RunFolder.log

    def filling(self: RunFolder, step: int, **numbers: float) -> None:
        if step == 6:
            with files_up_to((folder / "metrics.jsonl").stat().st_size + 20):
                log(self, step, **numbers)
        log(self, step, **numbers)

    monkeypatch.setattr(RunFolder, "log", filling)
    with pytest.raises(TrainingStoppedError, match=r"disk refused .*File too large.* step 4"):
        train(config(folder))
    monkeypatch.undo()
    assert not (folder / "metrics.jsonl").read_bytes().endswith(b"\n")
    train(config(folder, resume=True))
    assert_same_run(folder, uninterrupted)


def test_a_truncated_checkpoint_is_refused_or_passed_over_and_the_run_is_the_same(
    tmp_path, monkeypatch, uninterrupted
):
    folder = tmp_path / "run"
    at_step(15, monkeypatch, exhaust)
    with pytest.raises(TrainingStoppedError):
        train(config(folder))
    monkeypatch.undo()
    state = folder / "checkpoints" / "step-000012" / "optimizer.pt"
    state.write_bytes(state.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"step-000012 is damaged: optimizer\.pt has \d+ bytes"):
        train(config(folder, resume=True))
    with pytest.warns(TetherWarning, match="going on from the one before it, of step 8"):
        train(config(folder, resume=True, damaged_checkpoint="skip"))
    assert_same_run(folder, uninterrupted)


def test_a_run_killed_between_its_last_checkpoint_and_its_end_gets_its_model(
    tmp_path, monkeypatch, uninterrupted
):
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tether.llm.train.save_trained_model", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path / "run"))
    monkeypatch.undo()
    assert not (tmp_path / "run" / "model").exists()
    run = train(config(tmp_path / "run", resume=True))
    assert run.finished
    assert_same_run(tmp_path / "run", uninterrupted)


def test_adapters_are_merged_from_the_last_checkpoint_too(tmp_path, monkeypatch):
    """The same weights as merging right after training gives."""
    from safetensors.torch import load_file

    short = {"lora_rank": 4, "steps": 4, "eval_every": 0}
    train(config(tmp_path / "whole", **short))
    monkeypatch.setattr("tether.llm.train.save_trained_model", lambda *_: exhaust(None))
    with pytest.raises(TrainingStoppedError, match="while saving the model"):
        train(config(tmp_path / "cut", **short))
    monkeypatch.undo()
    train(config(tmp_path / "cut", resume=True, **short))
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=0, atol=1e-6)


def test_a_longer_run_replaces_the_model_of_the_shorter(tmp_path):
    short = {"eval_every": 0}
    train(config(tmp_path / "run", steps=4, **short))
    before = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    run = train(config(tmp_path / "run", steps=8, resume=True, **short))
    assert run.finished
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() != before
    assert [path.name for path in run.path.glob(".model*")] == []


def test_other_errors_pass_as_they_are(tmp_path, monkeypatch):
    def broken(model: Any) -> None:
        raise KeyError("a bug")

    at_step(2, monkeypatch, broken)
    with pytest.raises(KeyError, match="a bug"):
        train(config(tmp_path / "run"))
    assert not (tmp_path / "run" / failures.FAILURE_FILE).exists()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk"),
        (OSError(errno.ENOENT, "No such file"), None),
        (RuntimeError("[enforce fail at inline_container.cc:626] . unexpected pos 64 vs 0"), "disk"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
         "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"), "numbers"),
        (RuntimeError("shape mismatch"), None),
    ],
)  # fmt: skip
def test_causes_are_told_apart(error, cause):
    assert cause_of(error) == cause


def test_torchs_own_words_for_a_full_disk_and_full_memory_are_known(tmp_path):
    with files_up_to(1000), pytest.raises((RuntimeError, OSError)) as disk:
        torch.save(torch.zeros(10_000), tmp_path / "state.pt")
    assert cause_of(disk.value) == "disk"
    with pytest.raises((RuntimeError, MemoryError)) as memory:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert cause_of(memory.value) == "memory"


@pytest.mark.parametrize("sample", [lambda weights: torch.multinomial(weights, 1), draw])
def test_a_sampler_that_meets_nan_is_a_matter_of_numbers(sample):
    with pytest.raises((RuntimeError, InvalidInputError)) as error:
        sample(torch.tensor([[0.5, float("nan")]]))
    assert cause_of(error.value) == "numbers"


def test_settings_of_the_hardware_are_checked(tmp_path):
    for changes, message in (
        ({"quantization": "nf4"}, "set lora_rank"),
        ({"vllm_memory": 1.5}, "share of a GPU"),
        ({"vllm_server": "http://x:8000"}, "rollouts='vllm'"),
        ({"push_to_hub": "a/b/c"}, "owner/name"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(tmp_path, **changes)
