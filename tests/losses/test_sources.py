"""Every method against an implementation that is not ours, and the table that says so."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import references
import sources
import torch

import tether.advantages
from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.losses import LOSSES, PolicyLoss
from tether.losses.aggregate import LossAggMode

CASES = [
    pytest.param(method.function, reference, batch, id=f"{method.function}-{index}-{batch}")
    for method in sources.METHODS
    for index, reference in enumerate(method.references)
    for batch in reference.batches
]


def _ours(function: str, reference: references.Reference, name: str) -> tuple[PolicyLoss, np.ndarray]:
    batch = references.batch_of(name)
    leaf = batch.log_probs.clone().requires_grad_()
    result = LOSSES[function](
        leaf, batch.old_log_probs, batch.advantages, batch.response_mask, **reference.options(batch)
    )
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    return result, gradient.numpy()


@pytest.mark.parametrize(("function", "reference", "batch"), CASES)
def test_loss_and_gradient_equal_the_source(
    function: str, reference: references.Reference, batch: str
) -> None:
    result, gradient = _ours(function, reference, batch)
    loss, expected = reference.compute(references.batch_of(batch))
    # Ours is float64, but some sources keep a setting or a step in between in float32.
    within = SUMMED_ANOTHER_WAY * unit_of(1.0)
    np.testing.assert_allclose(result.loss.item(), float(loss), rtol=within, atol=0.1 * within)
    np.testing.assert_allclose(gradient, np.asarray(expected), rtol=within, atol=0.1 * within)
    assert np.abs(gradient).max() > 0.01  # a comparison of zeros would say nothing


@pytest.mark.parametrize(
    "method", [m for m in sources.METHODS if m.references], ids=lambda m: m.function + m.variant
)
def test_the_comparisons_see_the_rule_both_act_and_not_act(method: sources.Method) -> None:
    shares = [
        result.metrics["clipped"].item()
        for reference in method.references
        for batch in reference.batches
        for result in [_ours(method.function, reference, batch)[0]]
        if "clipped" in result.metrics
    ]
    if shares:
        assert any(0 < share < 1 for share in shares), shares
    else:  # the smooth methods act everywhere
        assert method.function in {"sapo", "vespo", "pspo", "kl_penalty", "unclipped"}


@pytest.fixture(scope="module")
def advantage_inputs() -> dict[str, Any]:
    data = references.fixtures()["advantages"]
    tensors: dict[str, Any] = {
        key: torch.tensor(data[key], dtype=torch.float64)
        for key in ("rewards", "token_rewards", "values", "response_mask")
    }
    return tensors | {"groups": torch.tensor(data["groups"])}


@pytest.mark.parametrize("estimator", sources.ESTIMATORS, ids=lambda e: e.function)
def test_advantages_equal_the_source(estimator: sources.Estimator, advantage_inputs: dict[str, Any]) -> None:
    mask = advantage_inputs["response_mask"].numpy()
    expected = np.array(references.fixtures()["advantages"][estimator.key])
    ours = estimator.compute(advantage_inputs).numpy()
    if ours.ndim == 1:
        ours = ours[:, None] * mask
    np.testing.assert_allclose(ours, expected * mask, rtol=1e-6, atol=1e-7)
    assert np.abs(ours).max() > 0.4


def test_gae_returns_equal_the_source(advantage_inputs: dict[str, Any]) -> None:
    x = advantage_inputs
    _, returns = tether.advantages.gae(
        x["token_rewards"], x["values"], x["response_mask"], gamma=0.95, gae_lambda=0.8
    )
    expected = np.array(references.fixtures()["advantages"]["gae gamma=0.95 lam=0.8 returns"])
    mask = x["response_mask"].numpy()
    np.testing.assert_allclose(returns.numpy(), expected * mask, rtol=1e-6, atol=1e-7)


def test_every_loss_and_every_estimator_has_a_row_that_was_checked() -> None:
    assert {method.function for method in sources.METHODS} == set(LOSSES)
    assert {estimator.function for estimator in sources.ESTIMATORS} == set(tether.advantages.ADVANTAGES)
    for method in sources.METHODS:
        assert bool(method.references) != bool(method.elsewhere)
        assert (sources.ROOT / "src/tether/losses" / f"{method.function}.py").is_file()


def test_the_committed_table_is_current() -> None:
    assert sources.PAGE.read_text() == sources.table(), "run: python tests/losses/sources.py"


def test_modes_of_averaging_are_those_of_the_sources() -> None:
    """The defaults differ on purpose: GSPO, SAPO and GMPO average sequences, the others tokens."""
    by_sequence = {"gspo", "sapo", "gmpo"}
    for name, loss in LOSSES.items():
        mode: LossAggMode = inspect.signature(loss).parameters["loss_agg_mode"].default
        assert mode == ("seq-mean-token-mean" if name in by_sequence else "token-mean"), name
