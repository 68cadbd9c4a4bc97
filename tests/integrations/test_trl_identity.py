"""With the trust region off, TROLL is GRPO without the clip; and measuring changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from courses import CourseRounding
from peft import LoraConfig
from tiny_language_model import largest_difference, make_prompts, make_tiny_model
from trl import GRPOConfig, GRPOTrainer

from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer

TRUST_REGION_OFF = {"troll_kl_bound": math.inf, "troll_alpha": 0.0}
CLIP_OFF = {"epsilon": math.inf}

# Adam divides by the root of a tiny second moment and would blow rounding errors up.
PLAIN_DESCENT = {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 1e9}

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "bnpo": {"loss_type": "bnpo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "learning_rate": 0.005},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "accumulation": {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "per_device_train_batch_size": 4,
    },
    "iterations": {"num_iterations": 2, "steps_per_generation": 2},
    # At 0.02 a gradient of norm 280 makes the course chaotic: hidden states scaled by 1 + 1e-7 leave it.
    "temperature": {"temperature": 0.7, "learning_rate": 0.005},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.05},
    "masked truncation": {"mask_truncated_completions": True},
}


def _assert_same_course(plain: Any, ours: Any, rounding: CourseRounding) -> None:
    """Every number GRPO logs at each step, and the parameters at the end."""
    rounding.assert_same_log(plain, ours)
    assert largest_difference(plain.model, ours.model) <= rounding.weights


def _assert_moved(trainer: Any, distance: float = 1e-2) -> None:
    assert largest_difference(trainer.model, make_tiny_model()) > distance


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_bound_troll_is_grpo_without_clip(
    train: Callable[..., Any], course_rounding: Any, variant: str
) -> None:
    settings = {**PLAIN_DESCENT, **VARIANTS[variant]}
    plain = train(GRPOTrainer, GRPOConfig, **CLIP_OFF, **settings)
    ours = train(TROLLTrainer, TROLLConfig, **TRUST_REGION_OFF, **settings)
    _assert_same_course(plain, ours, course_rounding(plain))
    _assert_moved(ours)
    # The old policy was there to compare with, and it was left behind.
    assert max(row.get("trust_region/kl_max", 0.0) for row in ours.state.log_history) > 1e-2


@pytest.mark.parametrize("variant", ["dapo", "gspo"])
def test_the_bound_makes_a_difference(train: Callable[..., Any], variant: str) -> None:
    """Guards the tests above: they would fail if the projection acted."""
    settings = {**PLAIN_DESCENT, **VARIANTS[variant]}
    plain = train(GRPOTrainer, GRPOConfig, **CLIP_OFF, **settings)
    ours = train(TROLLTrainer, TROLLConfig, troll_kl_bound=1e-3, **settings)
    assert largest_difference(plain.model, ours.model) > 1e-3


@pytest.mark.parametrize("variant", ["dapo", "gspo", "accumulation", "entropy bonus"])
def test_measuring_leaves_the_clip_baseline_as_it_is(
    train: Callable[..., Any], course_rounding: Any, variant: str
) -> None:
    settings = {**PLAIN_DESCENT, **VARIANTS[variant]}
    plain = train(GRPOTrainer, GRPOConfig, **settings)
    measured = train(OldPolicyTrainer, GRPOConfig, **settings)
    _assert_same_course(plain, measured, course_rounding(plain))
    clipped = [row["clip_ratio/region_mean"] for row in plain.state.log_history if "loss" in row]
    if variant != "gspo":  # whose geometric mean moves less
        assert max(clipped) > 0, "the clip never acted, so this test compared nothing"
    assert any(row.get("trust_region/kl_max", 0.0) > 1e-3 for row in measured.state.log_history)


def test_identity_with_a_reference_penalty(
    train: Callable[..., Any], course_rounding: Any, tmp_path: Path
) -> None:
    """The reference comes from the folder the model was loaded from, as in TRL."""
    folder = str(tmp_path / "model")
    make_tiny_model().save_pretrained(folder)
    # At 0.02 gradients of norm 120 make one rounding ten times as large with each step.
    settings = {
        **PLAIN_DESCENT,
        "learning_rate": 0.005,
        "beta": 0.2,
        "model_init_kwargs": {"dtype": "float32"},
    }
    plain = train(GRPOTrainer, GRPOConfig, model=folder, **CLIP_OFF, **settings)
    ours = train(TROLLTrainer, TROLLConfig, model=folder, **TRUST_REGION_OFF, **settings)
    _assert_same_course(plain, ours, course_rounding(plain))
    assert max(row.get("kl", 0.0) for row in plain.state.log_history) > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_identity_with_lora_which_trains_nothing_but_adapters(
    train: Callable[..., Any], course_rounding: Any, beta: float
) -> None:
    def lora() -> dict[str, Any]:
        return {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)}

    settings = {**PLAIN_DESCENT, "learning_rate": 0.05, "beta": beta}
    plain = train(GRPOTrainer, GRPOConfig, trainer_arguments=lora(), **CLIP_OFF, **settings)
    ours = train(TROLLTrainer, TROLLConfig, trainer_arguments=lora(), **TRUST_REGION_OFF, **settings)
    _assert_same_course(plain, ours, course_rounding(plain))
    start = dict(make_tiny_model().named_parameters())
    adapters = 0.0
    for name, parameter in ours.model.named_parameters():
        if "lora_" in name:
            adapters = max(adapters, parameter.abs().max().item() if "lora_B" in name else 0.0)
        else:
            original = name.replace("base_model.model.", "").replace(".base_layer", "")
            assert (parameter == start[original]).all(), name
    assert adapters > 1e-2


def test_identity_while_evaluating(train: Callable[..., Any], course_rounding: Any) -> None:
    """Evaluation in between, whose batches and metrics go their own way, disturbs nothing."""
    settings = {
        **PLAIN_DESCENT,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 8,
        "max_steps": 4,
    }
    evaluation = {"eval_dataset": make_prompts().select(range(4))}
    plain = train(GRPOTrainer, GRPOConfig, trainer_arguments=evaluation, **CLIP_OFF, **settings)
    ours = train(TROLLTrainer, TROLLConfig, trainer_arguments=evaluation, **TRUST_REGION_OFF, **settings)
    _assert_same_course(plain, ours, course_rounding(plain))
    evaluated = [row for row in ours.state.log_history if "eval_loss" in row]
    assert len(evaluated) == 2
    # In evaluation the policy is its own old policy.
    assert all(abs(row["eval_trust_region/kl_max"]) < 1e-6 for row in evaluated)
