"""Without a trust region the engine does what verl's own does, step for step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from actor import (
    NO_CLIP,
    Rollouts,
    largest_difference,
    make_actor,
    parameters,
    unclipped,
)

from tether.integrations.verl import TROLLPolicyLossConfig


def _boundless() -> TROLLPolicyLossConfig:
    return TROLLPolicyLossConfig(troll_kl_bound=math.inf, troll_alpha=0.0, troll_top_k=8)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_without_bound_the_course_is_that_of_verls_unclipped_loss(model: Path, packed: bool) -> None:
    rollouts = Rollouts.scripted()
    ours = make_actor(model, _boundless(), packed=packed)
    theirs = make_actor(model, unclipped(), packed=packed, **NO_CLIP)
    start = parameters(ours)
    old, their_old = rollouts.score(ours), rollouts.score(theirs)
    for _ in range(4):
        metrics = rollouts.update(ours, old)
        loss = metrics["loss"]
        assert "actor/troll/kl_projected_max" not in metrics
        assert loss == pytest.approx(rollouts.update(theirs, their_old)["loss"], abs=1e-5)
        assert largest_difference(parameters(ours), parameters(theirs)) < 1e-5
    assert largest_difference(parameters(ours), start) > 1e-3
