"""TROLL on the whole vocabulary: the dense loss and gradient, and what is kept of the old policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_language_model import largest_difference, make_prompts, make_tiny_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.errors import ConfigError
from tether.integrations.exact_head import take_snapshot
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.losses import troll
from tether.projection import kl_categorical

SETTINGS = {"steps_per_generation": 1, "num_iterations": 2, "temperature": 0.9, "troll_top_k": 4}


def _rollouts(trainer: Any) -> dict[str, Any]:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions(
        [trainer.train_dataset[i] for i in (3, 17) for _ in range(4)]
    )


def _move(model: torch.nn.Module, distance: float = 0.04) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=distance)


def _dense(model: Any, inputs: dict[str, Any]) -> Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    return (logits / SETTINGS["temperature"]).log_softmax(-1)


def _lora() -> dict[str, Any]:
    return {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)}


@pytest.mark.parametrize("region", ["token", "sequence"])
@pytest.mark.parametrize("case", ["trained head", "tied head", "gspo", "adapters", "tools"])
def test_loss_and_gradient_are_those_of_whole_distributions(
    make_trainer: Callable[..., Any], case: str, region: str
) -> None:
    """Only four ids of each old distribution are kept."""
    model = make_tiny_model(tie_word_embeddings=case == "tied head")
    gspo = {"importance_sampling_level": "sequence"} if case == "gspo" else {}
    trainer = make_trainer(
        TROLLTrainer, TROLLConfig, model=model, troll_region=region, loss_type="grpo", **SETTINGS, **gspo,
        trainer_arguments=_lora() if case == "adapters" else None,
    )  # fmt: skip
    inputs = _rollouts(trainer)
    if case == "tools":
        inputs["tool_mask"] = (torch.rand(inputs["completion_ids"].shape) < 0.7).long()
        inputs["num_items_in_batch"] = (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    assert (trainer._old_head is None) == (case == "adapters")
    with torch.no_grad():
        old = _dense(trainer.model, inputs)
    _move(trainer.model, {"adapters": 0.2, "tied head": 0.6}.get(case, 0.04))
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    ours = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
    trainer.model.zero_grad()

    new = _dense(trainer.model, inputs)
    ids = inputs["completion_ids"][..., None]
    expected = troll(
        new.gather(-1, ids).squeeze(-1), old.gather(-1, ids).squeeze(-1), inputs["advantages"],
        inputs["completion_mask"] * inputs.get("tool_mask", 1), response_ids=ids.squeeze(-1), new=new,
        old=old, region=region, loss_agg_mode="seq-mean-token-mean",  # type: ignore[arg-type]
        ratio_level="sequence" if gspo else "token",
    )  # fmt: skip
    assert expected.metrics["projected"] > 0.2
    # Of a log-probability in either policy, which a ratio of either sign of advantage passes on.
    within = 4 * unit_of(torch.stack((new, old)).gather(-1, ids.expand(2, *ids.shape)))
    assert loss.item() == pytest.approx(expected.loss.item(), abs=within)
    expected.loss.backward()
    theirs = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    ours_flat, theirs_flat = (torch.cat([g.flatten() for g in side]) for side in (ours, theirs))
    assert (ours_flat - theirs_flat).norm() <= 4 * SUMMED_ANOTHER_WAY * unit_of(theirs_flat.norm())
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    for name in (
        ("projected", "regression") if region == "sequence" else ("projected", "regression", "mean_step")
    ):
        wanted = expected.metrics[name].item()
        assert metrics[f"trust_region/{name}"] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_metrics_say_what_was_certified_and_what_had_to_be_looked_at(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer(TROLLTrainer, TROLLConfig, **SETTINGS)
    inputs = _rollouts(trainer)
    trainer._compute_loss(trainer.model, inputs)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert logged["trust_region/certified"] == 1.0, "nothing has moved"
    _move(trainer.model, 0.005)
    trainer._compute_loss(trainer.model, inputs)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    new, old = _dense(trainer.model, inputs), _dense(make_tiny_model(), inputs)
    kl = kl_categorical(new, old)[inputs["completion_mask"] > 0]
    assert logged["trust_region/projected"] == pytest.approx((kl > 0.05).float().mean().item())
    assert 0 < logged["trust_region/uncertain"] <= 1 - logged["trust_region/certified"]


@pytest.mark.parametrize("variant", ["dapo", "gspo", "accumulation", "checkpointing", "adapters"])
def test_on_a_support_too_it_is_grpo_without_clip_if_nothing_is_bounded(
    train: Callable[..., Any], course_rounding: Any, variant: str
) -> None:
    """As test_trl_identity.py shows for the whole vocabulary, the default."""
    settings: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 1e9}
    settings |= {
        "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        "checkpointing": {"gradient_checkpointing": True},
    }.get(variant, {})
    lora = {"trainer_arguments": _lora()} if variant == "adapters" else {}
    plain = train(GRPOTrainer, GRPOConfig, epsilon=math.inf, **settings, **lora)
    off = {"troll_kl_bound": math.inf, "troll_alpha": 0.0, "troll_support": "bucket"}
    ours = train(TROLLTrainer, TROLLConfig, **off, **settings, **lora)
    assert largest_difference(plain.model, ours.model) <= course_rounding(plain).weights
    assert max(row.get("trust_region/kl_max", 0.0) for row in ours.state.log_history) > 1e-3


def test_between_updates_the_old_policy_takes_the_memory_of_its_tokens(train: Callable[..., Any]) -> None:
    sizes = {}
    for support in ("exact", "bucket"):
        trainer = train(TROLLTrainer, TROLLConfig, troll_support=support, troll_top_k=4, max_steps=2)
        (packed,) = {type(batch["old_policy"]) for batch in trainer._buffered_inputs}
        assert packed.__name__ == "_Packed"
        assert not any(key.startswith("old_support") for batch in trainer._buffered_inputs for key in batch)
        rows = [row for row in trainer.state.log_history if "trust_region/old_policy_bytes" in row]
        assert len(rows) == 1, "reported once a batch of rollouts"
        sizes[support] = rows[0]["trust_region/old_policy_bytes"]
    # At most 4 ids and the sampled one, 16 bytes a row of the padded batch and a flag; 32 numbers of state.
    assert 12 < sizes["bucket"] < 5 * 8 + 2 * (8 + 8 + 1) + 8
    assert sizes["exact"] - sizes["bucket"] == pytest.approx(4 * 32, abs=8)


def test_the_old_head_is_that_of_the_rollouts_in_use(train: Callable[..., Any]) -> None:
    """Taken anew with each batch; an evaluation in between, on the present head, leaves it alone."""
    seen: list[tuple[int, Tensor, Tensor]] = []

    class Watching(TROLLTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            if self.model.training:
                assert self._old_head is not None
                present = self.model.lm_head.weight.detach().clone()
                seen.append((self._step, self._old_head.weight.clone(), present))
            return super()._compute_loss(model, inputs)

    trainer = train(
        Watching, TROLLConfig, trainer_arguments={"eval_dataset": make_prompts().select(range(4))},
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
    )  # fmt: skip
    start = make_tiny_model().lm_head.weight
    for index, (_, old, present) in enumerate(seen):
        first_of_batch = seen[index - index % 4]
        assert torch.equal(old, first_of_batch[2])
        assert torch.equal(present, old) == (index % 4 == 0)
    assert torch.equal(seen[0][1], start)
    evaluated = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert all(abs(row["eval_trust_region/kl_max"]) < 1e-6 for row in evaluated)


def test_the_baseline_keeps_neither_hidden_states_nor_a_head(train: Callable[..., Any]) -> None:
    trainer = train(OldPolicyTrainer, GRPOConfig, max_steps=2)
    assert trainer._old_head is None
    assert all(batch["old_policy"].hidden is None for batch in trainer._buffered_inputs)


def test_a_head_that_is_not_whole_is_refused_and_a_frozen_one_is_not_copied() -> None:
    def at_hand(*_: Any) -> Any:
        return nullcontext()

    for shard in (torch.zeros(0), torch.zeros(96)):
        with pytest.raises(ConfigError, match="fsdp_version"):
            take_snapshot(shard.requires_grad_(), None, at_hand)
    assert take_snapshot(torch.zeros(3, 2), torch.zeros(3), at_hand) is None
    learns = torch.zeros(3).requires_grad_()
    assert take_snapshot(torch.zeros(3, 2), learns, at_hand) is not None, "a bias alone may learn"
