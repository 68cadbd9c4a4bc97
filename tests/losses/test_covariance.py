"""Clip-Cov and KL-Cov: which tokens are chosen, and what happens to them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tether.losses import clip_cov, kl_cov, unclipped

# Log-probabilities 0, -1, -2, -3 with mean -1.5; advantages 1 and -1 with mean 0.
LOG_PROBS = torch.tensor([[0.0, -3.0, -1.0, -2.0]] * 2, dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0], dtype=torch.float64)
# Covariances: 1.5, -1.5, .5, -.5 and their negatives.


def _gradient(loss: object, **options: object) -> Tensor:
    leaf = LOG_PROBS.clone().requires_grad_()
    result = loss(leaf, LOG_PROBS, ADVANTAGES, torch.ones(2, 4), **options)  # type: ignore[operator]
    return torch.autograd.grad(result.loss, leaf)[0]


def _draw(seed: int, **options: object) -> list[int]:
    """The tokens without a gradient, of eight."""
    generator = torch.Generator().manual_seed(seed)
    gradient = _gradient(clip_cov, generator=generator, clip_cov_ratio=0.125, **options)
    return (gradient.flatten() == 0).nonzero().flatten().tolist()


def test_one_token_of_high_covariance_loses_its_gradient() -> None:
    for seed in range(20):
        (token,) = _draw(seed)
        assert token in (0, 5)  # covariance 1.5: rewarded and likely, or punished and unlikely


def test_every_eligible_token_is_drawn_equally_often() -> None:
    counts = np.bincount([_draw(seed, clip_cov_low=0.4)[0] for seed in range(400)], minlength=8)
    assert counts[[1, 3, 4, 6]].sum() == 0
    # 100 each expected, standard deviation 8.7
    assert bool((np.abs(counts[[0, 2, 5, 7]] - 100) < 35).all()), counts


def test_the_same_generator_state_draws_the_same_tokens_and_leaves_the_global_one_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    assert [_draw(4, clip_cov_low=0.4) for _ in range(3)] == [_draw(4, clip_cov_low=0.4)] * 3
    assert torch.equal(torch.get_rng_state(), before)


def test_the_range_excludes_what_is_above_it() -> None:
    assert _draw(0, clip_cov_low=0.4, clip_cov_high=1.0)[0] in (2, 7)
    assert _draw(0, clip_cov_low=2.0) == []


def test_a_token_that_the_clip_has_dropped_is_not_drawn() -> None:
    new = LOG_PROBS.clone()
    new[0, 0] += 0.5  # pushed beyond 1.2, still of high covariance
    for seed in range(10):
        result = clip_cov(
            new, LOG_PROBS, ADVANTAGES, torch.ones(2, 4), clip_ratio_low=0.2, clip_ratio_high=0.2,
            clip_cov_ratio=0.125, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        # Seven tokens of ratio 1, one clipped at 1.2: 1.2 + 3 - 4, and token 5's -1 taken out.
        assert result.loss.item() == pytest.approx(-(1.2 + 3 - 3) / 8)


def test_the_share_is_of_the_tokens_that_count_rounded_down_but_at_least_one() -> None:
    mask = torch.zeros(2, 4)
    mask[0] = 1
    for loss in (clip_cov, kl_cov):
        name = f"{loss.__name__}_ratio"
        for share, chosen in ((1e-9, 1), (0.49, 1), (0.5, 2), (0.99, 3)):
            options = {name: share} | ({"clip_cov_low": -9.0} if loss is clip_cov else {})
            advantages = torch.tensor([[1.0, -1.0, 0.5, -0.5], [9.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
            result = loss(LOG_PROBS, LOG_PROBS, advantages, mask, **options)
            assert result.metrics["clipped"].item() == chosen / 4


def test_kl_cov_holds_back_the_highest_covariances_earlier_first() -> None:
    leaf = LOG_PROBS.clone().requires_grad_()
    result = kl_cov(leaf, LOG_PROBS - 0.1, ADVANTAGES, torch.ones(2, 4), kl_cov_ratio=0.4, kl_coef=2.0)
    result.loss.backward()
    expected = -math.exp(0.1) * ADVANTAGES[:, None].expand(2, 4).clone()
    expected.flatten()[[0, 2, 5]] += 2.0  # covariances 1.5, .5 (of two, the first), 1.5; sign(log r) = 1
    np.testing.assert_allclose(leaf.grad, expected / 8, rtol=1e-12)
    assert result.loss.item() == pytest.approx(3 * 2 * 0.1 / 8)


def test_the_mean_covariance_is_that_of_numpy() -> None:
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]])
    result = kl_cov(LOG_PROBS, LOG_PROBS, ADVANTAGES, mask)
    kept = mask.numpy() > 0
    advantages = ADVANTAGES[:, None].expand(2, 4).numpy()[kept]
    expected = np.cov(LOG_PROBS.numpy()[kept], advantages, ddof=0)[0, 1]
    assert result.metrics["covariance_mean"].item() == pytest.approx(expected)


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_a_token_that_became_impossible_does_not_choose_for_the_others(loss: object) -> None:
    """Its log-probability is in no mean: with and without it the same tokens are chosen."""
    options: dict[str, float] = {"clip_cov_low": -9.0} if loss is clip_cov else {}
    options[f"{loss.__name__}_ratio"] = 1.0  # type: ignore[attr-defined]
    found = []
    for mask in (torch.ones(2, 4), torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]])):
        new = LOG_PROBS.clone()
        new[1, 3] = -math.inf if bool(mask.all()) else new[1, 3]
        result = loss(new, LOG_PROBS, ADVANTAGES, mask, **options)  # type: ignore[operator]
        found.append([result.metrics[name].item() for name in ("covariance_mean", "clipped")])
    assert found[0] == pytest.approx([found[1][0], found[1][1] * 7 / 8])


def test_without_choice_or_price_both_are_the_plain_loss() -> None:
    new = LOG_PROBS - 0.3
    plain = unclipped(new, LOG_PROBS, ADVANTAGES, torch.ones(2, 4)).loss
    assert torch.equal(kl_cov(new, LOG_PROBS, ADVANTAGES, torch.ones(2, 4), kl_coef=0.0).loss, plain)
    options = {"clip_cov_low": 8.0, "clip_cov_high": 9.0}
    assert torch.equal(clip_cov(new, LOG_PROBS, ADVANTAGES, torch.ones(2, 4), **options).loss, plain)
