"""Exact support in one pass over the LM head: the numbers of the path that computes the loss after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from actor import (
    FLOAT64,
    LORA,
    VOCABULARY,
    Moved,
    Rollouts,
    acting,
    largest_difference,
    loss_afterwards,
    make_actor,
)  # fmt: skip
from dense import KL_BOUND, worst_gradient
from torch import Tensor
from verl.workers.utils import losses

from tether.errors import InvalidInputError
from tether.integrations.verl import engines, one_pass
from tether.ops import head, memory

# Tokens that count in `Rollouts.scripted`.
TOKENS = 21


@pytest.fixture(autouse=True)
def _blocks_of_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven or fewer, so that the longest response fits, and a micro-batch of two does not."""
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", VOCABULARY * 7)


def _extra(rollouts: Rollouts, low: float, high: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(len(r), generator=generator) * (high - low) + low for r in rollouts.responses]


EVERYTHING: dict[str, Any] = {
    "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3+", "entropy_coeff": 0.2,
}  # fmt: skip
LENGTHS = ("max_token_len_per_gpu", "infer_max_token_len_per_gpu")
BY_SEQUENCE = {"troll_ratio": "sequence"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token-mean": ({}, {}),
    "token-sum, checkpointed, dynamic micro-batches": (
        {
            "engine": {"use_dynamic_bsz": True, **dict.fromkeys(LENGTHS, 24)},
            "model_settings": {"enable_gradient_checkpointing": True},
            "actor": {"loss_agg_mode": "token-sum"},
        },
        {"troll_old_store": "queue"},
    ),
    "seq-mean-token-sum, bonus, penalty and weights": (
        {"actor": {**EVERYTHING, "loss_agg_mode": "seq-mean-token-sum"}}, {},
    ),
    "seq-mean-token-sum-norm, padded": (
        {"actor": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 9}, "packed": False}, {},
    ),
    "GSPO": ({"actor": {"loss_agg_mode": "seq-mean-token-mean"}, "micro_batch": 4}, BY_SEQUENCE),
    "GSPO, bonus, penalty and weights, LoRA": (
        {"actor": {**EVERYTHING, "loss_agg_mode": "seq-mean-token-mean"}, "model_settings": LORA},
        BY_SEQUENCE,
    ),
    "no bound": ({}, {"troll_kl_bound": float("inf")}),
}  # fmt: skip


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradient_are_those_of_the_path_that_computes_it_afterwards(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given, settings = dict(CASES[name][0]), CASES[name][1]
    rollouts, of_actor = Rollouts.scripted(), given.pop("actor", {})
    rollouts.temperature = 1.4
    if of_actor.get("use_kl_loss"):
        rollouts.extra["ref_log_prob"] = _extra(rollouts, -4.0, -0.1)
        rollouts.extra["rollout_is_weights"] = _extra(rollouts, 0.2, 2.0)
    engine = {**FLOAT64, **given.pop("engine", {})}
    actor = make_actor(
        model, acting(**{"troll_kl_bound": KL_BOUND, "troll_top_k": 6, **settings}), engine_settings=engine,
        learning_rate=1e-2 if "model_settings" in given else 1e-3, **given, **of_actor,
    )  # fmt: skip
    with loss_afterwards():
        moved = Moved(actor, rollouts, calculate_entropy=of_actor.get("use_kl_loss", False))
    formed = _counting(monkeypatch)
    metrics, gradient = moved.run()
    early = formed["logits"]
    expected, ordinary = moved.run_afterwards()
    assert early < formed["logits"] - early
    assert metrics.keys() == expected.keys()
    for key, value in metrics.items():
        assert value == pytest.approx(expected[key], rel=1e-9, abs=1e-12), key
    assert max(float(value.abs().max()) for value in ordinary.values()) > 1e-3
    assert largest_difference(gradient, ordinary) < 1e-10


def _counting(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rows multiplied with the LM head, by what for: logits, the gradient of hidden states, and its own."""
    rows = {"logits": 0, "hidden": 0, "weight": 0}

    def count(where: Any, name: str, what: str, argument: int) -> None:
        original: Callable[..., Any] = getattr(where, name)

        def counted(*arguments: Any) -> Any:
            rows[what] += len(arguments[argument])
            return original(*arguments)

        monkeypatch.setattr(where, name, counted)

    count(head, "raw_logits", "logits", 0)
    count(head, "times_weight", "hidden", 0)
    count(head.HeadGradients, "_add_weight", "weight", 2)
    return rows


@pytest.mark.parametrize("bound", ["every token projected", "none"])
def test_each_token_is_multiplied_with_the_head_three_times_not_four(
    model: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """And with the old policy's head once, not twice, where it is projected."""
    projected = bound != "none"
    settings = acting(troll_kl_bound=1e-9 if projected else float("inf"))
    moved = Moved(make_actor(model, settings, micro_batch=4), Rollouts.scripted())
    rows = _counting(monkeypatch)
    metrics, _ = moved.run()
    assert metrics["actor/troll/projected"] == pytest.approx(float(projected))
    both = 1 + projected  # policies whose logits are formed
    assert rows == {"logits": both * TOKENS, "hidden": TOKENS, "weight": TOKENS}
    rows.update(dict.fromkeys(rows, 0))
    moved.run_afterwards()
    assert rows == {"logits": 2 * both * TOKENS, "hidden": TOKENS, "weight": TOKENS}


def test_verls_loss_is_asked_for_once_a_micro_batch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which it waits for the device more than once a sequence."""
    moved, asked = Moved(make_actor(model, acting()), Rollouts.scripted()), []
    original = losses.get_policy_loss_fn
    monkeypatch.setattr(losses, "get_policy_loss_fn", lambda name: asked.append(name) or original(name))
    moved.run()
    assert asked == ["troll", "troll"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("tied", "packed", "lora"),
    [(False, True, {}), (True, False, {}), (False, True, LORA)],
    ids=["packed", "tied, padded", "LoRA"],
)
def test_the_gradient_is_the_dense_one(
    model: Path, tied_model: Path, tied: bool, packed: bool, lora: dict[str, Any]
) -> None:
    folder, rollouts = tied_model if tied else model, Rollouts.scripted()
    rollouts.temperature = 1.4
    actor = make_actor(
        folder, acting(troll_kl_bound=KL_BOUND, troll_top_k=6), packed=packed, model_settings=lora,
        engine_settings=FLOAT64, learning_rate=1e-2 if lora else 1e-3, micro_batch=4,
    )  # fmt: skip
    worst, projected = worst_gradient(folder, actor, rollouts, rollouts, lora)
    assert worst < 1e-6
    assert projected > 0.2


def test_half_precision_agrees_to_its_rounding(model: Path) -> None:
    half = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
    moved = Moved(make_actor(model, acting(), engine_settings=half), Rollouts.scripted())
    (metrics, gradient), (expected, ordinary) = moved.run(), moved.run_afterwards()
    largest = max(float(value.abs().max()) for value in ordinary.values())
    assert largest_difference(gradient, ordinary) < 2 * torch.finfo(torch.bfloat16).eps * largest
    for key, value in metrics.items():
        of_rounded = key == "grad_norm"
        assert value == pytest.approx(expected[key], rel=1e-2 if of_rounded else 1e-5, abs=1e-6), key


@pytest.mark.usefixtures("float64")
def test_a_micro_batch_of_which_nothing_counts_moves_nothing(model: Path) -> None:
    rollouts = Rollouts.scripted()
    for row in (0, 1):
        rollouts.masks[row][:] = 0
    actor = make_actor(model, acting(), engine_settings=FLOAT64)
    moved = Moved(actor, rollouts)
    (metrics, gradient), (expected, ordinary) = moved.run(), moved.run_afterwards()
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert largest_difference(gradient, ordinary) < 1e-10


def test_slopes_of_another_loss_are_noticed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a version of verl weighed the tokens by another rule."""
    moved, original = Moved(make_actor(model, acting()), Rollouts.scripted()), one_pass._weights_of_tokens
    monkeypatch.setattr(one_pass, "_weights_of_tokens", lambda *given: 1.001 * original(*given))
    with pytest.raises(InvalidInputError, match="or is not what in_blocks said"):
        moved.run()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "in one pass over the LM head"),
        ({"troll_support": "bucket"}, "troll_support=bucket reads logits"),
        ({"troll_region": "sequence"}, "troll_region=sequence projects"),
    ],
)
def test_which_way_and_why_is_logged_once(
    model: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], reason: str
) -> None:
    actor, rollouts = make_actor(model, acting(**settings)), Rollouts.scripted()
    old = rollouts.score(actor)
    with caplog.at_level(logging.INFO, logger=engines.__name__):
        for _ in range(2):
            rollouts.update(actor, old)
    (message,) = (record.getMessage() for record in caplog.records if record.name == engines.__name__)
    assert reason in message


@pytest.mark.parametrize(
    ("settings", "of_engine", "reason"),
    [
        ({"troll_anchor": "sampler"}, {}, "what its sampler could sample"),
        ({}, {"sequence_parallel": 2}, "ulysses_sequence_parallel_size=2 cuts sequences"),
        ({}, {"scales_loss": True}, "fp16 scales a loss up"),
    ],
)
def test_what_else_speaks_against_it(settings: Any, of_engine: Any, reason: str) -> None:
    found = one_pass.obstacle(
        acting(**settings), **{"sequence_parallel": 1, "scales_loss": False, **of_engine}
    )
    assert found is not None
    assert reason in found
