"""PPO's critic: where its values come from, that it learns, and that a resumed run is the same run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_language_model import largest_difference, make_tiny_model
from trl import GRPOConfig

from tether.advantages import gae, whiten
from tether.errors import CheckpointError, ConfigError, TrainingStoppedError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_advantages import rewards_at_the_end
from tether.integrations.trl_critic import CriticOptions, ValueModel, explained_variance
from tether.integrations.trl_losses import PolicyLossTrainer

LEARNING = {"max_steps": 8, "learning_rate": 1e-3}


def with_critic(**options: Any) -> dict[str, Any]:
    return {"trainer_arguments": {"estimator": CriticOptions(**options)}}


def test_a_value_sees_the_tokens_before_it_and_no_other() -> None:
    """Changing token t may change the values after it, never the value before it."""
    torch.manual_seed(0)
    critic = ValueModel(make_tiny_model())
    torch.nn.init.normal_(critic.head.weight)
    ids = torch.arange(1, 8)[None]
    changed = ids.clone()
    changed[0, 5] = 20  # the third of the last four
    mask = torch.ones_like(ids)
    before, after = critic(ids, mask, 4)[0], critic(changed, mask, 4)[0]
    assert torch.equal(before[:3], after[:3])
    assert not torch.isclose(before[3], after[3])


def test_left_padding_does_not_change_values() -> None:
    critic = ValueModel(make_tiny_model())
    torch.nn.init.normal_(critic.head.weight)
    ids = torch.arange(1, 8)[None]
    padded = torch.cat([torch.full((1, 3), 27), ids], 1)
    mask = torch.cat([torch.zeros(1, 3), torch.ones(1, 7)], 1).long()
    torch.testing.assert_close(
        critic(padded, mask, 4), critic(ids, torch.ones_like(ids), 4), atol=1e-5, rtol=1e-4
    )


def test_the_critic_starts_as_the_policys_backbone_and_at_zero() -> None:
    policy = make_tiny_model()
    critic = ValueModel(policy)
    assert largest_difference(critic.backbone, policy.model) == 0
    ids = torch.arange(1, 8)[None]
    assert not critic(ids, torch.ones_like(ids), 4).any()
    next(critic.backbone.parameters()).data.add_(1)
    assert largest_difference(critic.backbone, policy.model) > 0.5  # a copy, not the policy itself


@pytest.mark.parametrize("base", [OldPolicyTrainer, TROLLTrainer, PolicyLossTrainer])
def test_advantages_are_gae_of_the_critics_values(make_trainer: Callable[..., Any], base: Any) -> None:
    arguments = with_critic(gamma=0.9, gae_lambda=0.8)
    if base is PolicyLossTrainer:
        arguments["trainer_arguments"]["policy_loss"] = "ppo_clip"
    config = TROLLConfig if base is TROLLTrainer else GRPOConfig
    trainer = make_trainer(base, config, **arguments, **LEARNING)
    seen: list[dict[str, Any]] = []
    original = trainer.estimator.advantages

    def advantages_of(trainer: Any, rewards: Any, output: dict[str, Any]) -> Any:
        advantages = original(trainer, rewards, output)
        seen.append({**output, "rewards": rewards, "advantages": advantages})
        return advantages

    trainer.estimator.advantages = advantages_of
    trainer.train()
    for batch in seen:
        mask = batch["completion_mask"]
        at_the_end = rewards_at_the_end(batch["rewards"], mask)
        advantages, returns = gae(at_the_end, batch["old_values"], mask, gamma=0.9, gae_lambda=0.8)
        torch.testing.assert_close(batch["advantages"], whiten(advantages, mask))
        torch.testing.assert_close(batch["returns"], returns)
    assert not seen[0]["old_values"].any()
    assert seen[1]["old_values"].abs().max() > 1e-3
    assert largest_difference(trainer.model, make_tiny_model()) > 1e-3


def test_values_come_to_predict_what_the_prompt_tells(make_trainer: Callable[..., Any]) -> None:
    """A reward that the prompt alone decides can be explained entirely, on responses not learned from yet."""
    settings = {"max_steps": 96, "learning_rate": 1e-6}
    trainer = make_trainer(OldPolicyTrainer, GRPOConfig, **with_critic(learning_rate=3e-3), **settings)
    trainer.reward_funcs = [lambda prompts, **_: [float(prompt[0] in "0246") for prompt in prompts]]
    trainer.train()
    rows = trainer.state.log_history
    explained = [row["critic/explained_variance"] for row in rows if "critic/explained_variance" in row]
    losses = [row["critic/value_loss"] for row in rows if "critic/value_loss" in row]
    assert explained[0] == pytest.approx(0, abs=1e-6)
    assert len(losses) == 96
    assert sum(losses[-8:]) < 0.1 * sum(losses[:8])
    assert sum(explained[-4:]) / 4 > 0.5


def test_accumulated_micro_batches_are_one_update_of_the_critic(train: Callable[..., Any]) -> None:
    """Whatever the lengths of the responses in each: the mean is over the update's tokens."""
    settings = {"max_steps": 2, "learning_rate": 1e-6}  # the second begins with a head that is not zero
    whole = train(OldPolicyTrainer, GRPOConfig, **with_critic(), steps_per_generation=2, **settings)
    parts = train(
        OldPolicyTrainer, GRPOConfig, **with_critic(), gradient_accumulation_steps=4,
        per_device_train_batch_size=2, steps_per_generation=8, **settings,
    )  # fmt: skip
    assert whole.estimator.model.head.bias.item() != 0
    norms = [[row["critic/grad_norm"] for row in t.state.log_history[:2]] for t in (parts, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for ours, theirs in zip(
        parts.estimator.model.parameters(), whole.estimator.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_gradient_that_is_not_finite_reaches_neither_critic_nor_policy(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer(TROLLTrainer, TROLLConfig, **with_critic(learning_rate=0.5), **LEARNING)
    trainer.estimator.model.head.weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(TrainingStoppedError, match=r"critic's gradient is NaN.*learning_rate \(0\.5\)"):
        trainer.train()
    assert not any(parameter.any() for parameter in trainer.estimator.model.head.parameters())
    assert largest_difference(trainer.model, make_tiny_model()) == 0


def test_a_critic_goes_on_learning_where_kl_stop_has_ended_the_policys_updates(
    make_trainer: Callable[..., Any],
) -> None:
    arguments = with_critic()
    arguments["trainer_arguments"]["kl_stop"] = 1e-9
    trainer = make_trainer(OldPolicyTrainer, GRPOConfig, **arguments, **{**LEARNING, "max_steps": 4})
    heads: list[torch.Tensor] = []
    trainer.on_tokens = lambda *_: heads.append(trainer.estimator.model.head.weight.detach().clone())
    trainer.train()
    stopped = [row["trust_region/stopped"] for row in trainer.state.log_history if "loss" in row]
    assert stopped == [0, 1, 1, 1]
    assert all((after - before).abs().max() > 0 for before, after in itertools.pairwise(heads))


def test_a_resumed_run_is_the_same_run_bit_for_bit(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    settings = {**LEARNING, "save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = make_trainer(
        TROLLTrainer, TROLLConfig, output_dir=str(tmp_path / "a"), **with_critic(), **settings
    )
    whole.train()
    resumed = make_trainer(
        TROLLTrainer, TROLLConfig, output_dir=str(tmp_path / "a"), **with_critic(), **settings
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    for ours, theirs in ((resumed.model, whole.model), (resumed.estimator.model, whole.estimator.model)):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert largest_difference(whole.estimator.model.backbone, make_tiny_model().model) > 1e-4


def test_a_checkpoint_without_a_critic_is_refused(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    settings = {**LEARNING, "save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    make_trainer(OldPolicyTrainer, GRPOConfig, output_dir=str(tmp_path / "a"), **settings).train()
    trainer = make_trainer(OldPolicyTrainer, GRPOConfig, **with_critic(), **{**settings, "max_steps": 8})
    with pytest.raises(CheckpointError, match=r"no critic\.safetensors"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))


def test_with_adapters_the_critic_is_a_whole_network(train: Callable[..., Any]) -> None:
    arguments = with_critic()
    arguments["trainer_arguments"]["peft_config"] = LoraConfig(
        r=2, lora_dropout=0.0, target_modules="all-linear"
    )
    trainer = train(OldPolicyTrainer, GRPOConfig, **arguments, **LEARNING)
    names = [name for name, _ in trainer.estimator.model.named_parameters()]
    assert not any("lora" in name for name in names)
    assert len(names) == len(list(make_tiny_model().model.parameters())) + 2
    assert largest_difference(trainer.estimator.model.backbone, make_tiny_model().model) > 1e-4


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([[0.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 0]])
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(torch.ones(1, 3), returns, mask).item() == 0.0
    assert explained_variance(-returns, returns, mask).item() == -3.0
    assert explained_variance(returns, torch.ones(1, 3), mask).item() == 0.0  # nothing to explain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate of the critic must be positive, got 0.0"),
        ({"gae_lambda": 1.5}, r"gae_lambda must lie in \[0, 1\], got 1.5"),
        ({"clip_range": -0.2}, "clip_range of the critic must be positive, got -0.2"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CriticOptions(**options)
