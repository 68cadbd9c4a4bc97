"""LoRA, gradient checkpointing, mini-batches and checkpoints: what verl's engine does around the loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from actor import (
    LORA,
    NO_CLIP,
    Rollouts,
    acting,
    gradients,
    jagged,
    largest_difference,
    make_actor,
    parameters,
    save_tiny_model,
    unclipped,
)
from largest_tensor import largest_tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from tether.errors import TetherWarning
from tether.integrations.verl import TROLLPolicyLossConfig
from tether.integrations.verl.store import HANDLE
from tether.ops import memory


def test_lora_follows_verls_unclipped_loss(model: Path) -> None:
    rollouts = Rollouts.scripted()
    boundless = TROLLPolicyLossConfig(troll_kl_bound=math.inf, troll_alpha=0.0)
    torch.manual_seed(3)  # adapters start at random
    ours = make_actor(model, boundless, model_settings=LORA)
    torch.manual_seed(3)
    theirs = make_actor(model, unclipped(), model_settings=LORA, **NO_CLIP)
    start = parameters(ours)
    old, their_old = rollouts.score(ours), rollouts.score(theirs)
    for _ in range(3):
        assert rollouts.update(ours, old)["loss"] == pytest.approx(
            rollouts.update(theirs, their_old)["loss"], abs=1e-5
        )
    assert largest_difference(parameters(ours), parameters(theirs)) < 1e-5
    moved = {
        name for name, value in parameters(ours).items() if (value - start[name]).abs().max().item() > 1e-4
    }
    assert moved
    assert all("lora_" in name for name in moved)


def test_the_reference_pass_of_a_lora_actor_records_nothing(model: Path) -> None:
    """The actor without its adapter is the reference policy, whose distributions are not the old ones."""
    rollouts = Rollouts.scripted()
    actor = make_actor(model, acting(), model_settings=LORA)
    scored = actor.infer_batch(
        rollouts.batch(calculate_entropy=False, compute_loss=False, no_lora_adapter=True)
    )
    assert not [name for name in scored.keys() if name.startswith("troll")]  # noqa: SIM118
    assert HANDLE in rollouts.score(actor)


def test_the_reference_pass_of_a_lora_actor_forms_no_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's, which does, shows that they would be seen; both say the same of the tokens that count."""
    vocabulary, rollouts = 2**13, Rollouts.long(16, prompt=8, response=24)
    rollouts.masks[1][3] = 0
    rollouts.temperature = 1.4
    folder = save_tiny_model(tmp_path, vocabulary=vocabulary)
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", vocabulary * 16)
    asked = {"calculate_entropy": True, "compute_loss": False, "no_lora_adapter": True}
    shares, found = [], []
    for policy_loss in (acting(), unclipped()):
        actor = make_actor(folder, policy_loss, model_settings=LORA, micro_batch=16)
        with largest_tensor() as largest:
            scored = actor.infer_batch(rollouts.batch(**asked))
        shares.append(largest.elements / (16 * 32 * vocabulary))
        mask = jagged(rollouts.masks)
        of_tokens = [response_from_nested(scored[name], mask).values() for name in ("log_probs", "entropy")]
        found.append(torch.stack(of_tokens)[:, mask.values() > 0])
    assert shares[0] < 1 / 8 < 1 <= shares[1]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_dropout_is_warned_of_with_the_setting_that_has_it(model: Path) -> None:
    """verl scores the old policy without dropout and trains with it."""
    dropping = {"override_config": {"attn_implementation": "sdpa", "attention_dropout": 0.2}}
    setting = r"\+actor_rollout_ref\.model\.override_config\.attention_dropout="
    with pytest.warns(TetherWarning, match=rf"self_attn\.attention_dropout=0\.2.* {setting}"):
        make_actor(model, model_settings=dropping)


def test_a_second_scoring_of_the_same_batch_leaves_the_old_policy_alone(model: Path) -> None:
    rollouts = Rollouts.scripted()
    actor = make_actor(model, acting())
    batch = rollouts.batch(rollouts.score(actor), calculate_entropy=False, compute_loss=False)
    scored = actor.infer_batch(batch)
    assert not [name for name in scored.keys() if name.startswith("troll")]  # noqa: SIM118


def test_gradient_checkpointing_changes_nothing(model: Path) -> None:
    rollouts, results = Rollouts.scripted(), []
    for checkpointing in (False, True):
        actor = make_actor(model, acting(), model_settings={"enable_gradient_checkpointing": checkpointing})
        old = rollouts.score(actor)
        rollouts.update(actor, old)
        results.append((rollouts.update(actor, old)["loss"], gradients(actor)))
    (first, first_gradients), (second, second_gradients) = results
    assert first == pytest.approx(second, abs=1e-6)
    assert largest_difference(first_gradients, second_gradients) < 1e-5


@pytest.mark.parametrize("support", ["exact", "bucket"])
def test_mini_batches_and_epochs_carry_their_distributions_along(model: Path, support: str) -> None:
    """verl's own loop over shuffled mini-batches, against the same updates one by one."""
    rollouts = Rollouts.scripted(8)
    rollouts.temperature = 1.4
    settings = {"troll_top_k": 8, "troll_support": support}
    loop = make_actor(model, acting(**settings))
    output = loop.train_mini_batch(
        rollouts.batch(
            rollouts.score(loop),
            calculate_entropy=False,
            global_batch_size=4,
            mini_batch_size=4,
            epochs=2,
            seed=42,
            dataloader_kwargs={"shuffle": False},
        )
    )
    metrics = tu.get(output, "metrics")
    assert len(metrics["actor/troll/kl_mean"]) == 4

    single = make_actor(model, acting(**settings))
    old = rollouts.score(single)
    halves = [slice(0, 4), slice(4, 8)]
    expected = [
        rollouts.part(half).update(single, {name: jagged(old[name].unbind()[half]) for name in old})
        for _ in range(2)
        for half in halves
    ]
    kl = [part["actor/troll/kl_mean"] for part in expected]
    assert [float(value) for value in metrics["actor/troll/kl_mean"]] == pytest.approx(kl, abs=1e-5)
    assert largest_difference(parameters(loop), parameters(single)) < 1e-5
    assert kl[0] < 1e-6 < kl[-1]


def test_a_resumed_actor_takes_the_same_steps(model: Path, tmp_path: Path) -> None:
    """verl's checkpoint of weights, optimiser and schedule; TROLL itself keeps no state between batches."""
    rollouts, later = Rollouts.scripted(), Rollouts.scripted(seed=2)
    straight = make_actor(model, acting())
    old = rollouts.score(straight)
    for _ in range(2):
        rollouts.update(straight, old)
    straight.save_checkpoint(str(tmp_path / "checkpoint"), global_step=2)

    resumed = make_actor(model, acting())
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    for actor in (straight, resumed):
        scored = later.score(actor)
        for _ in range(2):
            later.update(actor, scored)
    assert largest_difference(parameters(straight), parameters(resumed)) == 0
