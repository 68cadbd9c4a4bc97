"""The trust region around the policy that sampled, in TRL with Transformers' generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.rounding import SUMMED_ANOTHER_WAY, unit_of
from tiny_language_model import largest_difference, make_tiny_model
from trl import GRPOConfig

from tether.errors import ConfigError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_losses import PolicyLossTrainer


class _Watched(TROLLTrainer):
    """Notes what each loss is given, and counts scoring passes of the policy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self.passes = 0
        super().__init__(*args, **kwargs)
        count = self.model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.passes += not torch.is_grad_enabled() and "labels" in kwargs
            return count(*args, **kwargs)

        self.model.forward = counted

    def _loss_in_forward(self, inputs: dict[str, Any]) -> None:
        return None  # projected afterwards, where it can be watched

    def _project(self, evaluation: Any, inputs: dict[str, Any]) -> Any:
        tokens = super()._project(evaluation, inputs)
        self.seen.append({**inputs, "tokens": tokens})
        return tokens


def test_the_sampler_is_the_policy_trl_would_have_scored(
    train: Callable[..., Any], course_rounding: Any
) -> None:
    """Same weights, same arithmetic: training around either is the same, and one takes no scoring pass."""
    common = {"troll_support": "bucket", "troll_mass": 1.0, "troll_kl_bound": 0.01}
    scored = train(_Watched, TROLLConfig, **common)
    sampled = train(_Watched, TROLLConfig, troll_anchor="sampler", **common)
    assert scored.passes == 2 * 4  # two batches of rollouts, in its chunks of a micro-batch
    assert sampled.passes == 0
    assert any(seen["tokens"].projected.any() for seen in sampled.seen)
    for one, other in zip(scored.seen[:1], sampled.seen[:1], strict=True):
        assert torch.equal(one["completion_ids"], other["completion_ids"])
        mask = one["completion_mask"] > 0
        exact = one["old_per_token_logps"].double()
        near = SUMMED_ANOTHER_WAY * unit_of(15 * torch.ones(()), terms=32)  # logits of a sharpened head
        assert (other["old_per_token_logps"] - exact)[mask].abs().max() <= near
    rounding = course_rounding(scored)
    assert largest_difference(scored.model, sampled.model) <= rounding.weights


def test_compact_rollouts_report_what_they_sample_from(train: Callable[..., Any]) -> None:
    """Each token's record is of its own place, also when other responses have ended before it."""
    trainer = train(_Watched, TROLLConfig, troll_anchor="sampler", troll_mass=1.0, max_steps=4,
                    trainer_arguments={"compact_rollouts": True})  # fmt: skip
    assert trainer.passes == 0
    first = trainer.seen[0]
    mask = first["completion_mask"] > 0
    assert len(set(mask.sum(-1).tolist())) > 2
    near = SUMMED_ANOTHER_WAY * unit_of(15 * torch.ones(()), terms=32)
    assert (first["tokens"].new_log_probs - first["tokens"].old_log_probs)[mask].abs().max() <= near
    assert first["tokens"].kl[mask].max() <= near  # on all reported ids, not the drawn one alone
    assert max(seen["tokens"].kl.max() for seen in trainer.seen) > 1e-4


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_truncated_sampling_is_compared_on_the_set_it_keeps(train: Callable[..., Any], top_p: float) -> None:
    trainer = train(_Watched, TROLLConfig, troll_anchor="sampler", troll_kl_bound=0.02, top_k=4, top_p=top_p,
                    max_steps=4)  # fmt: skip
    for seen in trainer.seen:
        mask = seen["completion_mask"] > 0
        kept = (seen["old_support_ids"] >= 0).sum(-1)[mask]
        assert (kept <= 4).all()
        assert (kept >= 1).all()
        assert torch.isneginf(seen["old_support_log_tail"][mask]).all()
        mass = seen["old_support_log_probs"].exp().sum(-1)[mask]
        assert (mass - 1).abs().max() <= unit_of(mass, terms=4)
        tokens = seen["tokens"]
        assert tokens.projected_kl[mask].max() <= 0.02 * (1 + 1e-3)
        # Renormalised on the set, an outcome whose only id was drawn is certain under both policies.
        assert (tokens.new_log_probs[mask & ((seen["old_support_ids"] >= 0).sum(-1) == 1)] == 0).all()
    first = trainer.seen[0]
    mask = first["completion_mask"] > 0
    near = SUMMED_ANOTHER_WAY * unit_of(15 * torch.ones(()), terms=32)
    assert (first["tokens"].new_log_probs - first["tokens"].old_log_probs)[mask].abs().max() <= near


def test_a_batch_for_one_update_has_a_region_too(train: Callable[..., Any]) -> None:
    trainer = train(_Watched, TROLLConfig, troll_anchor="sampler", steps_per_generation=1, max_steps=2)
    assert len(trainer.seen) == 2
    assert trainer.passes == 0


def test_bounds_grow_with_the_updates_since_the_sampler(train: Callable[..., Any]) -> None:
    growth = {"troll_kl_bound": 0.002, "troll_lag_growth": "linear", "troll_lag_rate": 1.0}
    trainer = train(_Watched, TROLLConfig, troll_anchor="sampler", max_steps=4, **growth)
    for lag, seen in enumerate(trainer.seen):
        tokens, mask = seen["tokens"], seen["completion_mask"] > 0
        acted = mask & tokens.projected
        assert bool(acted.any()) == (lag > 0)
        expected = torch.full_like(tokens.projected_kl[acted], 0.002 * (1 + lag))
        assert torch.allclose(tokens.projected_kl[acted], expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "options"), [("dppo", {"divergence": "top-k-kl"}), ("trm", {}), ("ppo_clip", {})]
)
def test_rivals_get_the_same_records(train: Callable[..., Any], name: str, options: dict[str, Any]) -> None:
    seen = []

    class Watched(PolicyLossTrainer):
        def _objective(self, tokens: Any, evaluation: Any, inputs: dict[str, Any]) -> Any:
            seen.append((inputs, evaluation))
            return super()._objective(tokens, evaluation, inputs)

    chosen = {"policy_loss": name, "loss_options": options, "anchor": "sampler"}
    trainer = train(Watched, GRPOConfig, max_steps=2, top_k=5, trainer_arguments=chosen)
    assert trainer.state.global_step == 2
    inputs, evaluation = seen[0]
    assert torch.isneginf(inputs["old_support_log_tail"][inputs["completion_mask"] > 0]).all()
    assert torch.equal(evaluation.support.ids, inputs["old_support_ids"].long())


def test_the_clip_baseline_takes_its_ratio_to_the_sampler(train: Callable[..., Any]) -> None:
    trainer = train(OldPolicyTrainer, GRPOConfig, max_steps=2, trainer_arguments={"anchor": "sampler"})
    assert [log["clip_ratio/region_mean"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"troll_anchor": "nobody"}, "troll_anchor must be one of trainer, sampler"),
        ({"troll_anchor": "sampler", "troll_support": "paper"}, "invents probabilities"),
        ({"troll_anchor": "sampler", "generation_kwargs": {"temperature": 0.5}}, "temperature 0.5"),
        ({"troll_anchor": "sampler", "troll_sampler_weight": 2.0}, "nothing to correct"),
        ({"troll_sampler_weight": 0.0}, "positive largest weight"),
        ({"troll_lag_growth": "linear", "troll_lag_rate": 0.5}, 'troll_anchor="sampler"'),
        ({"troll_anchor": "sampler", "troll_lag_growth": "cubic"}, "troll_lag_growth must be one of"),
        ({"troll_anchor": "sampler", "troll_lag_rate": -1.0}, "troll_lag_rate must be"),
        ({"troll_anchor": "sampler", "troll_lag_rate": "0.25"}, "troll_lag_rate must be a number"),
        ({"troll_kl_bound_largest": "0.2"}, "troll_kl_bound_largest must be a number"),
        ({"troll_kl_bound_largest": 0.2}, "troll_kl_bound_largest is of a bound that grows"),
        ({"troll_sampler_weight": "2"}, "positive largest weight"),
        ({"troll_sampler_tolerance": "0.1"}, "tolerance is a positive difference"),
        ({"troll_sampler_tolerance": math.nan}, "tolerance is a positive difference"),
    ],
)
def test_what_cannot_go_together_is_refused(settings: Any, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TROLLConfig(**settings, **setting)


def test_a_reference_penalty_of_truncated_sampling_is_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"beta=0.1 compares whole distributions"):
        make_trainer(TROLLTrainer, TROLLConfig, troll_anchor="sampler", top_k=4, beta=0.1,
                     trainer_arguments={"peft_config": _adapters()})  # fmt: skip


def _adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", target_modules="all-linear")


def test_adapters_and_a_reference_penalty(make_trainer: Callable[..., Any]) -> None:
    """The reference goes through the same model: its pass must not be answered by the sampler's records."""
    for steps in (4, 1):  # where TRL scores an old policy, and where it does not
        trainer = make_trainer(
            _Watched, TROLLConfig, troll_anchor="sampler", beta=0.1, steps_per_generation=steps, max_steps=1,
            model=make_tiny_model(), trainer_arguments={"peft_config": _adapters()},
        )  # fmt: skip
        trainer.train()
        mask = trainer.seen[0]["completion_mask"] > 0
        reference = trainer.seen[0]["ref_per_token_logps"][mask]
        old = trainer.seen[0]["old_per_token_logps"][mask]
        # Adapters begin as nothing: the reference is the sampler, found by another route.
        assert not torch.equal(reference, old)
        assert (reference - old).abs().max() <= SUMMED_ANOTHER_WAY * unit_of(15 * torch.ones(()), terms=32)


def test_a_set_larger_than_a_report_is_kept_whole(train: Callable[..., Any]) -> None:
    """How many ids a nucleus holds, nobody knows beforehand."""
    trainer = train(_Watched, TROLLConfig, troll_anchor="sampler", troll_top_k=2, top_p=0.9, max_steps=2)
    seen = trainer.seen[0]
    mask = seen["completion_mask"] > 0
    kept = (seen["old_support_ids"] >= 0).sum(-1)[mask]
    assert kept.max() > 2
    assert kept.min() < kept.max()
    mass = seen["old_support_log_probs"].exp().sum(-1)[mask]
    assert (mass - 1).abs().max() <= unit_of(mass, terms=int(kept.max()))
    assert torch.isneginf(seen["old_support_log_tail"][mask]).all()
    near = SUMMED_ANOTHER_WAY * unit_of(15 * torch.ones(()), terms=32)
    assert (seen["tokens"].new_log_probs - seen["tokens"].old_log_probs)[mask].abs().max() <= near
