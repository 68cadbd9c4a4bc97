"""Estimators in place of TRL's: TRL's own where it has them, the functions' values where it has not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_language_model import largest_difference, make_tiny_model
from trl import GRPOConfig, GRPOTrainer

from tether.errors import ConfigError, TetherError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_advantages import FromRewards, rewards_at_the_end
from tether.integrations.trl_losses import PolicyLossTrainer

PLAIN_DESCENT = {"optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 1e9, "max_steps": 4}


def with_advantage(name: str, **options: Any) -> dict[str, Any]:
    return {"trainer_arguments": {"estimator": FromRewards(name, options)}}


@pytest.mark.parametrize(
    ("name", "options", "scale"), [("grpo", {"epsilon": 1e-4}, "group"), ("dr_grpo", {}, "none")]
)
def test_trls_own_advantages_on_this_path(
    train: Callable[..., Any],
    course_rounding: Any,
    name: str,
    options: dict[str, Any],
    scale: str,
) -> None:
    trl = train(GRPOTrainer, GRPOConfig, scale_rewards=scale, **PLAIN_DESCENT)
    ours = train(OldPolicyTrainer, GRPOConfig, **with_advantage(name, **options), **PLAIN_DESCENT)
    assert largest_difference(trl.model, ours.model) <= course_rounding(trl).weights
    assert largest_difference(trl.model, make_tiny_model()) > 1e-3


@pytest.mark.parametrize("base", [OldPolicyTrainer, TROLLTrainer, PolicyLossTrainer])
@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_estimators_reach_every_trust_region(make_trainer: Callable[..., Any], base: Any, name: str) -> None:
    """What the loss sees is the estimator's function of the rewards TRL logged."""
    arguments = with_advantage(name)
    if base is PolicyLossTrainer:
        arguments["trainer_arguments"]["policy_loss"] = "sapo"
    config = TROLLConfig if base is TROLLTrainer else GRPOConfig
    trainer = make_trainer(base, config, **arguments, **PLAIN_DESCENT)
    outputs: list[dict[str, Any]] = []
    original = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: outputs.append(original(inputs)) or outputs[-1]
    trainer.train()
    output = outputs[0]
    texts = trainer.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
    from tiny_language_model import reward_digits

    rewards = torch.tensor(reward_digits(texts))
    expected = FromRewards(name).compute(rewards, output["completion_mask"], 4)
    torch.testing.assert_close(output["advantages"], expected)
    assert expected.abs().max() > 0.1
    assert largest_difference(trainer.model, make_tiny_model()) > 1e-3


def test_rewards_stand_on_the_last_token_that_counts() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    placed = rewards_at_the_end(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert placed.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]


def test_whitening_spans_all_processes() -> None:
    """Two processes of two rows each, of different lengths, against one of four."""
    masks = [torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])]
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0])
    everyone = torch.cat([torch.nn.functional.pad(masks[0], (0, 1)), masks[1]])
    whole = FromRewards("reinforce_plus_plus").compute(rewards, everyone, 2)
    for rank, mask in enumerate(masks):
        accelerator = SimpleNamespace(
            process_index=rank, gather=lambda _: everyone, pad_across_processes=lambda rows, dim: rows
        )
        trainer = SimpleNamespace(accelerator=accelerator, num_generations=2)
        estimator = FromRewards("reinforce_plus_plus")
        mine = estimator.advantages(trainer, rewards, {"completion_mask": mask})
        assert mine.shape == mask.shape
        torch.testing.assert_close(mine, whole[2 * rank : 2 * rank + 2, : mask.shape[1]])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {}, "Unknown estimator 'ppo'"),
        ("gae", {}, r"asks for values, and from rewards there are .* estimator=CriticOptions\(\)"),
        ("rloo", {"gamma": 0.9}, "rloo has no option 'gamma'"),
        ("reinforce_plus_plus", {"lambda": 0.9}, "It has gamma"),
        ("reinforce_plus_plus", {"gamma": 1.5}, r"gamma must lie in \[0, 1\], got 1\.5"),
        ("grpo", {"epsilon": "small"}, "grpo cannot compute with epsilon='small'"),
    ],
)
def test_unknown_estimators_and_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FromRewards(name, options)


@pytest.mark.parametrize(
    ("setting", "value"), [("scale_rewards", "none"), ("multi_objective_aggregation", "normalize_then_sum")]
)
def test_a_setting_of_trls_advantages_is_refused(
    make_trainer: Callable[..., Any], setting: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=f"{setting}='{value}'"):
        make_trainer(OldPolicyTrainer, GRPOConfig, **{setting: value}, **with_advantage("rloo"))


def test_a_response_without_a_reward_is_an_error(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(OldPolicyTrainer, GRPOConfig, **with_advantage("rloo"), **PLAIN_DESCENT)
    trainer.reward_funcs = [lambda completions, **_: [None] + [1.0] * (len(completions) - 1)]
    with pytest.raises(TetherError, match="1 of 32 responses have no reward"):
        trainer.train()


def largest_first(rewards: torch.Tensor, group_ids: torch.Tensor, *, share: float = 0.5) -> torch.Tensor:
    """An estimator of one's own: above a share of the prompt's best reward."""
    best = torch.stack([rewards[group_ids == group].max() for group in group_ids])
    return rewards - share * best


def test_an_estimator_from_outside_is_named_by_where_it_is(train: Callable[..., Any]) -> None:
    by_name = {"trainer_arguments": {"estimator": f"{__name__}:largest_first"}}
    trainer = train(OldPolicyTrainer, GRPOConfig, **by_name, **PLAIN_DESCENT)
    assert largest_difference(trainer.model, make_tiny_model()) > 1e-3
    estimator = FromRewards(f"{__name__}:largest_first", {"share": 1.0})
    found = estimator.compute(torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.ones(4, 2), 2)
    assert found.tolist() == [-2.0, 0.0, 0.0, -2.0]


@pytest.mark.parametrize(
    ("module", "name"), [("trl_advantages", "AdvantageTrainer"), ("trl_critic", "CriticTrainer")]
)
def test_a_class_of_before_says_what_took_its_place(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"has no {name} any more: use the keyword estimator"):
        getattr(importlib.import_module(f"tether.integrations.{module}"), name)
