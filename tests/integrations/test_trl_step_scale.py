"""VCPO's step: how few responses decide an update, and a learning rate that follows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tether.errors import ConfigError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_losses import PolicyLossTrainer
from tether.integrations.trl_step_scale import effective_share, response_weights
from tether.llm.config import TrainConfig

# isort: split
from trl import GRPOConfig


def _share(new: np.ndarray, old: np.ndarray, mask: np.ndarray, largest: float) -> float:
    """The same, written a response at a time in terms of probabilities."""
    weights = []
    for p, q, kept in zip(np.exp(new), np.exp(old), mask, strict=True):
        weight = 1.0
        for place in range(len(kept)):
            weight *= p[place] / q[place] if kept[place] else 1.0
        weights.append(min(weight, largest))
    total = sum(weights)
    return 1 / (len(weights) * sum((weight / total) ** 2 for weight in weights))


@pytest.mark.parametrize("largest", [math.inf, 2.0, 0.5])
def test_the_share_is_that_of_the_equation(largest: float) -> None:
    rng = np.random.default_rng(0)
    for responses in (1, 2, 7):
        new, old = rng.uniform(-3, -0.1, (2, responses, 12))
        mask = rng.random((responses, 12)) < 0.7
        weights = response_weights(*map(torch.as_tensor, (new, old, mask)), largest=largest)
        assert effective_share(weights) == pytest.approx(_share(new, old, mask, largest), rel=1e-6)


def test_ratios_that_explode_leave_a_share() -> None:
    new, old = torch.zeros(4, 30), torch.full((4, 30), -50.0)
    old[1:] = 0.0
    weights = response_weights(new, old, torch.ones(4, 30))
    assert effective_share(weights) == pytest.approx(0.25)
    assert effective_share(torch.zeros(3)) == 1.0


@pytest.mark.parametrize("trainer_class", [TROLLTrainer, PolicyLossTrainer, OldPolicyTrainer])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_step_is_as_long_as_the_share_says(
    make_trainer: Callable[..., Any], trainer_class: Any, accumulation: int
) -> None:
    """Under SGD, whose step is the learning rate times the gradient: against the same update without it."""
    troll = trainer_class is TROLLTrainer
    rival = {"policy_loss": "tis"} if trainer_class is PolicyLossTrainer else {}
    moved, kept = [], []
    for scale in (None, math.inf):
        trainer = make_trainer(
            trainer_class, TROLLConfig if troll else GRPOConfig, optim="sgd", learning_rate=0.5,
            max_steps=2, gradient_accumulation_steps=accumulation, steps_per_generation=2 * accumulation,
            max_grad_norm=0.0, lr_scheduler_type="linear", trainer_arguments={"step_scale": scale, **rival},
        )  # fmt: skip
        weights = [weight.detach().clone() for weight in trainer.model.parameters()]
        steps = []
        inner = trainer.create_optimizer()

        def before(*_: Any, inner: Any = inner, steps: Any = steps) -> None:
            steps.append(inner.param_groups[0]["lr"])

        inner.register_step_pre_hook(before)
        trainer.train()
        change = [w.detach() - old for w, old in zip(trainer.model.parameters(), weights, strict=True)]
        moved.append(torch.cat([c.flatten() for c in change]))
        rows = [row for row in trainer.state.log_history if "loss" in row]
        kept.append((steps, [row["learning_rate"] for row in rows], rows))
    (plain, logged, _), (scaled, logged_too, rows) = kept
    shares = [row["trust_region/effective_share"] for row in rows]
    assert shares[0] == pytest.approx(1.0)  # the policy that sampled
    assert 0 < shares[1] < 1
    assert scaled == pytest.approx([rate * math.sqrt(s) for rate, s in zip(plain, shares, strict=True)])
    assert logged == logged_too == plain  # the schedule does not see it
    assert not torch.equal(*moved)


def test_settings_out_of_range_are_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="a positive number such as 2; got 0"):
        make_trainer(TROLLTrainer, TROLLConfig, trainer_arguments={"step_scale": 0})
    with pytest.raises(ConfigError, match="a positive number such as 2; got -1"):
        TrainConfig(step_scale=-1)
