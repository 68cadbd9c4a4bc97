"""The decoupled form in TRL: policy gradients weighed by min(pi / sampler, largest)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_language_model import largest_difference
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from tether.errors import ConfigError, InvalidInputError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_losses import PolicyLossTrainer
from tether.llm.config import TrainConfig
from tether.llm.methods import TROLL, Clip
from tether.llm.rollouts import vllm_settings

LAG = 4


def trainer_of(kind: str, weight: float | None, **arguments: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Class, class of settings, and what they take, sampling from weights that are `LAG` updates old."""
    if kind == "troll":
        extra = {"trainer_arguments": {"lag": LAG, **arguments}}
        return TROLLTrainer, TROLLConfig, {"troll_sampler_weight": weight, **extra}
    own = {"policy_loss": kind} if kind != "clip" else {}
    made = {"lag": LAG, "sampler_weight": weight, **own, **arguments}
    return OldPolicyTrainer if kind == "clip" else PolicyLossTrainer, GRPOConfig, {"trainer_arguments": made}


@contextlib.contextmanager
def noted(monkeypatch: pytest.MonkeyPatch, trainer_class: Any) -> Any:
    """What each loss was given."""
    seen: list[dict[str, Tensor]] = []
    name = "_objective" if trainer_class is not OldPolicyTrainer else "_project"
    real = getattr(trainer_class, name)

    def note(self: Any, tokens: Any, *rest: Any) -> Any:
        seen.append(rest[-1])
        return real(self, tokens, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_class, name, note)
        yield seen


@pytest.mark.filterwarnings("ignore:Every batch of rollouts serves a single update")
@pytest.mark.filterwarnings("ignore:Completions are sampled 4 updates ago")
@pytest.mark.parametrize(
    ("kind", "updates"),
    [("troll", 2), ("ppo_clip", 1), ("ppo_clip", 2), ("unclipped", 1), ("clip", 2)],
)
def test_stale_tokens_are_weighed_by_the_policy_of_now(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str, updates: int
) -> None:
    """With one update a batch, too, where TRL scores nothing: the policy is then the network itself."""
    trainers = []
    for weight in (1.5, None):
        trainer_class, config_class, given = trainer_of(kind, weight)
        with noted(monkeypatch, trainer_class) as seen:
            trainers.append(
                train(trainer_class, config_class, steps_per_generation=updates, max_steps=6, **given)
            )
        if weight is None:
            continue
        stale = 0
        for inputs in seen:
            mask = inputs["completion_mask"] > 0
            sampled = inputs["sampling_per_token_logps"]
            expected = (inputs["old_per_token_logps"] - sampled).double().exp().clamp_max(weight)
            rounding = 32 * torch.finfo(torch.float32).eps  # of exponents up to some tens
            torch.testing.assert_close(
                inputs["importance_sampling_ratio"][mask].double(), expected[mask], rtol=rounding, atol=0
            )
            stale += int((expected[mask] - 1).abs().max() > 0.1)
        assert stale >= 2
    assert largest_difference(trainers[0].model, trainers[1].model) > 1e-3


class _BesideTRL(OldPolicyTrainer):
    """Notes its loss, TRL's of the same batch, network and weights, and how far these are from one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[tuple[float, float, float]] = []
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        with torch.no_grad():
            theirs = GRPOTrainer._compute_loss(self, model, inputs)
        apart = (inputs["importance_sampling_ratio"] - 1).abs().max()
        self.losses.append((loss.item(), theirs.item(), apart.item()))
        return loss


@pytest.mark.filterwarnings("ignore:Completions are sampled 4 updates ago")
def test_vespo_weighs_each_token_once(train: Callable[..., Any]) -> None:
    """Which reads the weights into its weight of a sequence by itself."""
    trainer = train(
        _BesideTRL, GRPOConfig, loss_type="vespo", max_steps=6, steps_per_generation=2, learning_rate=1e-3,
        trainer_arguments={"lag": LAG, "sampler_weight": 1.5},
    )  # fmt: skip
    for ours, theirs, _ in trainer.losses:
        assert ours == pytest.approx(theirs, rel=1e-4, abs=0)  # logits summed in another order
    assert trainer.losses[-1][2] > 0.1


@pytest.mark.parametrize("kind", ["clip", "troll"])
def test_where_trl_computes_the_loss_and_scores_nothing_it_is_refused(
    make_trainer: Callable[..., Any], kind: str
) -> None:
    trainer_class, config_class, given = trainer_of(kind, 2.0)
    with pytest.raises(ConfigError, match="Raise steps_per_generation"):
        make_trainer(trainer_class, config_class, steps_per_generation=1, **given)


@pytest.mark.parametrize("weight", [-1.0, 0.0, "2", True, float("nan")])
@pytest.mark.parametrize("kind", ["troll", "ppo_clip", "clip"])
def test_what_is_no_largest_weight_is_refused(
    make_trainer: Callable[..., Any], kind: str, weight: Any
) -> None:
    trainer_class, config_class, given = trainer_of(kind, weight)
    with pytest.raises(ConfigError, match=f"sampler_weight={weight!r} corrects .*positive largest weight"):
        make_trainer(trainer_class, config_class, **given)


def test_with_the_sampler_as_the_anchor_there_is_nothing_to_weigh(make_trainer: Callable[..., Any]) -> None:
    trainer_class, config_class, given = trainer_of("ppo_clip", 2.0, anchor="sampler")
    with pytest.raises(ConfigError, match="nothing to correct"):
        make_trainer(trainer_class, config_class, **given)


def _plain(log_prob: float | None) -> Callable[..., dict[str, Any]]:
    """A rollout function of an engine that reports the drawn tokens' log-probabilities alone, or nothing."""

    def rollouts(prompts: list[Any], *_: Any) -> dict[str, Any]:
        said = None if log_prob is None else [[log_prob] * 3 for _ in prompts]
        return {"prompt_ids": [[5, 6] for _ in prompts], "completion_ids": [[1, 2, 3] for _ in prompts],
                "logprobs": said}  # fmt: skip

    return rollouts


def test_an_engine_that_reports_the_drawn_tokens_alone_will_do(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As how_to_choose.md says; a region around it needs more, and says so."""
    with noted(monkeypatch, TROLLTrainer) as seen:
        train(TROLLTrainer, TROLLConfig, max_steps=2, troll_sampler_weight=2.0,
              trainer_arguments={"rollout_func": _plain(-1.25)})  # fmt: skip
    expected = (seen[0]["old_per_token_logps"] + 1.25).exp().clamp_max(2.0)
    torch.testing.assert_close(seen[0]["importance_sampling_ratio"], expected)
    with pytest.raises(InvalidInputError, match="sequence 0, position 0: the sampler left no record"):
        train(TROLLTrainer, TROLLConfig, max_steps=2, troll_anchor="sampler",
              trainer_arguments={"rollout_func": _plain(-1.25)})  # fmt: skip


def test_an_engine_that_reports_nothing_is_named(train: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="rollout_func returned none"):
        train(TROLLTrainer, TROLLConfig, max_steps=2, troll_sampler_weight=2.0,
              trainer_arguments={"rollout_func": _plain(None)})  # fmt: skip


@pytest.mark.filterwarnings("ignore:Completions are sampled 4 updates ago")
def test_a_clip_decoupled_from_the_sampler_is_told_its_own_age(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old policy is the trainer's, 0 to 3 updates ago, however old the sampler is."""
    asked = []
    real = PolicyLossTrainer._updates_since_scoring
    monkeypatch.setattr(
        PolicyLossTrainer, "_updates_since_scoring", lambda self: asked.append(real(self)) or asked[-1]
    )
    trainer_class, config_class, given = trainer_of("decoupled_clip", 2.0)
    train(trainer_class, config_class, steps_per_generation=4, max_steps=8, **given)
    assert set(asked) == {0, 1, 2, 3}


@pytest.mark.parametrize("method", [TROLL(), Clip()])
def test_the_command_leaves_the_weights_to_one_of_both(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    """TRL's correction of what vLLM reports is on by default."""
    monkeypatch.setattr("tether.llm.rollouts.check_vllm", lambda *_, **__: None)
    config = TrainConfig(method=method, rollouts="vllm", sampler_weight=2.0)
    assert vllm_settings(config, on_cpu=False)["vllm_importance_sampling_correction"] is False
    plain = TrainConfig(method=method, rollouts="vllm")
    assert "vllm_importance_sampling_correction" not in vllm_settings(plain, on_cpu=False)
