"""A run resumed at any step takes the course of one that was never broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language_model import largest_difference, make_prompts, make_tiny_model
from trl import GRPOConfig, GRPOTrainer

from tether.errors import CheckpointError, TetherWarning
from tether.integrations import trl_old_policy
from tether.integrations.exact_head import HeadSnapshot
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_critic import CriticOptions
from tether.integrations.trl_resume import RolloutBatch, load_rollouts, save_rollouts

# Measured by the clock or counted from the start of the process.
_NOT_COMPARED = ("step_time", "num_tokens")

SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "bucket": {"troll_support": "bucket"},
    "paper": {"troll_support": "paper"},
    "sampler": {"troll_anchor": "sampler", "troll_lag_growth": "linear", "troll_lag_rate": 0.5},
    "sequence": {"troll_region": "sequence", "importance_sampling_level": "sequence", "loss_type": "grpo"},
    "passes over TRL's batch": {"steps_per_generation": 1, "num_iterations": 4},
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 8},
}


def _course(trainer: Any) -> list[dict[str, float]]:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [{k: v for k, v in row.items() if k not in _NOT_COMPARED} for row in rows]


def _resume(make: Callable[..., Any], folder: Path, step: int, **settings: Any) -> tuple[Any, Any]:
    """The trainer that ran to step 8, and one that took up its checkpoint of `step`."""

    def trainer(name: str) -> Any:
        return make(
            output_dir=str(folder / name), save_strategy="steps", save_steps=1, max_steps=8, **settings
        )

    whole, resumed = trainer("whole"), trainer("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{step}"))
    return whole, resumed


def _assert_same(whole: Any, resumed: Any) -> None:
    assert largest_difference(whole.model, resumed.model) == 0.0
    assert _course(whole) == _course(resumed)
    assert len(_course(whole)) == 8


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("step", [2, 7])
def test_resuming_inside_a_batch_of_rollouts_is_exact(
    make_trainer: Callable[..., Any], tmp_path: Path, name: str, step: int
) -> None:
    whole, resumed = _resume(
        lambda **s: make_trainer(TROLLTrainer, TROLLConfig, **s), tmp_path, step, **SETTINGS[name]
    )
    _assert_same(whole, resumed)
    assert largest_difference(whole.model, make_tiny_model()) > 1e-2
    files = sorted(path.parent.name for path in tmp_path.glob("whole/*/rollouts-0.safetensors"))
    assert files == [f"checkpoint-{s}" for s in (1, 2, 3, 5, 6, 7)]  # 4 and 8 end their batches


def test_the_baseline_resumes_exactly_too(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    whole, resumed = _resume(lambda **s: make_trainer(OldPolicyTrainer, GRPOConfig, **s), tmp_path, 3)
    _assert_same(whole, resumed)


def test_a_critic_and_a_stop_inside_a_batch_are_taken_up(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    def make(**settings: Any) -> Any:
        extra = {"kl_stop": 0.02, "estimator": CriticOptions()}
        return make_trainer(TROLLTrainer, TROLLConfig, trainer_arguments=extra, **settings)

    whole, resumed = _resume(make, tmp_path, 7)
    _assert_same(whole, resumed)
    assert [row["trust_region/stopped"] for row in _course(whole)][6:] == [1.0, 1.0]


KEPT_BESIDE: dict[str, dict[str, Any]] = {
    "critic.safetensors": {"estimator": CriticOptions()},
    "inside.json": {"kl_stop": 0.02},
    "step_back-0.safetensors": {"step_back": 1e-3},
}


@pytest.mark.parametrize("name", KEPT_BESIDE)
def test_a_run_killed_right_after_trls_checkpoint_goes_on_from_it(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """TRL may have deleted the checkpoint before it by then, so whatever is ours must be there already."""

    def trainer(folder: str) -> Any:
        return make_trainer(
            TROLLTrainer, TROLLConfig, trainer_arguments=KEPT_BESIDE[name], max_steps=8,
            output_dir=str(tmp_path / folder), save_strategy="steps", save_steps=7, save_total_limit=1,
        )  # fmt: skip

    whole = trainer("whole")
    whole.train()
    of_trl = GRPOTrainer._save_checkpoint

    def killed(*args: Any) -> None:
        of_trl(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(GRPOTrainer, "_save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer("killed").train()
    assert (tmp_path / "killed" / "checkpoint-7" / name).is_file()
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-7"))
    _assert_same(whole, resumed)


@pytest.mark.parametrize("step", [3, 4])
def test_a_reference_policy_that_follows_the_network_is_taken_up(
    make_trainer: Callable[..., Any], tmp_path: Path, step: int
) -> None:
    """Moved after every other update, the first time after the second."""
    make_tiny_model().save_pretrained(tmp_path / "model")  # TRL loads the reference from there
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}

    def make(**more: Any) -> Any:
        return make_trainer(TROLLTrainer, TROLLConfig, model=str(tmp_path / "model"), **settings, **more)

    _assert_same(*_resume(make, tmp_path, step))


def test_a_moved_reference_policy_that_is_missing_is_said(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    make_tiny_model().save_pretrained(tmp_path / "model")
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "save_strategy": "steps"}
    model = str(tmp_path / "model")
    make_trainer(GRPOTrainer, GRPOConfig, model=model, save_steps=4, **settings).train()
    ours = make_trainer(TROLLTrainer, TROLLConfig, model=model, save_steps=4, **settings)
    with pytest.warns(TetherWarning, match=r"no reference-0\.safetensors.*the starting model"):
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize("step", [8, 10])
def test_a_second_epoch_draws_the_same_prompts(
    make_trainer: Callable[..., Any], tmp_path: Path, step: int
) -> None:
    """16 prompts are two batches of rollouts: step 8 ends the first epoch, 10 lies in the second."""

    def trainer(name: str) -> Any:
        return make_trainer(
            TROLLTrainer, TROLLConfig, train_dataset=make_prompts().select(range(16)), max_steps=14,
            output_dir=str(tmp_path / name), save_strategy="steps", save_steps=2,
        )  # fmt: skip

    whole, resumed = trainer("whole"), trainer("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert largest_difference(whole.model, resumed.model) == 0.0
    assert _course(whole) == _course(resumed)


@pytest.fixture
def checkpoints(make_trainer: Callable[..., Any], tmp_path: Path) -> Path:
    """A folder with a checkpoint after each of six updates, four a batch of rollouts."""
    make_trainer(TROLLTrainer, TROLLConfig, save_strategy="steps", save_steps=1).train()
    return tmp_path


def test_a_checkpoint_inside_a_batch_without_its_rollouts_is_refused(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """As TRL's own trainer writes them: 5 is inside the second batch of four updates, 4 is not."""
    make_trainer(GRPOTrainer, GRPOConfig, save_strategy="steps", save_steps=1).train()
    ours = make_trainer(TROLLTrainer, TROLLConfig)
    with pytest.raises(CheckpointError, match=r"after 5 updates.*multiple of 4, such as 4 or 8"):
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    make_trainer(TROLLTrainer, TROLLConfig).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"steps_per_generation": 2}, r"steps_per_generation=4 \(now 2\)"),
        ({"per_device_train_batch_size": 4}, r"per_device_train_batch_size=8 \(now 4\)"),
        ({"num_iterations": 2}, r"num_iterations=1 \(now 2\)"),
    ],
)
def test_rollouts_of_other_settings_are_refused(
    make_trainer: Callable[..., Any], checkpoints: Path, changed: dict[str, int], named: str
) -> None:
    trainer = make_trainer(TROLLTrainer, TROLLConfig, **changed)
    with pytest.raises(CheckpointError, match=named):
        trainer.train(resume_from_checkpoint=str(checkpoints / "checkpoint-5"))


def test_a_checkpoint_for_the_model_alone_holds_no_rollouts(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    make_trainer(
        TROLLTrainer, TROLLConfig, save_strategy="steps", save_steps=1, max_steps=2, save_only_model=True
    ).train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()
    assert not list(tmp_path.glob("*/rollouts-*"))


def test_a_batch_comes_back_bit_for_bit(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """Lists, absent values and images, which the tiny language model's batches have none of, too."""
    trainer = make_trainer(TROLLTrainer, TROLLConfig)
    trainer.train()
    batches = [dict(batch) for batch in trainer._buffered_inputs]
    for number, batch in enumerate(batches):
        batch |= {"num_images": [1, 2], "images": None, "pixel_values": torch.rand(3, 4).bfloat16() + number}
    head = HeadSnapshot(torch.rand(5, 3), None)
    file = tmp_path / "folder" / "rollouts-0.safetensors"
    save_rollouts(file, RolloutBatch(batches, head, 7), {"processes": 1})
    read = load_rollouts(file, {"processes": 1}, torch.device("cpu"), (torch.rand(5, 3), None))
    assert read.done == 7
    assert read.head is not None
    assert torch.equal(read.head.weight, head.weight)
    for old, new in zip(batches, read.micro_batches, strict=True):
        old, new = trl_old_policy.unpack(old), trl_old_policy.unpack(new)
        assert set(old) - set(new) == {"rollout_row"}
        for name, value in new.items():
            assert torch.equal(value, old[name]) if isinstance(value, torch.Tensor) else value == old[name]
            assert not isinstance(value, torch.Tensor) or value.dtype == old[name].dtype


def test_what_no_file_can_hold_is_said_and_training_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "rollouts-0.safetensors"
    with pytest.warns(TetherWarning, match=r"cannot be written down.*save_steps be a multiple"):
        save_rollouts(file, RolloutBatch([{"thing": [object()]}], None, 1), {})
    assert not file.exists()
