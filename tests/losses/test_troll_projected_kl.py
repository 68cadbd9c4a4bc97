"""The divergence that is left after the projection is the projection's own, not the bound repeated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracles
from tether.losses import ProjectedTokens, project_tokens
from tether.projection import SparseLogProbs, geodesic
from tether.projection.solve import Root

B, T, V, BOUND = 3, 5, 9, 0.05
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])


def _logits() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    old = torch.randn(B, T, V, dtype=torch.float64, generator=generator)
    size = torch.tensor([0.05, 1.0, 2.0, 0.1, 1.5], dtype=torch.float64)[None, :, None]
    new = old + size * torch.randn(B, T, V, dtype=torch.float64, generator=generator)
    return new, old, torch.randint(V, (B, T), generator=generator)


def _tokens(top_k: int | None, **options: Any) -> tuple[ProjectedTokens, Tensor, Tensor]:
    """The projection, and the outcomes it works on as dense float64 rows."""
    new, old, ids = (value.log_softmax(-1) if value.is_floating_point() else value for value in _logits())
    if top_k is None:
        return project_tokens(new, old, ids, MASK, kl_bound=BOUND, **options), new, old
    few_old = SparseLogProbs.from_logits(old, top_k, keep_ids=ids)
    few_new = SparseLogProbs.at_ids(new, few_old.ids)
    tokens = project_tokens(few_new, few_old, ids, MASK, kl_bound=BOUND, **options)
    return tokens, few_new.with_buckets(), few_old.with_buckets()


@pytest.mark.parametrize("top_k", [None, 3])
def test_each_token_equals_the_oracles_projection(top_k: int | None) -> None:
    tokens, new, old = _tokens(top_k)
    assert tokens.projected_kl is not None
    projected = 0
    for b, t in MASK.nonzero().tolist():
        # Slots that hold nothing have -inf on both sides, which is no outcome.
        held = ~(new[b, t].isneginf() & old[b, t].isneginf())
        goal, _ = oracles.project_by_root(new[b, t][held], old[b, t][held], BOUND)
        expected = oracles.kl(goal, old[b, t][held])
        assert tokens.projected_kl[b, t].item() == pytest.approx(float(expected), rel=1e-9)
        projected += bool(tokens.projected[b, t])
    assert 3 <= projected <= int(MASK.sum()) - 3


def test_tokens_of_a_sequence_keep_divergences_of_their_own() -> None:
    tokens, new, old = _tokens(None, region="sequence")
    assert tokens.projected_kl is not None
    for b in range(B):
        counted = MASK[b] > 0
        goal, _ = oracles.project_by_root(new[b][counted], old[b][counted], BOUND)
        expected = oracles.kl(goal, old[b][counted])
        np.testing.assert_allclose(tokens.projected_kl[b][counted], expected, rtol=1e-9)
        assert expected.max() > 1.5 * BOUND > expected.mean()


def test_metrics_are_the_mean_and_the_largest_over_counted_tokens() -> None:
    tokens, *_ = _tokens(None)
    metrics, counted = tokens.metrics(MASK), MASK > 0
    assert tokens.projected_kl is not None
    values = tokens.projected_kl[counted]
    assert metrics["kl_projected_mean"].item() == pytest.approx(values.mean().item(), rel=1e-12)
    assert metrics["kl_projected_max"].item() == values.max().item() == pytest.approx(BOUND, rel=1e-6)
    assert metrics["kl_projected_mean"] < metrics["kl_mean"]
    unmoved = counted & ~tokens.projected
    assert torch.equal(tokens.projected_kl[unmoved], tokens.kl[unmoved])


def test_nothing_is_reported_where_nothing_can_be_projected() -> None:
    new, old, ids = _logits()
    new, old = new.log_softmax(-1), old.log_softmax(-1)
    tokens = project_tokens(new, old, ids, MASK, kl_bound=math.inf)
    assert tokens.projected_kl is None
    assert not [name for name in tokens.metrics(MASK) if "kl_projected" in name]


def test_a_projection_that_cannot_reach_the_bound_says_how_far_it_got() -> None:
    """The new policy likes an outcome that the old one cannot produce; without it, it is nearly the old."""
    old = torch.tensor([[[0.5, 0.5, 0.0]]], dtype=torch.float64).log()
    new = torch.tensor([[[0.45, 0.5, 0.05]]], dtype=torch.float64).log()
    ids, mask = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    tokens = project_tokens(new, old, ids, mask, kl_bound=BOUND)
    p, q = 0.45 / 0.95, 0.5 / 0.95
    assert tokens.projected_kl is not None
    assert bool(tokens.projected)
    assert math.isinf(tokens.kl.item())
    assert tokens.projected_kl.item() == pytest.approx(p * math.log(2 * p) + q * math.log(2 * q), rel=1e-9)


def test_rows_on_which_the_solver_fails_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that gives up on every row: the metric counts what is outside, the result stays inside."""
    plain, *_ = _tokens(None)
    assert plain.metrics(MASK)["unconverged"].item() == 0
    monkeypatch.setattr(geodesic, "solve_increasing", lambda _, bound, low, *__: Root(low, bound < 0))
    tokens, *_ = _tokens(None)
    counted = MASK > 0
    assert 0 < int((tokens.projected & counted).sum()) < int(counted.sum())
    assert torch.equal(tokens.converged[counted], ~tokens.projected[counted])
    assert tokens.metrics(MASK)["unconverged"] == tokens.metrics(MASK)["projected"]
    assert float(tokens.projected_kl[tokens.projected & counted].max()) <= BOUND
