"""What verl adds to a policy loss arrives as it does with verl's own."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from actor import (
    FLOAT64,
    NO_CLIP,
    Rollouts,
    acting,
    gradients,
    jagged,
    largest_difference,
    make_actor,
    parameters,
    unclipped,
)
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from tether.integrations.verl import TROLLPolicyLossConfig


def _extra(rollouts: Rollouts, low: float, high: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(len(r), generator=generator) * (high - low) + low for r in rollouts.responses]


@pytest.mark.parametrize(
    ("actor_settings", "extra", "update"),
    [
        ({"loss_agg_mode": "token-sum"}, None, {}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.3}, ("ref_log_prob", -4.0, -0.1), {}),
        ({}, ("rollout_is_weights", 0.2, 2.0), {}),
        ({"entropy_coeff": 0.2}, None, {"calculate_entropy": True}),
    ],
    ids=["token sums", "reference penalty", "rollout weights", "entropy bonus"],
)
def test_everything_around_the_policy_loss_is_verls(
    model: Path,
    actor_settings: dict[str, Any],
    extra: tuple[str, float, float] | None,
    update: dict[str, Any],
) -> None:
    """Without bound and regression, loss and gradients are those of verl's unclipped loss."""
    rollouts = Rollouts.scripted()
    if extra is not None:
        rollouts.extra[extra[0]] = _extra(rollouts, *extra[1:])
    settings = TROLLPolicyLossConfig(troll_kl_bound=math.inf, troll_alpha=0.0)
    ours = make_actor(model, settings, **actor_settings)
    theirs = make_actor(model, unclipped(), **{**NO_CLIP, **actor_settings})
    old, their_old = rollouts.score(ours), rollouts.score(theirs)
    for _ in range(2):
        mine, other = rollouts.update(ours, old, **update), rollouts.update(theirs, their_old, **update)
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert largest_difference(gradients(ours), gradients(theirs)) < 1e-5
        for key in ("actor/ppo_kl", "actor/pg_loss"):
            assert mine[key] == pytest.approx(other[key], abs=1e-5)
    plain = make_actor(model, unclipped(), **NO_CLIP)
    rollouts.extra.clear()
    rollouts.update(plain, rollouts.score(plain))
    assert largest_difference(parameters(plain), parameters(ours)) > 1e-4  # it was not ignored


@pytest.mark.parametrize("support", ["exact", "bucket", "paper"])
def test_micro_batches_change_nothing(model: Path, float64: None, support: str) -> None:
    """Loss, gradients and metrics of a mini-batch are the same however it is cut."""
    rollouts, results = Rollouts.scripted(), []
    for mask in rollouts.masks:
        mask[1:3] = 0  # the widest support of few tokens is not that of all
    for micro_batch in (1, 4):
        settings = acting(troll_top_k=40, troll_support=support, troll_mass=0.7)
        actor = make_actor(model, settings, micro_batch=micro_batch, engine_settings=FLOAT64)
        old = rollouts.score(actor)
        rollouts.update(actor, old)
        results.append((rollouts.update(actor, old), gradients(actor)))
    (first, first_gradients), (second, second_gradients) = results
    for name in first:
        if (name.startswith("actor/troll/") and not name.endswith("_seconds")) or name == "loss":
            assert first[name] == pytest.approx(second[name], rel=1e-6, abs=1e-6), name
    assert largest_difference(first_gradients, second_gradients) < 1e-6
    assert first["actor/troll/projected"] > 0.2


def test_the_papers_support_leaves_the_reference_penalty_alone(model: Path) -> None:
    """It is of the network itself, not of the network renormalised on the ids kept."""
    rollouts, penalties = Rollouts.scripted(), []
    rollouts.extra["ref_log_prob"] = [torch.full((len(r),), -3.0) for r in rollouts.responses]
    for support in ("bucket", "paper"):
        settings = acting(troll_support=support, troll_mass=0.7)
        actor = make_actor(model, settings, use_kl_loss=True, kl_loss_type="k2")
        metrics = rollouts.update(actor, rollouts.score(actor))
        penalties.append((metrics["kl_loss"], metrics["actor/ppo_kl"]))
    assert penalties[1] == pytest.approx(penalties[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("support", ["exact", "bucket"])
def test_dynamic_batches_keep_each_token_with_its_distribution(
    model: Path, float64: None, support: str
) -> None:
    """verl sorts sequences by length into micro-batches and restores their order afterwards."""
    rollouts, results = Rollouts.scripted(8), []
    for dynamic in (False, True):
        engine = {
            **FLOAT64,
            "use_dynamic_bsz": dynamic,
            "max_token_len_per_gpu": 24,
            "infer_max_token_len_per_gpu": 32,
        }
        settings = acting(troll_top_k=8, troll_support=support)
        actor = make_actor(model, settings, engine_settings=engine)
        old = rollouts.score(actor)
        rollouts.update(actor, old)
        results.append((rollouts.update(actor, old)["loss"], gradients(actor)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert largest_difference(results[0][1], results[1][1]) < 1e-6


def test_a_batch_of_which_nothing_counts_moves_nothing(model: Path) -> None:
    """verl fills batches up with sequences whose mask is zero."""
    rollouts = Rollouts.scripted()
    rollouts.masks = [torch.zeros_like(mask) for mask in rollouts.masks]
    rollouts.masks[0][0] = 1  # verl divides by the count of the whole batch
    actor = make_actor(model, acting(), micro_batch=1, learning_rate=1e-2)
    old = rollouts.score(actor)
    for _ in range(2):
        metrics = rollouts.update(actor, old)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/troll/projected"] in (0.0, 1.0)


def test_tokens_rejected_after_scoring_are_left_out(model: Path) -> None:
    """Rejection sampling masks tokens between the old pass and the update."""
    rollouts = Rollouts.scripted()
    actor = make_actor(model, acting())
    old = rollouts.score(actor)
    rollouts.masks[2][:] = 0
    kept = rollouts.update(actor, old)["loss"]
    fresh = make_actor(model, acting())
    assert kept == pytest.approx(rollouts.update(fresh, rollouts.score(fresh))["loss"], abs=1e-6)


def test_means_are_of_the_tokens_that_were_not_rejected(model: Path) -> None:
    """verl's trainer writes rejections into response_mask; loss_mask, which verl counts, stays as it was."""
    rollouts = Rollouts.scripted()
    actor, other = make_actor(model, acting()), make_actor(model, acting())
    old = rollouts.score(actor)
    masks = [mask.clone() for mask in rollouts.masks]
    for rejected in (masks[0], masks[2][1:]):
        rejected[:] = 0
    rejecting = rollouts.update(actor, {**old, "response_mask": jagged(masks)})
    rollouts.masks = masks
    without = rollouts.update(other, rollouts.score(other))
    assert rejecting["actor/troll/ratio_mean"] == pytest.approx(1.0)
    assert rejecting["actor/troll/certified"] == pytest.approx(1.0)
    assert rejecting["actor/troll/tail_mass"] == pytest.approx(without["actor/troll/tail_mass"])


def test_half_precision_logits_give_float32_results(model: Path) -> None:
    """Old and new log-probabilities of the same weights agree to float32, not to bfloat16's steps."""
    rollouts = Rollouts.scripted()
    half = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
    actor = make_actor(model, acting(), engine_settings=half)
    metrics = rollouts.update(actor, rollouts.score(actor))
    assert metrics["actor/troll/ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["actor/troll/kl_max"] < 1e-6


def test_other_losses_run_untouched(model: Path) -> None:
    """One launch script serves TROLL and what it is compared with."""
    rollouts, losses = Rollouts.scripted(), []
    for policy_loss in (TROLLPolicyLossConfig(loss_mode="vanilla"), unclipped()):
        actor = make_actor(model, policy_loss)
        old = rollouts.score(actor)
        assert "troll_old_ids" not in old
        for _ in range(2):
            losses.append(rollouts.update(actor, old)["loss"])
    assert losses[:2] == pytest.approx(losses[2:], abs=0)


def test_what_was_recorded_is_the_old_policys(model: Path) -> None:
    """The sampled tokens' old log-probabilities are those verl keeps, and the kept ids the most likely."""
    rollouts = Rollouts.scripted()
    settings = TROLLPolicyLossConfig(troll_top_k=5, troll_mass=1.0, troll_old_store="queue")
    actor = make_actor(model, settings)
    theirs = make_actor(model, unclipped())
    old, their_old = rollouts.score(actor), rollouts.score(theirs)
    mask = jagged(rollouts.masks).values() > 0
    torch.testing.assert_close(
        old["old_log_probs"].values()[mask], their_old["old_log_probs"].values()[mask], atol=1e-6, rtol=0
    )
    assert old["troll_old_count"].values().tolist().count(0) == int((~mask).sum())
    assert set(old["troll_old_count"].values()[mask].tolist()) <= {5, 6}


def _estimate(name: str, rollouts: Rollouts) -> list[torch.Tensor]:
    """Advantages of scripted rewards by verl's own estimator."""
    mask = jagged(rollouts.masks).to_padded_tensor(0)
    scores = torch.zeros(mask.shape)
    scores[torch.arange(4), mask.sum(-1) - 1] = torch.tensor([1.0, 0.0, 0.5, 1.0])
    groups = np.array([0, 0, 1, 1], dtype=object)
    settings: dict[str, Any] = {"token_level_rewards": scores, "response_mask": mask}
    if name == "gae":
        settings |= {"values": 0.1 * torch.ones(mask.shape), "gamma": 1.0, "lam": 0.95}
    elif name == "reinforce_plus_plus":
        settings["config"] = SimpleNamespace(gamma=1.0)
    else:
        settings["index"] = groups
    if name == "dr_grpo":
        settings["norm_adv_by_std_in_grpo"] = False
    advantages, _ = get_adv_estimator_fn("grpo" if name == "dr_grpo" else name)(**settings)
    return [row[: len(response)] for row, response in zip(advantages, rollouts.responses, strict=True)]


@pytest.mark.parametrize("name", ["gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_advantages_of_every_estimator_arrive_as_verls_do(model: Path, name: str) -> None:
    """Without bound and regression loss and gradients are verl's; with them the projection acts."""
    rollouts = Rollouts.scripted()
    rollouts.advantages = _estimate(name, rollouts)
    settings = TROLLPolicyLossConfig(troll_kl_bound=math.inf, troll_alpha=0.0)
    actors = [make_actor(model, settings), make_actor(model, unclipped(), **NO_CLIP)]
    losses = []
    for actor in actors:
        old = rollouts.score(actor)
        losses.append([rollouts.update(actor, old)["loss"] for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert largest_difference(gradients(actors[0]), gradients(actors[1])) < 1e-5
    bounded = make_actor(model, acting())
    old = rollouts.score(bounded)
    rollouts.update(bounded, old)
    assert rollouts.update(bounded, old)["actor/troll/projected"] > 0
