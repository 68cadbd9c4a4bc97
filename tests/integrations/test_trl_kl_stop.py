"""A budget of KL a batch: what it does to the weights and what it refuses; test_trl_resume.py resumes it."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_language_model import largest_difference
from trl import GRPOConfig

from tether.errors import ConfigError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_losses import PolicyLossTrainer

SETTINGS = {"max_steps": 8, "learning_rate": 3e-3}


def column(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize("base", [OldPolicyTrainer, TROLLTrainer, PolicyLossTrainer])
def test_once_over_the_budget_nothing_moves_until_the_next_batch(
    make_trainer: Callable[..., Any], base: Any
) -> None:
    arguments = {"kl_stop": 1e-3, **({"policy_loss": "sapo"} if base is PolicyLossTrainer else {})}
    config = TROLLConfig if base is TROLLTrainer else GRPOConfig
    trainer = make_trainer(base, config, trainer_arguments=arguments, **SETTINGS)
    weights: list[dict[str, torch.Tensor]] = []
    trainer.on_tokens = lambda trainer, inputs, tokens: weights.append(
        copy.deepcopy(trainer.model.state_dict())
    )
    trainer.train()
    weights.append(trainer.model.state_dict())
    stopped, kl = column(trainer, "trust_region/stopped"), column(trainer, "trust_region/kl_mean")
    assert stopped[0] == stopped[4] == 0  # a fresh batch: old and new are the same
    assert stopped[1] == 1
    for update, (before, after) in enumerate(itertools.pairwise(weights)):
        unmoved = all(torch.equal(before[name], after[name]) for name in before)
        assert unmoved == bool(stopped[update])
        assert stopped[update] == (kl[update] > 1e-3 or (update % 4 > 0 and stopped[update - 1] == 1))


def test_a_budget_that_is_never_reached_changes_nothing(train: Callable[..., Any]) -> None:
    plain = train(TROLLTrainer, TROLLConfig, **SETTINGS)
    ours = train(TROLLTrainer, TROLLConfig, trainer_arguments={"kl_stop": 1e6}, **SETTINGS)
    assert largest_difference(plain.model, ours.model) == 0


@pytest.mark.parametrize("budget", [0.0, -1.0, math.inf, math.nan, "0.1", True])
def test_what_is_no_budget_is_refused(make_trainer: Callable[..., Any], budget: Any) -> None:
    with pytest.raises(ConfigError, match=f"kl_stop must be a positive number, got {budget!r}"):
        make_trainer(OldPolicyTrainer, GRPOConfig, trainer_arguments={"kl_stop": budget})


def test_updates_that_learn_from_two_batches_are_refused(make_trainer: Callable[..., Any]) -> None:
    arguments = {"trainer_arguments": {"kl_stop": 0.1}, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match=r"= 3 micro-batches.*gradient_accumulation_steps=2"):
        make_trainer(OldPolicyTrainer, GRPOConfig, steps_per_generation=3, **arguments)


def test_a_budget_that_deepspeed_would_not_heed_is_refused(make_trainer: Callable[..., Any]) -> None:
    """Its engine makes the update within the backward pass."""
    trainer = make_trainer(OldPolicyTrainer, GRPOConfig, trainer_arguments={"kl_stop": 0.1})
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ConfigError, match="DeepSpeed has made it by then"):
        trainer._check_updates_can_stop()


@pytest.mark.parametrize("name", ["InsideTrainer", "InsideOptions"])
def test_its_former_place_says_where_it_is(name: str) -> None:
    from tether.integrations import trl_inside

    with pytest.raises(ImportError, match="use the keyword kl_stop"):
        getattr(trl_inside, name)
