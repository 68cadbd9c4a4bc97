"""Training as people run it: checkpointing, half precision, resuming, evaluating, saving."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_language_model import largest_difference, make_prompts, make_tiny_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

import tether
from tether.errors import TetherWarning
from tether.integrations import exact_head
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_evaluation import Evaluation
from tether.projection import SparseLogProbs, project_sparse


def _steps(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def test_troll_learns(train: Callable[..., Any]) -> None:
    trainer = train(TROLLTrainer, TROLLConfig, max_steps=40)
    rewards = [row["reward"] for row in _steps(trainer) if "reward" in row]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.15


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
def test_gradient_checkpointing_changes_nothing(
    train: Callable[..., Any], course_rounding: Any, reentrant: bool, adapters: bool
) -> None:
    def run(**settings: Any) -> Any:
        lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if adapters else {}
        return train(
            TROLLTrainer, TROLLConfig, optim="sgd", learning_rate=0.02, trainer_arguments=lora, **settings
        )

    plain = run()
    checkpointed = run(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    rounding = course_rounding(plain)
    assert largest_difference(plain.model, checkpointed.model) <= rounding.weights
    losses = [[row["loss"] for row in _steps(trainer)] for trainer in (plain, checkpointed)]
    assert losses[0] == pytest.approx(losses[1], abs=rounding.logged["loss"])


@pytest.mark.parametrize("precision", ["model", "autocast", "autocast, matrix units"])
def test_bfloat16_trains_with_the_projection_on_its_bound(
    make_trainer: Callable[..., Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The projected distribution's divergence, summed by hand in float64 over the support."""
    bound = 0.02
    monkeypatch.setattr(exact_head, "has_matrix_units", lambda _: "matrix units" in precision)
    model = make_tiny_model()
    trainer = make_trainer(
        TROLLTrainer,
        TROLLConfig,
        model=model.to(torch.bfloat16) if precision == "model" else model,
        bf16=precision != "model",
        troll_kl_bound=bound,
        troll_support="bucket",
    )
    divergences = []
    project = trainer._project

    def measure(evaluation: Evaluation, inputs: dict[str, Any]) -> Any:
        log_probs, new = evaluation.log_probs, evaluation.support
        old = SparseLogProbs(
            inputs["old_support_ids"].long(), inputs["old_support_log_probs"], inputs["old_support_log_tail"]
        )
        assert log_probs.dtype == new.log_probs.dtype == old.log_probs.dtype == torch.float32
        result = project_sparse(new.detach(), old, bound)
        projected = result.log_probs.with_buckets().double()
        reference = old.with_buckets().double()
        terms = torch.where(projected.isneginf(), 0.0, projected.exp() * (projected - reference))
        divergences.append(terms.sum(-1)[result.projected])
        return project(evaluation, inputs)

    trainer._project = measure
    trainer._loss_in_forward = lambda inputs: None  # projected afterwards, where it can be measured
    trainer.train()
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in _steps(trainer))
    reached = torch.cat(divergences)
    assert reached.numel() > 20
    assert reached.max() <= bound * (1 + 1e-3)
    assert reached.min() >= bound * (1 - 1e-2)
    assert _steps(trainer)[0]["trust_region/kl_max"] < 1e-5, "the same weights scored twice must agree"


@pytest.mark.parametrize("precision", ["model", "autocast", "autocast, matrix units"])
def test_bfloat16_trains_on_the_whole_vocabulary(
    train: Callable[..., Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_head, "has_matrix_units", lambda _: "matrix units" in precision)
    model = make_tiny_model()
    trainer = train(
        TROLLTrainer, TROLLConfig, troll_kl_bound=0.02, bf16=precision != "model",
        model=model.to(torch.bfloat16) if precision == "model" else model,
    )  # fmt: skip
    rows = _steps(trainer)
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    assert [rows[i]["trust_region/certified"] for i in (0, 4)] == [1.0, 1.0], "scored twice, the same weights"
    assert max(row["trust_region/projected"] for row in rows) > 0.1


def test_under_autocast_a_gpu_multiplies_the_head_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)

    def dtypes(*given: torch.Tensor) -> set[torch.dtype]:
        return {tensor.dtype for tensor in exact_head.as_multiplied(*given)}

    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes(hidden, weight) == {torch.float32}  # here is none
        monkeypatch.setattr(exact_head, "has_matrix_units", lambda _: True)
        assert dtypes(hidden, weight) == {torch.bfloat16}
        assert dtypes(hidden, weight[:0]) == {torch.float32}, "sharded at rest: gathered when it is used"
        given = exact_head.as_multiplied(hidden.bfloat16(), weight, in_float32=True)
        assert {tensor.dtype for tensor in given} == {torch.float32}, "a head that was cast for its own sake"
        (gradient,) = torch.autograd.grad(exact_head.as_multiplied(hidden, weight)[1].sum(), weight)
    assert gradient.dtype == torch.float32
    assert dtypes(hidden, weight) == {torch.float32}


def test_resuming_at_the_end_of_a_batch_of_rollouts_gives_the_same_course(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    def trainer(name: str, steps: int) -> Any:
        folder = str(tmp_path / name)
        return make_trainer(
            TROLLTrainer, TROLLConfig, output_dir=folder, save_strategy="steps", save_steps=4, max_steps=steps
        )

    whole = trainer("whole", 8)
    whole.train()
    trainer("resumed", 4).train()
    resumed = trainer("resumed", 8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-4"))
    assert largest_difference(whole.model, resumed.model) == 0.0
    assert largest_difference(whole.model, make_tiny_model()) > 1e-2
    courses = [
        [{k: v for k, v in row.items() if k not in ("step_time", "num_tokens")} for row in _steps(trainer)]
        for trainer in (whole, resumed)
    ]
    assert courses[0] == courses[1]


def test_a_saved_model_loads_without_tether_and_its_card_names_troll(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = train(TROLLTrainer, TROLLConfig, save_strategy="steps", save_steps=6)
    folder = tmp_path / "checkpoint-6"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert largest_difference(loaded, trainer.model) == 0.0
    card = (tmp_path / "README.md").read_text()
    assert "TROLL: Trust Regions improve Reinforcement Learning" in card
    assert "2510.03817" in card
    assert "eprint       = {arXiv:2510.03817}" in card.split("Cite TROLL as")[1].split("Cite TRL as")[0]
    assert f"- Tether: {tether.__version__}\n- TRL: " in card
    assert "troll" in card.split("---")[1]
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 6


def test_evaluate_before_between_and_after_training(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        TROLLTrainer,
        TROLLConfig,
        per_device_eval_batch_size=8,
        trainer_arguments={"eval_dataset": make_prompts().select(range(6))},
    )
    before = trainer.evaluate()
    assert before["eval_trust_region/kl_max"] == pytest.approx(0.0, abs=1e-6)
    trainer.train()
    after = trainer.evaluate()
    for result in (before, after):
        assert math.isfinite(result["eval_loss"])
        assert result["eval_trust_region/projected"] == 0.0
    # Nothing of the evaluation is counted as training.
    assert not any(name.startswith("eval_") for row in _steps(trainer) for name in row)
    assert len(_steps(trainer)) == 6


@pytest.mark.parametrize("trainer_class", ["troll", "baseline"])
def test_mixture_of_experts_trains_with_its_balancing_loss(
    train: Callable[..., Any],
    course_rounding: Any,
    trainer_class: str,
    tokenizer: Any,
) -> None:
    """With the trust region off, exactly as GRPO, auxiliary loss included."""

    def experts() -> Any:
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
                num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4,
                num_experts_per_tok=2, router_aux_loss_coef=0.1, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
            )
        )  # fmt: skip
        with torch.no_grad():
            model.lm_head.weight.mul_(15)
        return model

    descent = {"optim": "sgd", "learning_rate": 0.005}
    if trainer_class == "troll":
        plain = train(GRPOTrainer, GRPOConfig, model=experts(), epsilon=math.inf, **descent)
        ours = train(
            TROLLTrainer, TROLLConfig, model=experts(), troll_kl_bound=math.inf, troll_alpha=0.0, **descent
        )
    else:
        plain = train(GRPOTrainer, GRPOConfig, model=experts(), **descent)
        ours = train(OldPolicyTrainer, GRPOConfig, model=experts(), **descent)
    rounding = course_rounding(plain)
    assert largest_difference(plain.model, ours.model) <= rounding.weights
    balancing = [row["aux_loss"] for row in _steps(ours)]
    expected = [row["aux_loss"] for row in _steps(plain)]
    assert balancing == pytest.approx(expected, abs=rounding.logged["aux_loss"])
    assert min(balancing) > 0.5


def test_dropout_is_warned_about_for_it_looks_like_divergence(train: Callable[..., Any]) -> None:
    def run(**settings: Any) -> float:
        lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2)}
        # Adapters start as zero, which dropout leaves alone: look at the second batch of rollouts.
        trainer = train(TROLLTrainer, TROLLConfig, trainer_arguments=lora, max_steps=5, **settings)
        return _steps(trainer)[4]["trust_region/kl_max"]

    with pytest.warns(TetherWarning, match="Set disable_dropout=True"):
        noise = run()
    assert noise > 1e-4
    assert run(disable_dropout=True) == pytest.approx(0.0, abs=1e-6)


def test_dropout_that_is_no_layer_is_warned_about_too(train: Callable[..., Any]) -> None:
    """Attention hands its rate to a function, where disable_dropout does not reach it."""

    def run(rate: float) -> float:
        model = make_tiny_model(attention_dropout=rate)
        trainer = train(TROLLTrainer, TROLLConfig, model=model, max_steps=1, disable_dropout=True)
        return _steps(trainer)[0]["trust_region/kl_max"]

    with pytest.warns(TetherWarning, match=r'self_attn\.attention_dropout=0\.2.*"attention_dropout": 0\.0'):
        noise = run(0.2)
    assert noise > 1e-4
    assert run(0.0) == pytest.approx(0.0, abs=1e-6)


def test_a_models_own_reshaping_of_samples_is_warned_about(make_trainer: Callable[..., Any]) -> None:
    """TRL fills what it is not given from the model."""

    def build(compact: bool = False, **settings: Any) -> None:
        model = make_tiny_model()
        model.generation_config.no_repeat_ngram_size = 1
        arguments = {"compact_rollouts": compact}
        make_trainer(OldPolicyTrainer, GRPOConfig, model=model, trainer_arguments=arguments, **settings)

    with pytest.warns(TetherWarning, match=r"'no_repeat_ngram_size': 1.*no_repeat_ngram_size = None"):
        build()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The model's own generation settings")
        build(generation_kwargs={"no_repeat_ngram_size": 0})
        build(compact=True)  # which asks the model alone


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_a_head_trained_in_full_beside_adapters(
    train: Callable[..., Any], course_rounding: Any, beta: float
) -> None:
    """PEFT's `modules_to_save` keeps two heads: the trained one and, for the reference, the first."""

    def run(trainer_class: Any, config_class: Any, **settings: Any) -> Any:
        lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])}
        return train(
            trainer_class, config_class, trainer_arguments=lora, optim="sgd", learning_rate=0.02, beta=beta,
            **settings,
        )  # fmt: skip

    plain = run(GRPOTrainer, GRPOConfig, epsilon=math.inf)
    ours = run(TROLLTrainer, TROLLConfig, troll_kl_bound=math.inf, troll_alpha=0.0)
    assert largest_difference(plain.model, ours.model) <= course_rounding(plain).weights
    heads = {n: p for n, p in ours.model.named_parameters() if "lm_head" in n}
    moved = {n: (p - make_tiny_model().lm_head.weight).abs().max().item() for n, p in heads.items()}
    assert sorted(value > 1e-3 for value in moved.values()) == [False, True]
