"""The region around the policy that sampled: verl's engine with its records, and no scoring pass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from actor import FLOAT64, LORA, Rollouts, acting, gradients, jagged, make_actor, parameters
from dense import Dense
from largest_tensor import largest_tensor
from sampled import Reports

from tether.errors import ConfigError, InvalidInputError, TetherError
from tether.integrations.verl import TROLLPolicyLossConfig, sampler_fields

KL_BOUND = 0.002


def _sampler(
    model: Path, rollouts: Rollouts, lora: dict[str, Any], state: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Whole distributions of another policy, near the present one, [B, T, V]."""
    near = {name: value + 0.1 * value.std().nan_to_num() * _noise(value) for name, value in state.items()}
    return Dense(model, near, lora).log_probs(rollouts).detach()


def _noise(value: torch.Tensor) -> torch.Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()), dtype=value.dtype)


def _around_sampler(**settings: Any) -> TROLLPolicyLossConfig:
    return TROLLPolicyLossConfig(**{"troll_kl_bound": KL_BOUND, "troll_anchor": "sampler", **settings})


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("support", "packed", "lora", "truncated"),
    [
        ("exact", True, {}, False),
        ("exact", False, {}, True),
        ("exact", True, LORA, True),
        ("bucket", False, {}, False),
    ],
    ids=["packed", "padded, truncated", "LoRA, truncated", "logits, padded"],
)
def test_gradient_and_kl_are_the_dense_ones(
    model: Path, support: str, packed: bool, lora: dict[str, Any], truncated: bool
) -> None:
    """At a temperature of its own, in two micro-batches, with bounds that grow with each sequence's lag."""
    rollouts = Rollouts.scripted()
    rollouts.temperature = 1.4
    settings = _around_sampler(troll_support=support, troll_lag_growth="linear", troll_lag_rate=0.5)
    actor = make_actor(model, settings, packed=packed, model_settings=lora, engine_settings=FLOAT64,
                       learning_rate=1e-2 if lora else 3e-3)  # fmt: skip
    sampler = _sampler(model, rollouts, lora, parameters(actor))
    reports = Reports.of(sampler, rollouts, 6, truncated, [0, 0, 0, 0])
    old = reports.fields(rollouts)
    for _ in range(2):
        rollouts.update(actor, old)
    reference = Dense(model, parameters(actor), lora)
    metrics = rollouts.update(actor, old)
    # Two steps of one call lie behind the third.
    expected = reports.loss(reference, rollouts, 2 * KL_BOUND)
    expected.loss.backward()
    dense = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    found = gradients(actor)
    assert found.keys() == dense.keys()
    largest = max(value.abs().max() for value in dense.values())
    assert max((found[name] - dense[name]).abs().max() for name in dense) < 1e-6 * largest
    assert metrics["actor/troll/kl_mean"] == pytest.approx(expected.metrics["kl_mean"].item(), rel=1e-6)
    assert metrics["actor/troll/kl_max"] == pytest.approx(expected.metrics["kl_max"].item(), rel=1e-6)
    assert metrics["actor/troll/projected"] > 0.2
    assert metrics["actor/troll/kl_projected_max"] <= 2 * KL_BOUND * (1 + 1e-9)
    assert metrics["actor/troll/lag"] == 2
    assert metrics["actor/troll/lag_2/kl"] == pytest.approx(metrics["actor/troll/kl_mean"], rel=1e-6)
    assert metrics["actor/troll/lag_2/projected"] == pytest.approx(metrics["actor/troll/projected"], rel=1e-6)


def _ready(model: Path, **settings: Any) -> tuple[Any, Rollouts, dict[str, torch.Tensor]]:
    """An actor, and a batch with records of a policy near its own."""
    rollouts = Rollouts.scripted()
    actor = make_actor(model, _around_sampler(**settings))
    reports = Reports.of(_sampler(model, rollouts, {}, parameters(actor)), rollouts, 6, False, [0] * 4)
    return actor, rollouts, reports.fields(rollouts)


def test_the_lag_counts_optimizer_steps(model: Path) -> None:
    """Two steps a call: a token of one sequence was sampled two calls ago, all others after the last."""
    actor, rollouts, old = _ready(model)
    for step in range(6):
        rollouts.update(actor, old, update_lr_scheduler=step % 2 == 1)
    calls = [torch.full((len(row),), 3, dtype=torch.int32) for row in rollouts.responses]
    calls[2][1] = 1
    old |= {"troll_sampler_calls": jagged(calls), "troll_sampler_updates": torch.full((4, 1), 2)}
    first = rollouts.update(actor, old)
    second = rollouts.update(actor, old)
    assert (first["actor/troll/lag"], second["actor/troll/lag"]) == (4, 5)
    assert {name for name in first if name.endswith("/kl")} == {f"actor/troll/lag_{n}/kl" for n in (0, 4)}
    assert {name for name in second if name.endswith("/kl")} == {f"actor/troll/lag_{n}/kl" for n in (1, 4)}
    assert not any(name.endswith("/uncertain") for name in first)  # of which an engine's top K says nothing
    tokens = [int(mask.sum()) for mask in rollouts.masks]
    oldest = tokens[2] / sum(tokens)
    mean = oldest * first["actor/troll/lag_4/kl"] + (1 - oldest) * first["actor/troll/lag_0/kl"]
    assert mean == pytest.approx(first["actor/troll/kl_mean"], rel=1e-6)
    del calls[2]
    with pytest.raises(TetherError, match=r"had 3 calls .* the trainer counts 0\. A run that resumes"):
        rollouts.update(make_actor(model, _around_sampler()), old)


@pytest.mark.parametrize("at", [0, 1])
def test_a_step_that_verl_skips_is_no_lag(model: Path, at: int) -> None:
    """A gradient that is not finite leaves the weights alone: in this call of the update or in one before."""
    actor, rollouts, old = _ready(model)
    before = parameters(actor)
    infinite = jagged([torch.full_like(row, torch.inf) for row in rollouts.advantages])
    metrics = rollouts.update(actor, {**old, "advantages": infinite}, update_lr_scheduler=at == 1)
    assert not math.isfinite(metrics["grad_norm"])
    assert all(torch.equal(value, before[name]) for name, value in parameters(actor).items())
    assert rollouts.update(actor, old)["actor/troll/lag"] == 0
    assert rollouts.update(actor, old)["actor/troll/lag"] == 1


def test_a_version_nobody_counts_is_no_lag(model: Path) -> None:
    actor, rollouts, old = _ready(model)
    old["troll_sampler_calls"] = jagged([torch.full((len(row),), -1) for row in rollouts.responses])
    assert not any("/lag" in name for name in rollouts.update(actor, old))
    growing, _, _ = _ready(model, troll_lag_growth="power", troll_lag_rate=0.5)
    with pytest.raises(InvalidInputError, match="nothing says how old the data are"):
        rollouts.update(growing, old)


def test_bad_records_are_named(model: Path) -> None:
    actor, rollouts, good = _ready(model)
    count = good["troll_sampler_count"].unbind()
    at = int(count[0].sum()) + int(count[1][:3].sum())  # sequence 1, position 3: position 2 is a tool's

    def broken(change: Any, name: str = "troll_sampler_log_probs") -> dict[str, torch.Tensor]:
        values = good[name].values().clone()
        change(values)
        return {**good, name: torch.nested.nested_tensor_from_jagged(values, good[name].offsets())}

    def nan(values: torch.Tensor) -> None:
        values[at] = torch.nan

    def heavy(values: torch.Tensor) -> None:
        values[at : at + 6] += 1.0

    def unreported(values: torch.Tensor) -> None:
        values[len(rollouts.responses[0]) + 3] = 0

    with pytest.raises(InvalidInputError, match="sequence 1, position 3: a reported log-probability is NaN"):
        rollouts.update(actor, broken(nan))
    with pytest.raises(InvalidInputError, match="sequence 1, position 3: the sampled id"):
        rollouts.update(actor, broken(heavy))
    with pytest.raises(TetherError, match="sequence 1, position 3: the sampler left no record of this token"):
        rollouts.update(actor, broken(unreported, "troll_sampler_count"))


def test_records_take_as_much_as_the_tokens_that_count() -> None:
    """However long the longest response is: one of 512 tokens beside 64 of 8."""
    lengths, ids = [512, *[8] * 64], 40
    report = torch.full((ids,), -9.0).index_fill(0, torch.tensor([0]), -0.5)
    rows = {
        "response_mask": lambda n: torch.ones(n, dtype=torch.long),
        "responses": lambda n: torch.zeros(n, dtype=torch.long),
        "old_log_probs": lambda n: report[:1].repeat(n),
        sampler_fields.COUNT: lambda n: torch.full((n,), ids, dtype=torch.int16),
        sampler_fields.IDS: lambda n: torch.arange(ids, dtype=torch.int32).repeat(n),
        sampler_fields.LOG_PROBS: lambda n: report.repeat(n),
    }
    batch = {name: jagged([make(length) for length in lengths]) for name, make in rows.items()}
    with largest_tensor() as found:
        policy = sampler_fields.unpack(batch, 100, None)
    assert found.elements <= sum(lengths) * (ids + 1)
    assert policy.support.ids.shape == (sum(lengths), ids)


def test_a_batch_without_records_names_the_remedy(model: Path) -> None:
    actor, rollouts, old = _ready(model)
    without = {name: value for name, value in old.items() if not name.startswith("troll_sampler_")}
    with pytest.raises(ConfigError, match=r"not recorded.*\+tether=troll_sampler.*bypass_mode=False"):
        rollouts.update(actor, without)
    with pytest.raises(ConfigError, match=r"a pass for nothing.*bypass_mode=True"):
        rollouts.score(actor)
    with pytest.raises(ConfigError, match=r"bypass_mode=False.*\+tether=troll_sampler"):
        rollouts.update(make_actor(model, acting()), old)


def test_sequences_that_verl_fills_up_with_do_not_count(model: Path) -> None:
    """One token under a zero mask, and every other field of a real sequence."""
    actor, rollouts, old = _ready(model)
    alone = rollouts.update(actor, old)
    filled = Rollouts(
        [*rollouts.prompts, torch.ones(9, dtype=torch.long)],
        [*rollouts.responses, torch.ones(1, dtype=torch.long)],
        [*rollouts.masks, torch.zeros(1, dtype=torch.long)],
        [*rollouts.advantages, torch.zeros(1)],
    )  # fmt: skip
    more = {name: jagged([*value.unbind(), value.unbind()[0]]) for name, value in old.items()}
    more |= {"old_log_probs": jagged([*old["old_log_probs"].unbind(), torch.zeros(1)]),
             "advantages": jagged(filled.advantages)}  # fmt: skip
    other = make_actor(model, _around_sampler(), micro_batch=5)
    metrics = filled.update(other, more)
    for name in ("kl_mean", "kl_max", "projected", "lag_0/kl"):
        assert metrics[f"actor/troll/{name}"] == pytest.approx(alone[f"actor/troll/{name}"], rel=1e-3)


def test_reports_of_both_kinds_share_a_batch(model: Path) -> None:
    """An agent loop may truncate in one turn and not in another: each token is judged by its own."""
    rollouts = Rollouts.scripted()
    actor = make_actor(model, _around_sampler(), micro_batch=4, learning_rate=0.0)
    sampler = _sampler(model, rollouts, {}, parameters(actor))
    both = [Reports.of(sampler, rollouts, 6, kind, [0] * 4).fields(rollouts) for kind in (False, True)]

    def mean(kinds: list[int]) -> float:
        old = {
            name: jagged([both[kind][name].unbind()[row] for row, kind in enumerate(kinds)])
            for name in both[0]
        }
        return rollouts.update(actor, old)["actor/troll/kl_mean"]

    alone = mean([0, 0, 0, 0]), mean([1, 1, 1, 1])
    mixed = mean([0, 1, 1, 0]), mean([1, 0, 0, 1])
    assert sum(mixed) == pytest.approx(sum(alone), rel=1e-3)
    assert abs(mixed[0] - mixed[1]) > 0.1 * abs(alone[0] - alone[1]) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"troll_anchor": "engine"}, "troll_anchor must be one of trainer, sampler, got 'engine'"),
        ({"troll_support": "paper"}, "troll_support=paper invents probabilities"),
        ({"troll_lag_growth": "cubic"}, "troll_lag_growth must be one of constant, linear, power, geometric"),
        ({"troll_kl_bound_largest": 1e-9}, r"troll_kl_bound_largest must be at least kl_bound=0\.002"),
        (
            {"troll_anchor": "trainer", "troll_lag_growth": "linear", "troll_lag_rate": 0.5},
            r"troll_lag_growth=linear.*\+tether=troll_sampler",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _around_sampler(**settings)
