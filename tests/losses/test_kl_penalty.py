"""The KL penalty: exact, and estimated from the sampled token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracles
from tether.losses import kl_penalty, unclipped
from tether.projection import SparseLogProbs

OLD = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
NEW_LOGITS = np.array([0.4, -0.2, 0.9])


def _exact(logits: Tensor, **options: Any) -> Tensor:
    """Nothing but the penalty of one token: advantage zero."""
    new, old = logits.log_softmax(-1).expand(1, 1, 3), OLD.expand(1, 1, 3)
    options = {"kl_estimate": "exact", "new": new, "old": old} | options
    return kl_penalty(new[..., 0], old[..., 0], torch.zeros(1), torch.ones(1, 1), **options).loss


def test_the_exact_penalty_and_its_gradient_equal_a_dense_float64_solution() -> None:
    def penalty(logits: np.ndarray) -> float:
        return 2.5 * float(oracles.kl(OLD.numpy(), logits))

    leaf = torch.tensor(NEW_LOGITS).requires_grad_()
    loss = _exact(leaf, kl_coef=2.5)
    loss.backward()
    assert loss.item() == pytest.approx(penalty(NEW_LOGITS), rel=1e-12)
    np.testing.assert_allclose(leaf.grad, oracles.central_differences(penalty, NEW_LOGITS), atol=1e-9)


def test_the_old_distribution_gets_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    _exact(torch.tensor(NEW_LOGITS).requires_grad_(), old=old.expand(1, 1, 3)).backward()
    assert old.grad is None


def test_on_a_sparse_support_the_rest_is_one_outcome() -> None:
    leaf = torch.tensor(NEW_LOGITS).requires_grad_()
    ids = torch.tensor([[[0]]])
    sparse = {
        "new": SparseLogProbs.at_ids(leaf.expand(1, 1, 3), ids),
        "old": SparseLogProbs.at_ids(OLD.expand(1, 1, 3), ids),
    }

    def penalty(logits: np.ndarray) -> float:
        old = float(OLD[0].exp())
        p = np.exp(logits) / np.exp(logits).sum()
        return float(oracles.kl(np.log([old, 1 - old]), np.log([p[0], 1 - p[0]])))

    loss = _exact(leaf, **sparse)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(penalty(NEW_LOGITS), rel=1e-9)
    np.testing.assert_allclose(gradient, oracles.central_differences(penalty, NEW_LOGITS), atol=1e-8)


@pytest.mark.parametrize("estimate", ["k1", "k3"])
def test_the_estimate_is_unbiased_under_the_old_policy(estimate: str) -> None:
    """Averaged over all three outcomes with their old probabilities: value for both, gradient for k3."""
    leaf = torch.tensor(NEW_LOGITS).requires_grad_()
    new = leaf.log_softmax(-1)
    expected_loss = torch.zeros(()).double()
    for token in range(3):
        penalty = kl_penalty(
            new[token].expand(1, 1), OLD[token].expand(1, 1), torch.zeros(1), torch.ones(1, 1),
            kl_estimate=estimate,  # type: ignore[arg-type]
        ).loss  # fmt: skip
        expected_loss = expected_loss + OLD[token].exp() * penalty
    (gradient,) = torch.autograd.grad(expected_loss, leaf)
    assert expected_loss.item() == pytest.approx(float(oracles.kl(OLD.numpy(), NEW_LOGITS)))
    exact = oracles.central_differences(lambda x: float(oracles.kl(OLD.numpy(), x)), NEW_LOGITS)
    np.testing.assert_allclose(gradient, exact, atol=1e-9)


def test_the_policy_gradient_is_beside_it_and_no_price_is_the_plain_loss() -> None:
    new, old = -torch.rand(2, 3).double() - 0.1, -torch.rand(2, 3).double() - 0.1
    advantages, mask = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.ones(2, 3)
    plain = unclipped(new, old, advantages, mask).loss
    assert torch.equal(kl_penalty(new, old, advantages, mask, kl_coef=0.0).loss, plain)
    log_ratio = (new - old).numpy()
    k3 = float((np.exp(log_ratio) - 1 - log_ratio).mean())
    result = kl_penalty(new, old, advantages, mask, kl_coef=0.7)
    assert result.loss.item() == pytest.approx(plain.item() + 0.7 * k3)
    assert result.metrics["kl_mean"].item() == pytest.approx(k3)
