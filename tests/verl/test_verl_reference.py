"""The engine's loss and gradients against `tether.losses.troll` on dense float64 distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from actor import FLOAT64, VOCABULARY, Rollouts, gradients, make_actor, parameters
from dense import KL_BOUND, Dense

from tether.integrations.verl import TROLLPolicyLossConfig

pytestmark = pytest.mark.usefixtures("float64")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int | None]] = {
    # name: TROLL's settings in verl, verl's actor settings, the same for the reference, top_k of it
    "exact": ({"troll_top_k": 6}, {}, {}, None),
    "no regression": ({"troll_top_k": 6, "troll_alpha": 0.0}, {}, {"alpha": 0.0}, None),
    "through the queue": ({"troll_top_k": 6, "troll_old_store": "queue"}, {}, {}, None),
    "every id": ({"troll_top_k": VOCABULARY, "troll_support": "bucket"}, {}, {}, None),
    "few ids": ({"troll_top_k": 6, "troll_support": "bucket"}, {}, {}, 6),
    "few ids, queue": (
        {"troll_top_k": 6, "troll_support": "bucket", "troll_old_store": "queue"},
        {},
        {},
        6,
    ),
    "the paper's tail": ({"troll_top_k": 6, "troll_support": "paper"}, {}, {"support": "paper"}, 6),
    "a sequence's mean": (
        {"troll_region": "sequence"},
        {"loss_agg_mode": "seq-mean-token-mean"},
        {"region": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
        None,
    ),
    "GSPO's ratio": (
        {"troll_ratio": "sequence"},
        {"loss_agg_mode": "seq-mean-token-mean"},
        {"ratio_level": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
        None,
    ),
    "sums": (
        {},
        {"loss_agg_mode": "seq-mean-token-sum"},
        {"loss_agg_mode": "seq-mean-token-sum"},
        None,
    ),
    "Dr.GRPO's sums": (
        {},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 9},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "max_response_length": 9},
        None,
    ),
}


@pytest.mark.parametrize(
    ("name", "packed"),
    [*((name, True) for name in CASES), ("exact", False), ("few ids", False)],
    ids=lambda value: value if isinstance(value, str) else ("packed" if value else "padded"),
)
def test_loss_and_gradients_are_those_of_the_reference(model: Path, name: str, packed: bool) -> None:
    """At a temperature of its own, two updates away from the old policy."""
    troll_settings, actor_settings, settings, top_k = CASES[name]
    rollouts = Rollouts.scripted()
    rollouts.temperature = 1.4
    actor = make_actor(
        model,
        TROLLPolicyLossConfig(troll_kl_bound=KL_BOUND, **troll_settings),
        packed=packed,
        learning_rate=1e-3,
        engine_settings=FLOAT64,
        **actor_settings,
    )
    old_policy = Dense(model, parameters(actor)).log_probs(rollouts).detach()
    old = rollouts.score(actor)
    for _ in range(2):
        rollouts.update(actor, old)
    reference = Dense(model, parameters(actor))

    metrics = rollouts.update(actor, old)
    expected = reference.loss(rollouts, old_policy, top_k, kl_bound=KL_BOUND, **settings)
    expected.loss.backward()

    assert metrics["loss"] == pytest.approx(expected.loss.item(), abs=1e-6, rel=1e-6)
    found = gradients(actor)
    for key, parameter in reference.model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-5, rtol=1e-5)
    assert expected.metrics["projected"] > 0.2
    names = [
        "kl_mean",
        "kl_max",
        "kl_projected_mean",
        "kl_projected_max",
        "projected",
        "regression",
        "ratio_max",
    ]
    for key in names + (["tail_mass", "certified", "uncertain"] if name == "few ids" else []):
        assert metrics[f"actor/troll/{key}"] == pytest.approx(
            float(expected.metrics[key]), rel=1e-4, abs=1e-6
        )
