"""DPPO: which tokens are dropped, and the gradient of those that are not."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch

from rounding import unit_of
from tether.errors import InvalidInputError
from tether.losses import dppo
from tether.projection import SparseLogProbs


def _dropped(new: float, old: float, advantage: float, **options: object) -> bool:
    result = dppo(
        torch.tensor([[new]]).log(), torch.tensor([[old]]).log(), torch.tensor([advantage]),
        torch.ones(1, 1), **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return bool(result.metrics["clipped"])


@pytest.mark.parametrize(
    ("new", "old", "advantage", "dropped"),
    [
        (0.7, 0.5, 1.0, True),  # pushed further up
        (0.7, 0.5, -1.0, False),  # pushed back
        (0.3, 0.5, -1.0, True),  # pushed further down
        (0.3, 0.5, 1.0, False),  # pushed back
        (0.6, 0.5, 1.0, False),  # inside: .1
        (0.14, 0.001, 1.0, False),  # inside although the ratio is 140
    ],
)
def test_tokens_are_dropped_by_how_far_their_probability_moved(
    new: float, old: float, advantage: float, dropped: bool
) -> None:
    assert _dropped(new, old, advantage) == dropped


@pytest.mark.parametrize(("new", "dropped"), [(0.65, False), (0.66, True)])
def test_binary_kl_has_its_own_default(new: float, dropped: bool) -> None:
    # KL((.5, .5) || (p, 1 - p)) = -log(4 p (1 - p)) / 2: .0472 at .65, .0540 at .66
    assert _dropped(new, 0.5, 1.0, divergence="binary-kl") == dropped


@pytest.mark.parametrize("log_new", [-1e-6, -1e-3, -0.5, -3.0, -30.0])
@pytest.mark.parametrize("log_old", [-2e-6, -5e-4, -0.9, -12.0])
def test_binary_kl_keeps_its_digits_in_float32(log_new: float, log_old: float) -> None:
    getcontext().prec = 60
    new, old = torch.tensor([[log_new]]), torch.tensor([[log_old]])
    p, q = (Decimal(x.item()).exp() for x in (new, old))  # of the very float32 numbers
    expected = q * (q / p).ln() + (1 - q) * ((1 - q) / (1 - p)).ln()
    result = dppo(new, old, torch.ones(1), torch.ones(1, 1), divergence="binary-kl")
    assert result.metrics["divergence_mean"].item() == pytest.approx(
        float(expected), rel=1e-4, abs=2 * unit_of(1.0)
    )


def test_a_token_the_old_policy_was_certain_of_has_a_finite_divergence() -> None:
    new, certain = torch.tensor([[0.5]]).log(), torch.zeros(1, 1)
    result = dppo(new, certain, -torch.ones(1), torch.ones(1, 1), divergence="binary-kl")
    assert result.metrics["divergence_max"].item() == pytest.approx(math.log(2))
    back = dppo(certain, new, torch.ones(1), torch.ones(1, 1), divergence="binary-kl")
    assert 5 < back.metrics["divergence_max"].item() < 10  # as far as the rest of the new one is resolved
    assert back.metrics["clipped"].item() == 1


@pytest.mark.parametrize("log_old", [-(2.0**-23), -1e-6, -1e-4])
def test_a_probability_that_rounds_to_one_has_not_moved_far(log_old: float) -> None:
    """Of a token that is all but certain log p is 0 as often as -1e-7, and no other outcome is excluded."""
    options = {"divergence": "binary-kl"}
    result = dppo(torch.zeros(1, 1), torch.tensor([[log_old]]), torch.ones(1), torch.ones(1, 1), **options)  # type: ignore[arg-type]
    assert result.metrics["clipped"].item() == 0
    # The most there is to lose, 1 - q, each part of which costs at most the logarithm of what is left.
    assert result.metrics["divergence_max"].item() <= -log_old * 16


def test_a_log_probability_that_rounding_made_positive_counts_as_certain() -> None:
    above, new = torch.tensor([[1e-4]]), torch.tensor([[0.5]]).log()
    result = dppo(new, above, -torch.ones(1), torch.ones(1, 1), divergence="binary-kl")
    assert result.metrics["divergence_max"].item() == pytest.approx(math.log(2))


def test_below_the_cap_the_gradient_is_that_of_the_papers_objective() -> None:
    old = torch.tensor([[0.5, 0.2, 0.4, 0.01]], dtype=torch.float64).log()
    new = torch.tensor([[0.8, 0.25, 0.3, 0.05]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, 1.0, -1.0, 2.0]], dtype=torch.float64)
    gradients = []
    for objective in (False, True):
        leaf = new.clone().requires_grad_()
        if objective:  # M r A, M by hand: the first token moved by .3
            keep = torch.tensor([[0.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
            loss = -(keep * (leaf - old).exp() * advantages).mean()
        else:
            loss = dppo(leaf, old, advantages, torch.ones(1, 4)).loss
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-12)


def test_above_the_cap_a_token_keeps_a_gradient_of_bounded_weight() -> None:
    leaf = torch.tensor([[math.log(0.1)]], dtype=torch.float64).requires_grad_()
    old = torch.tensor([[math.log(0.001)]], dtype=torch.float64)  # ratio 100
    dppo(leaf, old, torch.ones(1).double(), torch.ones(1, 1)).loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == pytest.approx(-20.0)


def test_top_k_sees_what_the_sampled_token_hides() -> None:
    """The sampled token kept its probability while two others swapped theirs."""
    old = torch.tensor([[[0.2, 0.7, 0.1]]]).log()
    new = torch.tensor([[[0.21, 0.09, 0.7]]]).log()
    sampled = (new[..., 0], old[..., 0], torch.ones(1), torch.ones(1, 1))
    assert dppo(*sampled).metrics["clipped"].item() == 0
    whole = dppo(*sampled, divergence="top-k-tv", new=new, old=old)
    assert whole.metrics["clipped"].item() == 1
    assert whole.metrics["divergence_max"].item() == pytest.approx(0.61)
    ids = torch.tensor([[[0, 1]]])
    few = {"new": SparseLogProbs.at_ids(new, ids), "old": SparseLogProbs.at_ids(old, ids)}
    assert dppo(*sampled, divergence="top-k-tv", **few).metrics["divergence_max"].item() == pytest.approx(
        0.61
    )


def test_an_outcome_the_new_policy_cannot_produce_is_infinitely_far() -> None:
    old = torch.tensor([[[0.2, 0.5, 0.3]]]).log()
    new = torch.tensor([[[0.5, 0.5, 0.0]]]).log()
    leaf = new[..., 0].clone().requires_grad_()
    result = dppo(leaf, old[..., 0], torch.ones(1), torch.ones(1, 1), divergence="top-k-kl", new=new, old=old)
    result.loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 0
    assert result.metrics["divergence_max"].item() == math.inf


def test_distributions_on_different_ids_are_refused() -> None:
    logits = torch.randn(1, 1, 5)
    new, old = (SparseLogProbs.at_ids(logits, torch.tensor([[ids]])) for ids in ([0, 1], [0, 2]))
    row = -torch.ones(1, 1)
    with pytest.raises(InvalidInputError, match=r"same ids.*SparseLogProbs\.at_ids"):
        dppo(row, row, torch.ones(1), torch.ones(1, 1), divergence="top-k-tv", new=new, old=old)
    with pytest.raises(InvalidInputError, match=r"both be.*got Tensor and SparseLogProbs"):
        dppo(row, row, torch.ones(1), torch.ones(1, 1), divergence="top-k-tv", new=logits, old=old)


def test_tokens_that_teach_nothing_are_not_counted_as_clipped() -> None:
    """Groups of equal reward have advantages of 0, however far their tokens moved."""
    for new in (0.6, 0.2):
        assert not _dropped(new, 0.4, 0.0, divergence_low=0.1, divergence_high=0.1)
        assert _dropped(new, 0.4, 1.0 if new > 0.4 else -1.0, divergence_low=0.1, divergence_high=0.1)
