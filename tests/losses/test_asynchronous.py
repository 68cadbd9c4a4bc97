"""What the losses for stale samplers do that their equations do not show at a glance."""

from __future__ import annotations

import math

import equations
import numpy as np
import pytest
import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses import cppo, decoupled_clip, drpo, icepop, ipo, m2po, mis, ppo_clip, tis


def _log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def _gradient(loss, new: Tensor, old: Tensor, advantage: float, **options: object) -> Tensor:  # type: ignore[no-untyped-def]
    leaf = new.clone().requires_grad_()
    advantages = torch.full((len(new),), advantage, dtype=torch.float64)
    return torch.autograd.grad(loss(leaf, old, advantages, torch.ones_like(new), **options).loss, leaf)[0]


def test_m2po_leaves_out_the_fewest_tokens_and_none_that_moves_back() -> None:
    old, new = _log(0.2, 0.2, 0.2, 0.2), _log(0.8, 0.3, 0.21, 0.01)
    gradient = _gradient(m2po, new, old, 1.0)
    # (log 4)^2 = 1.92 and then (log 1.5)^2 = .164 spoil the mean of .04; (log 1.05)^2 does not; the last
    # token fell although A > 0, so the update brings it back.
    assert (gradient != 0).tolist() == [[False, False, True, True]]
    kept = _gradient(m2po, new, old, 1.0, second_moment=0.09)
    assert (kept != 0).tolist() == [[False, True, True, True]]


def test_m2po_leaves_out_the_later_of_equals() -> None:
    old = torch.full((1, 4), -4.0, dtype=torch.float64)
    new = old + torch.tensor([[3.0, 1.0, 3.0, 3.0]], dtype=torch.float64).sqrt()
    kept = _gradient(m2po, new, old, 1.0, second_moment=2.0) != 0
    assert kept.tolist() == [[True, True, False, False]]  # the mean of 1 and 3 is 2
    term = equations.m2po_term(new.numpy(), old.numpy(), np.ones((1, 4)), np.ones((1, 4)), second_moment=2.0)
    assert [term(0, t)[1] != 0 for t in range(4)] == kept[0].tolist()


def test_m2po_shares_one_budget_between_the_responses_of_a_batch() -> None:
    old = torch.full((2, 2), 0.2, dtype=torch.float64).log()
    new = torch.tensor([[0.2001, 0.2001], [0.2001, 0.28]], dtype=torch.float64).log()
    # (log 1.4)^2 = .113 is too much alone, and a quarter of it is not.
    assert bool((_gradient(m2po, new, old, 1.0) != 0).all())
    assert bool((_gradient(m2po, new[1:], old[1:], 1.0)[0, 1] == 0).item())


def test_cppo_counts_positions_among_the_tokens_of_the_mask() -> None:
    old, new = _log(0.5, 0.9, 0.5, 0.1, 0.5), _log(0.6, 0.1, 0.62, 0.9, 0.55)
    mask = torch.tensor([[1, 0, 1, 0, 1]])
    with_gaps = cppo(new, old, torch.ones(1), mask).metrics["clipped"]
    kept = mask[0] > 0
    without = cppo(new[:, kept], old[:, kept], torch.ones(1), torch.ones(1, 3)).metrics["clipped"]
    assert with_gaps == without > 0


def test_drpo_turns_the_gradient_around_beyond_the_bound() -> None:
    old = _log(0.3, 0.3, 0.3)
    gradient = _gradient(drpo, _log(0.4, 0.5, 0.6), old, 1.0, probability_bound=0.2)[0]
    assert gradient[0] < 0 < gradient[2]  # still pushed up, pulled back down
    assert gradient[1].abs() < 1e-12


def test_ipo_drops_on_both_sides_whatever_the_advantage() -> None:
    old, new = _log(0.5, 0.5, 0.01), _log(0.9, 0.1, 0.2)
    for advantage in (1.0, -1.0):
        assert (_gradient(ipo, new, old, advantage) != 0).tolist() == [[False, False, True]]


def test_icepop_drops_where_tis_caps() -> None:
    old, new = _log(0.1, 0.5), _log(0.9, 0.5)
    assert _gradient(icepop, new, old, 1.0)[0].tolist() == pytest.approx([0.0, -0.5])
    assert _gradient(tis, new, old, 1.0)[0].tolist() == pytest.approx([-1.0, -0.5])


def test_mis_does_not_let_a_long_response_off_for_its_length() -> None:
    old = torch.full((1, 50), 0.5, dtype=torch.float64).log()
    new = torch.full((1, 50), 0.51, dtype=torch.float64).log()  # 1.02 a token, 2.69 together
    assert mis(new, old, torch.ones(1), torch.ones(1, 50), level="sequence").metrics["clipped"] == 1
    assert mis(new, old, torch.ones(1), torch.ones(1, 50), ratio_high=1.03).metrics["clipped"] == 0


@pytest.mark.parametrize("lag", [0, 1, torch.tensor([1.0, 0.0]), torch.ones(2, 3)])
def test_decoupled_clip_of_fresh_data_is_the_clip(lag: Tensor | float) -> None:
    old = -torch.rand(2, 3).double() - 0.1
    new = (old + 0.4 * torch.randn(2, 3).double()).clamp_max(-0.01)
    assert torch.equal(
        _gradient(decoupled_clip, new, old, -0.7, lag=lag), _gradient(ppo_clip, new, old, -0.7)
    )


def test_decoupled_clip_ignores_the_lag_of_what_is_masked() -> None:
    old, new = _log(0.2, 0.4, 0.3), _log(0.5, 0.3, 0.2)
    mask, lags = torch.tensor([[1, 1, 0]]), torch.tensor([[2.0, 4.0, 0.0]])
    gradients = []
    for lag in (lags, torch.where(mask > 0, lags, math.nan)):
        leaf = new.clone().requires_grad_()
        loss = decoupled_clip(leaf, old, torch.ones(1), mask, lag=lag).loss
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("given", ["lag 1", "lag 4", "policy"])
def test_decoupled_clip_of_a_token_that_became_impossible_has_the_ratio_zero(given: str) -> None:
    old, new = _log(0.2, 0.4), _log(0.0, 0.3)
    options = {"proximal_log_probs": new} if given == "policy" else {"lag": int(given[-1])}
    result = decoupled_clip(new, old, torch.ones(1), torch.ones(1, 2), **options)  # type: ignore[arg-type]
    alone = decoupled_clip(new, old, torch.ones(1), torch.tensor([[0, 1]]), **options)  # type: ignore[arg-type]
    assert result.loss.item() == pytest.approx(alone.loss.item() / 2)
    assert result.metrics["ratio_mean"].item() == pytest.approx(alone.metrics["ratio_mean"].item() / 2)


def test_decoupled_clip_takes_the_proximal_policy_itself() -> None:
    old, new = _log(0.2, 0.4), _log(0.5, 0.3)
    proximal = (old + new) / 2
    assert torch.allclose(
        _gradient(decoupled_clip, new, old, 1.0, proximal_log_probs=proximal),
        _gradient(decoupled_clip, new, old, 1.0, lag=2),
        rtol=1e-12,
    )


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        (m2po, {"second_moment": -0.1}, "second_moment must be at least 0"),
        (cppo, {"last_weight": 0.0}, r"last_weight must lie in \(0, 1\]"),
        (cppo, {"budget_growth": 0.5}, "budget_growth must be at least 1"),
        (drpo, {"probability_bound": 0.0}, "greater than 0"),
        (ipo, {"ratio_cap": math.nan}, "ratio_cap must be greater than 0"),
        (icepop, {"ratio_low": 3.0, "ratio_high": 2.0}, "ratio_high must be at least 3"),
        (mis, {"level": "token"}, "level must be one of sequence, geometric"),
        (tis, {"level": "geometric"}, "level must be one of token, sequence"),
        (decoupled_clip, {}, "needs lag"),
        (decoupled_clip, {"lag": -1}, "lag must be at least 0, got -1 "),
        (decoupled_clip, {"lag": torch.tensor([math.nan])}, "lag must be at least 0, got nan "),
        (decoupled_clip, {"lag": torch.ones(3)}, r"lag must be one number, \[B\] or \[B, T\].*got \(3,\)"),
        (decoupled_clip, {"proximal_log_probs": torch.zeros(1, 3)}, "proximal_log_probs must be"),
    ],
)
def test_settings_without_meaning_are_refused(loss, options: dict[str, object], words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInputError, match=words):
        loss(_log(0.5, 0.5), _log(0.5, 0.5), torch.ones(1), torch.ones(1, 2), **options)


def test_a_token_that_a_sampler_gave_no_probability_spoils_no_batch() -> None:
    """An engine may round it to 0: as with the clip, its ratio is the largest there is."""
    old, new = torch.tensor([[-math.inf, -1.0]]), torch.tensor([[-3.0, -1.1]], requires_grad=True)
    for proximal in ({"lag": 4}, {"proximal_log_probs": torch.tensor([[-3.1, -1.0]])}):
        loss = decoupled_clip(new, old, torch.ones(1), torch.ones(1, 2), **proximal).loss
        (gradient,) = torch.autograd.grad(loss, new)
        assert loss.isfinite()
        assert gradient.isfinite().all()
