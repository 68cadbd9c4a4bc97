"""Training on packed sequences takes the course of training on padded ones, whatever is trained and how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from packed_models import UNFIT
from peft import LoraConfig
from tiny_language_model import largest_difference, make_settings, make_tiny_model, make_tokenizer
from transformers import MambaConfig, MambaForCausalLM
from trl import GRPOConfig

from tether.errors import ConfigError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_critic import CriticOptions
from tether.integrations.trl_losses import PolicyLossTrainer

# Adam divides by the root of a tiny second moment and would blow rounding errors up.
PLAIN_DESCENT = {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 1e9, "max_steps": 4}

#: Prompts of mixed lengths; where a response ends is up to the model.
PROMPTS = [{"prompt": "+".join("123456789"[: 1 + 4 * (n % 3)]) + "="} for n in range(16)]

LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)}

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"troll_support": "exact"},
    "bucket": {"troll_support": "bucket", "loss_type": "grpo", "entropy_coef": 0.05},
    "paper": {"troll_support": "paper"},
    "sequences, checkpointing": {
        "troll_region": "sequence", "importance_sampling_level": "sequence", "gradient_checkpointing": True,
    },
    "accumulation, truncated masked": {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
        "mask_truncated_completions": True,
    },
    "adapters and a reference": {"trainer_arguments": LORA, "beta": 0.2, "learning_rate": 0.05},
}  # fmt: skip


@pytest.fixture
def course(tmp_path: Path) -> Callable[..., Any]:
    """course(trainer class, config class, setting=...) -> the trained trainer, and the size of each pass."""

    def run(trainer_class: Any, config_class: Any, *, model: Any = None, **settings: Any) -> Any:
        arguments = settings.pop("trainer_arguments", {})
        model = model or make_tiny_model()
        sizes: list[int] = []
        if not isinstance(model, str):
            model.get_input_embeddings().register_forward_pre_hook(
                lambda module, args: sizes.append(args[0].numel()) if module.training else None
            )
        trainer = trainer_class(
            model=model,
            reward_funcs=_reward,
            args=config_class(**{**make_settings(tmp_path), **PLAIN_DESCENT, **settings}),
            train_dataset=Dataset.from_list(PROMPTS),
            processing_class=make_tokenizer(),
            **arguments,
        )
        trainer.train()
        return trainer, sizes

    return run


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def _assert_same_course(padded: Any, packed: Any) -> None:
    """Every number logged at each step but times, and the weights at the end."""
    assert len(padded.state.log_history) == len(packed.state.log_history)
    for expected, found in zip(padded.state.log_history, packed.state.log_history, strict=True):
        for name, value in expected.items():
            if "time" in name or "per_second" in name or "bytes" in name:
                continue
            assert found[name] == pytest.approx(value, abs=2e-4, rel=1e-3, nan_ok=True), name
    assert largest_difference(padded.model, packed.model) < 1e-4
    learned = [row["grad_norm"] for row in packed.state.log_history if "grad_norm" in row]
    assert max(learned) > 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_troll_on_packed_sequences_is_troll_on_padded_ones(course: Callable[..., Any], variant: str) -> None:
    settings = {"troll_kl_bound": 0.01, **VARIANTS[variant]}
    padded, padded_sizes = course(TROLLTrainer, TROLLConfig, **settings)
    packed, packed_sizes = course(TROLLTrainer, TROLLConfig, troll_pack_sequences=True, **settings)
    _assert_same_course(padded, packed)
    assert sum(packed_sizes) < 0.85 * sum(padded_sizes), "nothing was packed, so this test compared nothing"
    assert max(row.get("trust_region/kl_max", 0.0) for row in packed.state.log_history) > 1e-3


@pytest.mark.parametrize("variant", ["exact", "bucket", "accumulation, truncated masked"])
def test_troll_on_shared_beginnings_is_troll_on_padded_rows(course: Callable[..., Any], variant: str) -> None:
    settings = {"troll_kl_bound": 0.01, **VARIANTS[variant]}
    padded, padded_sizes = course(TROLLTrainer, TROLLConfig, **settings)
    shared, shared_sizes = course(TROLLTrainer, TROLLConfig, troll_share_prefixes=True, **settings)
    _assert_same_course(padded, shared)
    assert sum(shared_sizes) < 0.7 * sum(padded_sizes), "nothing was shared, so this test compared nothing"


PACKED = {"pack_sequences": True}
SHARED = {"pack_sequences": "shared"}


@pytest.mark.filterwarnings("ignore:Every batch of rollouts serves a single update")
@pytest.mark.parametrize("settings", [{}, {"steps_per_generation": 1}], ids=["stale", "no old policy"])
def test_the_clip_too(course: Callable[..., Any], settings: dict[str, Any]) -> None:
    padded, padded_sizes = course(OldPolicyTrainer, GRPOConfig, **settings)
    packed, packed_sizes = course(OldPolicyTrainer, GRPOConfig, trainer_arguments=PACKED, **settings)
    _assert_same_course(padded, packed)
    assert sum(packed_sizes) < sum(padded_sizes)


@pytest.mark.parametrize("packing", [PACKED, SHARED], ids=["packed", "shared"])
def test_rival_losses_too(course: Callable[..., Any], packing: dict[str, Any]) -> None:
    arguments = {"policy_loss": "dppo", "loss_options": {"divergence": "top-k-kl"}}
    padded, _ = course(PolicyLossTrainer, GRPOConfig, trainer_arguments=arguments)
    packed, _ = course(PolicyLossTrainer, GRPOConfig, trainer_arguments=arguments | packing)
    _assert_same_course(padded, packed)


def test_compact_rollouts_learn_and_refuse_what_they_do_not_do(course: Callable[..., Any]) -> None:
    trainer, _ = course(OldPolicyTrainer, GRPOConfig, trainer_arguments={"compact_rollouts": True})
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert max(row["grad_norm"] for row in logged) > 1e-2
    assert trainer.model.training
    for refused, reason in (
        ({"top_p": 0.9}, "sampling is truncated"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"max_completion_length": None}, "max_completion_length=None"),
    ):
        with pytest.raises(ConfigError, match=reason):
            course(OldPolicyTrainer, GRPOConfig, trainer_arguments={"compact_rollouts": True}, **refused)


@pytest.mark.parametrize("kind", ["states", "convolutions"])
def test_compact_rollouts_of_more_than_keys_and_values_are_refused(
    make_trainer: Callable[..., Any], kind: str
) -> None:
    """When the trainer is made, and not at the first rollout."""
    build, reason = UNFIT[kind]
    with pytest.raises(ConfigError, match=f"remembers more of a row than keys and values: .*{reason}"):
        make_trainer(
            OldPolicyTrainer, GRPOConfig, model=build(), trainer_arguments={"compact_rollouts": True}
        )


def test_a_critic_too(course: Callable[..., Any]) -> None:
    # Adam, as it is the critic's own; a rate at which rounding stays rounding.
    settings = {"trainer_arguments": {"estimator": CriticOptions(learning_rate=1e-4)}, "troll_kl_bound": 0.01}
    padded, _ = course(TROLLTrainer, TROLLConfig, **settings)
    packed, _ = course(TROLLTrainer, TROLLConfig, troll_pack_sequences=True, **settings)
    _assert_same_course(padded, packed)
    assert packed.estimator.model.backbone._packing_checked, "the critic ran on padded rows"
    assert largest_difference(padded.estimator.model, packed.estimator.model) < 1e-4


def test_a_reference_model_of_its_own_too(course: Callable[..., Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    make_tiny_model().save_pretrained(folder)
    settings = {"model": folder, "beta": 0.2, "model_init_kwargs": {"dtype": "float32"}}
    padded, _ = course(TROLLTrainer, TROLLConfig, **settings)
    packed, _ = course(TROLLTrainer, TROLLConfig, troll_pack_sequences=True, **settings)
    _assert_same_course(padded, packed)
    assert packed.ref_model.base_model._packing_checked, "the reference ran on padded rows"
    assert max(row.get("kl", 0.0) for row in packed.state.log_history) > 1e-4


def test_what_cannot_be_packed_is_refused_before_training(course: Callable[..., Any]) -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=29, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot train on packed sequences"):
        course(TROLLTrainer, TROLLConfig, model=model, troll_pack_sequences=True)
