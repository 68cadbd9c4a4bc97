"""PSPO: what smoothing does, and what it does not."""

from __future__ import annotations

import pytest
import torch

from tether.losses import pspo, unclipped


def test_loss_by_hand() -> None:
    new, old = (
        torch.tensor([[0.6, 0.1]], dtype=torch.float64).log(),
        torch.tensor([[0.3, 0.2]], dtype=torch.float64).log(),
    )
    result = pspo(new, old, torch.tensor([2.0], dtype=torch.float64), torch.ones(1, 2), smoothing=0.25)
    # Smoothed probabilities .525 and .125, ratios 1.75 and .625
    assert result.loss.item() == pytest.approx(-2 * (1.75 + 0.625) / 2)
    assert result.metrics["ratio_max"].item() == pytest.approx(1.75)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_gradient_is_the_plain_one_scaled_so_no_token_is_held_back(smoothing: float) -> None:
    old = -torch.rand(3, 4).double() * 3
    new = old + torch.randn(3, 4).double()
    advantages, mask = torch.randn(3).double(), torch.ones(3, 4)
    gradients = []
    for loss, options in ((pspo, {"smoothing": smoothing}), (unclipped, {})):
        leaf = new.clone().requires_grad_()
        gradients.append(torch.autograd.grad(loss(leaf, old, advantages, mask, **options).loss, leaf)[0])
    torch.testing.assert_close(gradients[0], (1 - smoothing) * gradients[1], rtol=1e-12, atol=0)
