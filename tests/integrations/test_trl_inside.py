"""The remedies that keep the network itself inside: what each does to the weights, and that it resumes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language_model import largest_difference, make_tiny_model
from trl import GRPOConfig

from tether.errors import CheckpointError, ConfigError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_inside import InsideOptions, InsideTrainer
from tether.integrations.trl_losses import PolicyLossTrainer

SETTINGS = {"max_steps": 8, "learning_rate": 3e-3}


def inside(base: Any, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    made = type("Inside", (InsideTrainer, base), {})
    config = TROLLConfig if issubclass(base, TROLLTrainer) else GRPOConfig
    return made, config, {"trainer_arguments": {"inside": InsideOptions(**options)}}


def column(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize("base", [OldPolicyTrainer, TROLLTrainer, PolicyLossTrainer])
def test_once_over_the_budget_nothing_moves_until_the_next_batch(
    make_trainer: Callable[..., Any], base: Any
) -> None:
    made, config, arguments = inside(base, kl_stop=1e-3)
    if base is PolicyLossTrainer:
        arguments["trainer_arguments"]["policy_loss"] = "sapo"
    trainer = make_trainer(made, config, **arguments, **SETTINGS)
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
    made, config, arguments = inside(TROLLTrainer, kl_stop=1e6)
    plain = train(TROLLTrainer, TROLLConfig, **SETTINGS)
    ours = train(made, config, **arguments, **SETTINGS)
    assert largest_difference(plain.model, ours.model) == 0


def test_alpha_rises_outside_and_falls_inside(train: Callable[..., Any]) -> None:
    made, config, arguments = inside(TROLLTrainer, alpha_tolerance=0.01, alpha_rate=0.5)
    outside = column(train(made, config, **arguments, troll_kl_bound=1e-4, **SETTINGS), "trust_region/alpha")
    assert outside[-1] > 1
    _, _, loose = inside(TROLLTrainer, alpha_tolerance=0.01, alpha_rate=0.5)
    within = column(train(made, config, **loose, troll_kl_bound=1e3, **SETTINGS), "trust_region/alpha")
    assert within == pytest.approx([torch.tensor(-0.5 * (i + 1)).exp().item() for i in range(8)])


def test_alpha_that_adapts_keeps_the_network_nearer(train: Callable[..., Any]) -> None:
    settings = {"max_steps": 32, "learning_rate": 3e-3, "steps_per_generation": 16, "num_generations": 4}
    made, config, arguments = inside(TROLLTrainer, alpha_tolerance=0.05, alpha_rate=0.5)
    fixed = train(TROLLTrainer, TROLLConfig, **settings)
    adapted = train(made, config, **arguments, **settings)
    near, far = (column(trainer, "trust_region/kl_mean") for trainer in (adapted, fixed))
    assert sum(near[16:]) < 0.7 * sum(far[16:])


def test_the_last_updates_are_the_pull_alone(make_trainer: Callable[..., Any]) -> None:
    """Their gradient is alpha times the regression's: with alpha 0 the weights stand still."""
    made, config, arguments = inside(TROLLTrainer, regression_updates=2)
    settings = {"optim": "sgd", "learning_rate": 0.01, "max_steps": 8, "max_grad_norm": 1e9}
    trainer = make_trainer(made, config, **arguments, troll_alpha=0.0, **settings)
    weights: list[dict[str, torch.Tensor]] = []
    trainer.on_tokens = lambda trainer, inputs, tokens: weights.append(
        copy.deepcopy(trainer.model.state_dict())
    )
    trainer.train()
    weights.append(trainer.model.state_dict())
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(weights)]
    assert moved == [True, True, False, False] * 2


def test_the_pull_alone_brings_the_network_nearer(train: Callable[..., Any]) -> None:
    settings = {"max_steps": 4, "optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 1e9}
    settings |= {"troll_kl_bound": 1e-3}
    made, config, arguments = inside(TROLLTrainer, regression_updates=2)
    pulled = column(train(made, config, **arguments, **settings), "trust_region/kl_mean")
    pushed = column(train(TROLLTrainer, TROLLConfig, **settings), "trust_region/kl_mean")
    assert pulled[:3] == pytest.approx(pushed[:3])  # the third still sees what the first two did
    assert pulled[3] < pushed[3]


def test_a_resumed_run_has_the_alpha_it_had(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    made, config, arguments = inside(TROLLTrainer, alpha_tolerance=0.01, kl_stop=0.5)
    settings = {**SETTINGS, "save_strategy": "steps", "save_steps": 4, "output_dir": str(tmp_path / "a")}
    whole = make_trainer(made, config, **arguments, **settings)
    whole.train()
    resumed = make_trainer(made, config, **arguments, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert resumed.args.troll_alpha == whole.args.troll_alpha != 1.0
    assert largest_difference(resumed.model, whole.model) == 0
    assert largest_difference(whole.model, make_tiny_model()) > 1e-3


def test_a_checkpoint_without_an_alpha_is_refused(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    settings = {**SETTINGS, "max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    make_trainer(TROLLTrainer, TROLLConfig, output_dir=str(tmp_path / "a"), **settings).train()
    made, config, arguments = inside(TROLLTrainer, alpha_tolerance=0.01)
    trainer = make_trainer(made, config, **arguments, **SETTINGS)
    with pytest.raises(CheckpointError, match=r"no alpha in inside\.json"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        (OldPolicyTrainer, {"alpha_tolerance": 0.1}, "act on TROLL's regression"),
        (OldPolicyTrainer, {"regression_updates": 1}, "act on TROLL's regression"),
        (TROLLTrainer, {"regression_updates": 4}, "regression_updates=4 leaves none of the 4 updates"),
        (TROLLTrainer, {"kl_stop": 0.0}, "kl_stop must be a positive number, got 0.0"),
        (TROLLTrainer, {"regression_updates": -1}, "must not be negative, got -1"),
    ],
)
def test_what_cannot_work_is_refused(
    make_trainer: Callable[..., Any], base: Any, options: dict[str, Any], message: str
) -> None:
    def make() -> None:
        made, config, arguments = inside(base, **options)
        make_trainer(made, config, **arguments)

    with pytest.raises(ConfigError, match=message):
        make()


def test_updates_that_learn_from_two_batches_are_refused(make_trainer: Callable[..., Any]) -> None:
    made, config, arguments = inside(OldPolicyTrainer, kl_stop=0.1)
    with pytest.raises(ConfigError, match=r"= 3 micro-batches.*gradient_accumulation_steps=2"):
        make_trainer(made, config, **arguments, gradient_accumulation_steps=2, steps_per_generation=3)


def test_a_budget_that_deepspeed_would_not_heed_is_refused(make_trainer: Callable[..., Any]) -> None:
    """Its engine makes the update within the backward pass."""
    made, config, arguments = inside(OldPolicyTrainer, kl_stop=0.1)
    trainer = make_trainer(made, config, **arguments)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ConfigError, match="DeepSpeed has made it by then"):
        trainer._check_inside()
