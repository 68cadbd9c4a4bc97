"""One projection of tokens, whatever is known of the policies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.errors import InvalidInputError
from tether.losses import project_tokens, troll, troll_objective
from tether.ops import HiddenStates
from tether.projection import SparseLogProbs
from tether.settings import Region

B, T, D, V = 3, 5, 7, 23


class _Model:
    """Hidden states and heads of two policies, in float64, some tokens masked."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        self.old_hidden, self.old_weight = draw(B, T, D), draw(V, D)
        self.hidden = (self.old_hidden + 0.3 * draw(B, T, D)).requires_grad_()
        self.weight = (self.old_weight + 0.02 * draw(V, D)).requires_grad_()
        self.mask = torch.tensor([[1] * T, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
        self.ids = torch.where(self.mask > 0, torch.randint(0, V, (B, T), generator=generator), -100)
        self.advantages = draw(B)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        new = (self.hidden @ self.weight.t()).log_softmax(-1)
        return new, (self.old_hidden @ self.old_weight.t()).log_softmax(-1)

    def sampled(self, log_probs: torch.Tensor) -> torch.Tensor:
        return log_probs.gather(-1, self.ids.clamp_min(0)[..., None]).squeeze(-1)


@pytest.mark.parametrize("region", ["token", "sequence"])
def test_hidden_states_give_the_loss_and_gradient_of_the_distributions_they_make(region: Region) -> None:
    model = _Model()
    new, old = model.dense()
    forms = {
        "dense": (new, old),
        "hidden": (
            HiddenStates(model.hidden, model.weight),
            HiddenStates(model.old_hidden, model.old_weight),
        ),
    }
    found = {}
    for form, (new_policy, old_policy) in forms.items():
        result = troll(
            model.sampled(new), model.sampled(old), model.advantages, model.mask,
            response_ids=model.ids, new=new_policy, old=old_policy, region=region,
        )  # fmt: skip
        gradients = torch.autograd.grad(result.loss, (model.hidden, model.weight), retain_graph=True)
        found[form] = (result.loss, *gradients)
        assert 0 < result.metrics["projected"] <= 1
    for dense, hidden in zip(found["dense"], found["hidden"], strict=True):
        torch.testing.assert_close(hidden, dense, rtol=1e-8, atol=1e-10)


def test_what_is_read_off_hidden_states_is_what_the_distributions_say() -> None:
    model = _Model()
    new, old = model.dense()
    policies = HiddenStates(model.hidden, model.weight), HiddenStates(model.old_hidden, model.old_weight)
    hidden = project_tokens(*policies, model.ids, model.mask, old_log_probs=model.sampled(old))
    dense = project_tokens(new, old, model.ids, model.mask)
    counted = model.mask > 0
    outside = dense.projected & counted
    assert torch.equal(hidden.projected[counted], dense.projected[counted])
    for name in ("new_log_probs", "old_log_probs", "projected_log_probs", "regression", "step"):
        torch.testing.assert_close(
            getattr(hidden, name)[counted], getattr(dense, name)[counted], rtol=1e-8, atol=1e-10
        )
    torch.testing.assert_close(hidden.kl[outside], dense.kl[outside], rtol=1e-8, atol=1e-10)


def test_a_new_policy_without_its_head_is_refused() -> None:
    model = _Model()
    without = HiddenStates(model.hidden)
    with pytest.raises(InvalidInputError, match="need the weight of their LM head"):
        project_tokens(without, without, model.ids, model.mask)


@pytest.mark.parametrize("name", ["log_probs", "old_log_probs"])
@pytest.mark.parametrize("form", ["dense", "hidden"])
def test_log_probabilities_of_other_tokens_are_refused(form: str, name: str) -> None:
    """One a position, which would be spread over the sequences."""
    model = _Model()
    new, old = model.dense()
    sides: Any = (new, old)
    if form == "hidden":
        sides = HiddenStates(model.hidden, model.weight), HiddenStates(model.old_hidden, model.old_weight)
    with pytest.raises(InvalidInputError, match=rf"{name} must be \[B, T\] = \(3, 5\).*got \(5,\)"):
        project_tokens(*sides, model.ids, model.mask, **{name: model.sampled(new)[0].detach()})


@pytest.mark.parametrize("form", ["dense", "hidden"])
def test_words_that_mean_nothing_are_refused(form: str) -> None:
    """Not taken for another region, or for another support."""
    model = _Model()
    sides: Any = model.dense()
    if form == "hidden":
        sides = HiddenStates(model.hidden, model.weight), HiddenStates(model.old_hidden, model.old_weight)
    with pytest.raises(InvalidInputError, match="region must be one of token, sequence, got 'sequences'"):
        project_tokens(*sides, model.ids, model.mask, region="sequences")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="support must be one of bucket, paper, got 'rubbish'"):
        project_tokens(*sides, model.ids, model.mask, support="rubbish")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="are not both SparseLogProbs"):
        project_tokens(*sides, model.ids, model.mask, support="paper")


def test_an_objective_without_old_log_probabilities_is_refused() -> None:
    """Its loss would be NaN and the policy's part of its gradient zero."""
    model = _Model()
    sides = HiddenStates(model.hidden, model.weight), HiddenStates(model.old_hidden, model.old_weight)
    tokens = project_tokens(*sides, model.ids, model.mask)
    with pytest.raises(InvalidInputError, match="pass old_log_probs to project_tokens"):
        troll_objective(tokens, model.advantages, model.mask)
    new, old = model.dense()
    tokens = project_tokens(new, old, model.ids, model.mask)
    for shape in ((1, T), (B, 1), (B, T + 1)):
        with pytest.raises(InvalidInputError, match=r"policy_weights must be \[B, T\] = \(3, 5\)"):
            troll_objective(tokens, model.advantages, model.mask, policy_weights=torch.ones(shape))


def test_ids_that_are_no_integers_are_refused_of_sparse_policies_too() -> None:
    model = _Model()
    new, old = (SparseLogProbs.from_logits(side, V) for side in model.dense())
    with pytest.raises(InvalidInputError, match=r"response_ids must be integers, got torch\.float32"):
        project_tokens(new, old, model.ids.float(), model.mask)


@pytest.mark.parametrize("vocabulary", [8, 1000])
def test_the_pull_of_half_precision_is_a_divergence(vocabulary: int) -> None:
    """Log-probabilities that are rounded to it have a mass that is off by a percent."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(64, 4, vocabulary, generator=generator)
    new = old + 0.3 * torch.randn(old.shape, generator=generator)
    ids, mask = torch.zeros(64, 4, dtype=torch.long), torch.ones(64, 4)
    halves = [side.log_softmax(-1).bfloat16() for side in (new, old)]
    tokens = project_tokens(*halves, ids, mask, kl_bound=0.01)
    exact = project_tokens(*(side.double().log_softmax(-1) for side in halves), ids, mask, kl_bound=0.01)
    assert tokens.projected.any()
    assert tokens.regression.min() >= -SUMMED_ANOTHER_WAY * unit_of(tokens.regression)
    # Differences of log-probabilities, each rounded as these are.
    within = SUMMED_ANOTHER_WAY * unit_of(halves[0])
    torch.testing.assert_close(tokens.regression.double(), exact.regression, rtol=0, atol=within)


def test_tokens_without_a_bound_hide_nobody_elses_divergence() -> None:
    model = _Model()
    new, old = model.dense()
    bounds = torch.full((B, T), math.inf, dtype=torch.float64)
    bounds[:, 0] = 0.05
    tokens = project_tokens(new, old, model.ids, model.mask, kl_bound=bounds)
    alone = project_tokens(new, old, model.ids, model.mask, kl_bound=0.05)
    counted = model.mask > 0
    assert tokens.projected_kl is not None
    torch.testing.assert_close(tokens.projected_kl[:, 0], alone.projected_kl[:, 0], rtol=1e-12, atol=0)
    assert torch.equal(tokens.projected_kl[:, 1:][counted[:, 1:]], tokens.kl[:, 1:][counted[:, 1:]])
