"""What users of GRPO set and do, under every trainer here."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from peft import LoraConfig
from tiny_language_model import largest_difference, make_tiny_model, make_tokenizer
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM
from trl import GRPOConfig

from tether.errors import ConfigError, TetherWarning
from tether.integrations.sampler_reports import GenerationRecorder
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_critic import CriticOptions
from tether.integrations.trl_losses import PolicyLossTrainer
from tether.integrations.trl_old_policy import loss_mask

TRAINERS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "exact": (TROLLTrainer, TROLLConfig, {"troll_support": "exact"}, {}),
    "bucket": (TROLLTrainer, TROLLConfig, {"troll_support": "bucket"}, {}),
    "paper": (TROLLTrainer, TROLLConfig, {"troll_support": "paper"}, {}),
    "sampler": (TROLLTrainer, TROLLConfig, {"troll_anchor": "sampler"}, {}),
    "clip": (OldPolicyTrainer, GRPOConfig, {}, {}),
    "dppo": (PolicyLossTrainer, GRPOConfig, {}, {"policy_loss": "dppo"}),
    "dppo of the sampler": (PolicyLossTrainer, GRPOConfig, {}, {"policy_loss": "dppo", "anchor": "sampler"}),
    "trm": (PolicyLossTrainer, GRPOConfig, {}, {"policy_loss": "trm"}),
}


@pytest.mark.filterwarnings("ignore:.*suppress_tokens")
@pytest.mark.parametrize("name", TRAINERS)
def test_a_batch_in_which_every_response_is_cut_off_teaches_nothing(
    train: Callable[..., Any], name: str
) -> None:
    trainer_class, config_class, settings, arguments = TRAINERS[name]
    cut = {"mask_truncated_completions": True, "max_completion_length": 2}
    tokenizer = make_tokenizer()
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    never_ends = {"generation_kwargs": {"suppress_tokens": ends}}
    trainer = train(
        trainer_class, config_class, **settings, **cut, **never_ends, max_steps=2, trainer_arguments=arguments
    )
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert rows[0]["completions/clipped_ratio"] == 1.0
    assert [row["trust_region/kl_max"] for row in rows] == [0.0, 0.0]
    assert largest_difference(trainer.model, make_tiny_model()) == 0.0


def _with_records(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout function that reports what it sampled from."""
    tokenizer = trainer.processing_class
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    model = trainer._sampling_model
    with GenerationRecorder(model, trainer.support_top_k) as recorder, torch.no_grad():
        written = model.generate(**batch, max_new_tokens=6, min_new_tokens=6, do_sample=True, top_k=0)
    answers = written[:, batch["input_ids"].shape[1] :].tolist()
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": recorder.records(answers)}


@pytest.mark.parametrize("asked", [{"troll_anchor": "sampler"}, {"troll_sampler_weight": 2.0}])
def test_a_rollout_function_may_report_the_sampler(train: Callable[..., Any], asked: dict[str, Any]) -> None:
    arguments = {"rollout_func": _with_records}
    trainer = train(TROLLTrainer, TROLLConfig, **asked, max_steps=4, trainer_arguments=arguments)
    assert largest_difference(trainer.model, make_tiny_model()) > 1e-3
    lags = [row.get("trust_region/lag") for row in trainer.state.log_history if "loss" in row]
    assert lags == ([0.0, 1.0, 2.0, 3.0] if "troll_anchor" in asked else [None] * 4)


@pytest.mark.parametrize("arguments", [{"lag": 2}, {"compact_rollouts": True}])
def test_a_rollout_function_writes_by_itself(
    make_trainer: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="rollout_func writes"):
        make_trainer(
            TROLLTrainer, TROLLConfig, troll_anchor="sampler",
            trainer_arguments={**arguments, "rollout_func": _with_records},
        )  # fmt: skip


def test_a_trainer_that_trains_again_begins_with_a_batch_of_its_own(make_trainer: Callable[..., Any]) -> None:
    """Stopped inside a batch of rollouts, whose old policy is not the second training's."""
    arguments = {"step_back": 0.02}
    again = make_trainer(TROLLTrainer, TROLLConfig, max_steps=6, trainer_arguments=arguments)
    again.train()
    again.train()
    rows = [row for row in again.state.log_history if "step_back/kl_before" in row]
    assert [row["step_back/fraction"] > 0 for row in rows] == [True, True]
    assert all(row["step_back/kl"] <= 0.02 for row in rows)


def test_a_trainer_that_trains_again_forgets_its_samplers(make_trainer: Callable[..., Any]) -> None:
    settings = {"troll_anchor": "sampler", "steps_per_generation": 1, "max_steps": 4}
    trainer = make_trainer(TROLLTrainer, TROLLConfig, **settings, trainer_arguments={"lag": 2})
    trainer.train()
    first = dict(trainer._versions)
    trainer.train()
    shared = [v for v, weights in trainer._versions.items() if any(weights is old for old in first.values())]
    assert trainer._versions
    assert not shared


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.5),
        ("suppress_tokens", [3, 4]),
        ("no_repeat_ngram_size", 2),
        ("min_new_tokens", 3),
        ("do_sample", False),
    ],
)
@pytest.mark.parametrize("trainer", ["exact", "sampler", "clip"])
def test_settings_of_generation_that_reshape_it_are_warned_of(
    make_trainer: Callable[..., Any], trainer: str, name: str, value: Any
) -> None:
    trainer_class, config_class, settings, arguments = TRAINERS[trainer]
    with pytest.warns(TetherWarning, match=f"'{name}': .*Leave these settings") as caught:
        make_trainer(
            trainer_class, config_class, **settings, generation_kwargs={name: value},
            trainer_arguments=arguments,
        )  # fmt: skip
    said = [one for one in caught if "Leave these settings" in str(one.message)]
    assert len(said) == 1
    assert Path(said[0].filename).name == "conftest.py"  # where the user's line would be


def test_beams_are_no_sampler(make_trainer: Callable[..., Any]) -> None:
    settings = {"troll_anchor": "sampler", "generation_kwargs": {"num_beams": 2}}
    with (
        pytest.warns(TetherWarning, match="'num_beams': 2"),
        pytest.raises(ConfigError, match="num_beams=2 searches"),
    ):
        make_trainer(TROLLTrainer, TROLLConfig, **settings)


def test_what_switches_nothing_on_is_no_truncation_and_no_beam(make_trainer: Callable[..., Any]) -> None:
    """As vLLM and Transformers write it."""
    settings = {"troll_anchor": "sampler", "generation_kwargs": {"top_k": -1, "num_beams": None}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", TetherWarning)
        trainer = make_trainer(TROLLTrainer, TROLLConfig, **settings)
    assert trainer._truncates == {}


@pytest.mark.parametrize("name", ["clip", "dppo"])
def test_settings_of_another_trainer_are_refused(make_trainer: Callable[..., Any], name: str) -> None:
    trainer_class, _, _, arguments = TRAINERS[name]
    with pytest.raises(ConfigError, match=rf"'troll_top_k': 7.*{trainer_class.__name__} does not read them"):
        make_trainer(trainer_class, TROLLConfig, troll_top_k=7, trainer_arguments=arguments)
    make_trainer(trainer_class, TROLLConfig, trainer_arguments=arguments)


def test_what_is_logged_of_an_update_in_parts_is_of_the_whole(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        TROLLTrainer, TROLLConfig, gradient_accumulation_steps=4, steps_per_generation=16,
        per_device_train_batch_size=4, max_steps=4, troll_kl_bound=0.2, logging_steps=2,
    )  # fmt: skip
    parts: list[dict[str, Any]] = []

    def keep(_: Any, inputs: dict[str, Any], tokens: Any) -> None:
        mask = loss_mask(inputs) > 0
        projected = tokens.projected & mask
        step = tokens.step[projected].mean().item() if projected.any() else math.nan
        parts.append({"kl_max": tokens.kl[mask].max().item(), "mean_step": step})

    trainer.on_tokens = keep
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4]
    for row, of_row in zip(rows, (parts[:8], parts[8:]), strict=True):
        steps = [part["mean_step"] for part in of_row if not math.isnan(part["mean_step"])]
        assert row["trust_region/kl_max"] == pytest.approx(max(part["kl_max"] for part in of_row))
        assert row["trust_region/mean_step"] == pytest.approx(sum(steps) / len(steps))
    assert any(
        math.isnan(part["mean_step"]) for part in parts
    )  # which a mean over all parts would count as 1


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus"])
def test_the_table_of_completions_has_the_advantages_that_were_used(
    make_trainer: Callable[..., Any], tmp_path: Path, estimator: str
) -> None:
    trainer = make_trainer(
        TROLLTrainer, TROLLConfig, log_completions=True, num_completions_to_print=0, max_steps=4,
        trainer_arguments={"estimator": estimator},
    )  # fmt: skip
    used: list[float] = []

    def keep(_: Any, inputs: dict[str, Any], tokens: Any) -> None:
        advantages, mask = inputs["advantages"], loss_mask(inputs)
        if advantages.dim() == 2:
            advantages = (advantages * mask).sum(1) / mask.sum(1)
        used.extend(advantages.tolist())

    trainer.on_tokens = keep
    trainer.train()
    table = pandas.read_parquet(max((tmp_path / "completions").glob("*.parquet")))
    assert sorted(table["advantage"]) == pytest.approx(sorted(used), abs=1e-6)


def test_a_reference_pass_through_adapters_is_not_kept(make_trainer: Callable[..., Any]) -> None:
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    trainer = make_trainer(TROLLTrainer, TROLLConfig, beta=0.1, max_steps=1, trainer_arguments=lora)
    passes: list[bool] = []
    score = trainer._get_per_token_logps_and_entropies

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = trainer._recorded
        result = score(*args, **kwargs)
        if trainer._recording:
            passes.append(trainer._recorded is not before)
        return result

    trainer._get_per_token_logps_and_entropies = counted
    trainer.train()
    assert passes == [True, False]  # the old policy's, and the reference's


@pytest.mark.parametrize("adapters", [True, False])
def test_a_reference_policy_has_the_soft_cap_of_the_network(
    make_trainer: Callable[..., Any], tmp_path: Path, adapters: bool
) -> None:
    """RecurrentGemma's, which TRL's own head knows nothing of: at first the two policies are the same."""
    torch.manual_seed(0)
    model: Any = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            vocab_size=29, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
            lru_width=32, attention_window_size=64, logits_soft_cap=3.0, pad_token_id=27, eos_token_id=28,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight.mul_(15)
    arguments = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])} if adapters else {}
    if not adapters:  # TRL loads the reference from there
        model.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    trainer = make_trainer(
        TROLLTrainer, TROLLConfig, model=model, beta=0.1, max_steps=1, trainer_arguments=arguments
    )
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_critic_of_text_is_refused_for_a_model_that_sees(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(OldPolicyTrainer, GRPOConfig)
    trainer._is_vlm = True
    with pytest.raises(ConfigError, match="A critic reads text alone"):
        CriticOptions().start(trainer)


def test_a_stop_in_half_precision_with_loss_scaling_is_refused(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(OldPolicyTrainer, GRPOConfig, trainer_arguments={"kl_stop": 0.1})
    trainer.accelerator = SimpleNamespace(mixed_precision="fp16")
    with pytest.raises(ConfigError, match="Train in bf16"):
        trainer._check_updates_can_stop()


@pytest.mark.parametrize("name", ["sampler", "dppo of the sampler"])
def test_what_goes_back_needs_a_scoring_pass(make_trainer: Callable[..., Any], name: str) -> None:
    trainer_class, config_class, settings, arguments = TRAINERS[name]
    with pytest.raises(ConfigError, match='anchor="sampler" makes no pass'):
        make_trainer(
            trainer_class, config_class, **settings, trainer_arguments={**arguments, "step_back": 0.02}
        )


def test_a_warning_names_the_line_that_asked_for_it(make_trainer: Callable[..., Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("exact", "clip", "dppo"):
            trainer_class, config_class, _, arguments = TRAINERS[name]
            make_trainer(trainer_class, config_class, steps_per_generation=1, trainer_arguments=arguments)
    said = [one for one in caught if issubclass(one.category, TetherWarning)]
    assert [Path(one.filename).name for one in said] == ["conftest.py"] * 3
