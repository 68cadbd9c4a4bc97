"""Advantage estimators against plain loops and hand numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tether.advantages import (
    ADVANTAGES,
    dr_grpo,
    gae,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    whiten,
)
from tether.errors import InvalidInputError

GROUPED = [grpo, dr_grpo, rloo]
REWARDS = torch.tensor([1.0, 5.0, 2.0, 5.5, 6.0], dtype=torch.float64)
GROUPS = torch.tensor([4, -1, 4, -1, 4])


def test_groups_by_hand() -> None:
    # Group 4: 1, 2, 6 with mean 3 and unbiased deviation sqrt(7); group -1: 5, 5.5.
    np.testing.assert_allclose(dr_grpo(REWARDS, GROUPS), [-2, -0.25, -1, 0.25, 3])
    np.testing.assert_allclose(rloo(REWARDS, GROUPS), [1 - 4, 5 - 5.5, 2 - 3.5, 5.5 - 5, 6 - 1.5])
    deviations = np.array([math.sqrt(7), math.sqrt(0.125)])[[0, 1, 0, 1, 0]]
    expected = np.array([-2, -0.25, -1, 0.25, 3]) / deviations
    np.testing.assert_allclose(grpo(REWARDS, GROUPS, epsilon=0.0), expected)
    expected = np.array([-2, -0.25, -1, 0.25, 3]) / (deviations + 0.1)
    np.testing.assert_allclose(grpo(REWARDS, GROUPS, epsilon=0.1), expected)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_rloo_compares_each_response_with_the_mean_of_the_others(
    responses: list[tuple[int, float]], random: object
) -> None:
    pairs = responses + [(group, reward / 2 + 1) for group, reward in responses]  # at least two a group
    random.shuffle(pairs)  # type: ignore[attr-defined]
    expected = []
    for i, (group, reward) in enumerate(pairs):
        others = [r for j, (g, r) in enumerate(pairs) if g == group and j != i]
        expected.append(reward - sum(others) / len(others))
    groups, rewards = zip(*pairs, strict=True)
    ours = rloo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    np.testing.assert_allclose(ours, expected, atol=1e-12)


@pytest.mark.parametrize("estimator", GROUPED)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7e5])
def test_equal_rewards_give_exact_zeros_in_float32(
    estimator: Callable[[Tensor, Tensor], Tensor], reward: float
) -> None:
    """The mean of seven times .1 is not .1, and a division by a tiny epsilon would make that an advantage."""
    rewards = torch.full((7,), reward)
    assert estimator(rewards, torch.zeros(7, dtype=torch.long)).tolist() == [0.0] * 7


def test_without_an_epsilon_equal_rewards_are_zeros_and_not_nan() -> None:
    advantages = grpo(torch.tensor([2.0, 2.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), epsilon=0.0)
    torch.testing.assert_close(advantages, torch.tensor([0.0, 0.0, -(0.5**0.5), 0.5**0.5]))


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_response_that_nothing_compares_with_is_refused(
    estimator: Callable[[Tensor, Tensor], Tensor],
) -> None:
    with pytest.raises(InvalidInputError, match=r"at least 2 responses.*group 3 has 1.*reinforce_plus_plus"):
        estimator(torch.ones(3), torch.tensor([2, 3, 2]))


@pytest.mark.parametrize("estimator", GROUPED)
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(
    estimator: Callable[[Tensor, Tensor], Tensor], reward: float
) -> None:
    with pytest.raises(InvalidInputError, match=f"rewards must be finite, got {reward} for response 2"):
        estimator(torch.tensor([1.0, 0.0, reward, 1.0]), torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("estimator", GROUPED)
def test_shapes_and_types_that_do_not_fit_are_refused(estimator: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(InvalidInputError, match=r"both be \[B\], got \(2, 3\) and \(2,\)"):
        estimator(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(InvalidInputError, match=r"integers, got torch\.float32"):
        estimator(torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize("estimator", GROUPED)
def test_an_empty_batch_and_half_precision(estimator: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert estimator(torch.ones(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
    half = estimator(REWARDS.bfloat16(), GROUPS)  # these rewards are exact in bfloat16
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, estimator(REWARDS.float(), GROUPS))


def test_the_baseline_variant_removes_each_prompts_mean_and_scales_all_alike() -> None:
    mask = torch.ones(5, 3)
    mask[0, 1:] = 0
    result = reinforce_plus_plus_baseline(REWARDS, GROUPS, mask).numpy()
    centred = np.array([-2, -0.25, -1, 0.25, 3])
    tokens = np.repeat(centred, [1, 3, 3, 3, 3])
    expected = (centred - tokens.mean()) / tokens.std(ddof=1)
    np.testing.assert_allclose(result[:, 0], expected, rtol=1e-7)
    assert result[0, 1:].tolist() == [0, 0]
    with pytest.raises(InvalidInputError, match=r"\[B, T\] with B = 5, got \(4, 3\)"):
        reinforce_plus_plus_baseline(REWARDS, GROUPS, mask[:4])


def test_rewards_to_go_pass_over_what_is_masked() -> None:
    rewards = torch.tensor([[1.0, 9.0, 2.0, 4.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    ours = reinforce_plus_plus(rewards, mask, gamma=0.5).numpy()
    # To go: 4; 2 + 2 = 4; 1 + 2 = 3, the masked token neither adds nor discounts; and two zeros.
    to_go = np.array([3.0, 4.0, 4.0, 0.0, 0.0])
    expected = (to_go - to_go.mean()) / to_go.std(ddof=1)
    np.testing.assert_allclose(ours[mask.numpy() > 0], expected, rtol=1e-7)
    assert ours[0, 1] == 0


_token = st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.booleans())


@given(
    st.lists(_token, min_size=1, max_size=8),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.floats(-2, 2),
)
def test_gae_is_the_papers_sum_over_the_tokens_that_count(
    tokens: list[tuple[float, float, bool]], gamma: float, gae_lambda: float, last: float
) -> None:
    rewards, values, mask = zip(*tokens, strict=True)
    advantages, returns = gae(
        torch.tensor([rewards], dtype=torch.float64), torch.tensor([values], dtype=torch.float64),
        torch.tensor([mask]), gamma=gamma, gae_lambda=gae_lambda,
        last_values=torch.tensor([last], dtype=torch.float64),
    )  # fmt: skip
    kept = [(r, v) for r, v, counts in tokens if counts]
    following = [v for _, v in kept[1:]] + [last]
    errors = [r + gamma * after - v for (r, v), after in zip(kept, following, strict=True)] if kept else []
    expected = [
        sum((gamma * gae_lambda) ** k * error for k, error in enumerate(errors[t:]))
        for t in range(len(errors))
    ]
    counted = np.array([counts for *_, counts in tokens])
    np.testing.assert_allclose(advantages[0].numpy()[counted], expected, atol=1e-12)
    np.testing.assert_allclose(
        returns[0].numpy()[counted], np.array(expected) + [v for _, v in kept], atol=1e-12
    )
    assert not advantages[0].numpy()[~counted].any()
    assert not returns[0].numpy()[~counted].any()


def test_lambda_one_is_monte_carlo_whatever_the_critic_says() -> None:
    rewards = torch.tensor([[0.5, 0.0, 2.0]], dtype=torch.float64)
    for values in (torch.zeros(1, 3), torch.randn(1, 3)):
        _, returns = gae(rewards, values.double(), torch.ones(1, 3), gamma=0.5)
        np.testing.assert_allclose(returns, [[1.0, 1.0, 2.0]], atol=1e-12)


def test_a_response_cut_off_goes_on_from_the_critics_last_value() -> None:
    zeros = torch.zeros(2, 2)
    advantages, _ = gae(zeros, zeros, torch.ones(2, 2), gamma=0.5, last_values=torch.tensor([8.0, 0.0]))
    assert advantages.tolist() == [[2.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_garbage_under_the_mask_leaks_nowhere(garbage: float) -> None:
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0]])
    values, rewards = torch.randn(2, 4), torch.randn(2, 4)
    outcomes = []
    for fill in (0.0, garbage):
        v, r = (torch.where(mask > 0, x, fill) for x in (values, rewards))
        outcomes.append(
            (*gae(r, v, mask, gamma=0.9, gae_lambda=0.8), reinforce_plus_plus(r, mask), whiten(v, mask))
        )
    for clean, dirty in zip(*outcomes, strict=True):
        assert torch.equal(clean, dirty)


def test_whitened_values_have_no_mean_and_unit_variance_over_the_mask() -> None:
    values, mask = torch.randn(4, 6).double() * 5 + 3, torch.rand(4, 6) < 0.6
    whitened = whiten(values, mask).numpy()
    kept = whitened[mask.numpy()]
    assert kept.mean() == pytest.approx(0, abs=1e-12)
    assert kept.std(ddof=1) == pytest.approx(1, abs=1e-9)
    assert not whitened[~mask.numpy()].any()


@pytest.mark.parametrize("reward", [0.1, 10.1, 1000.1])
def test_equal_values_whiten_to_exact_zeros(reward: float) -> None:
    mask = torch.ones(7, 33)
    mask[2, 5:] = 0
    assert not whiten(torch.full((7, 33), reward), mask).any()


def test_a_batch_without_tokens_has_no_advantages() -> None:
    advantages, returns = gae(torch.ones(2, 0), torch.ones(2, 0), torch.ones(2, 0))
    assert advantages.shape == returns.shape == (2, 0)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_tokens_have_no_spread_and_whiten_to_zero(count: int) -> None:
    mask = torch.zeros(2, 3)
    mask[0, :count] = 1
    assert not whiten(torch.randn(2, 3), mask).any()


def test_no_gradient_comes_out_of_an_estimator() -> None:
    values = torch.randn(2, 3).requires_grad_()
    advantages, returns = gae(torch.ones(2, 3), values, torch.ones(2, 3))
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert not grpo(torch.randn(4).requires_grad_(), torch.tensor([0, 0, 1, 1])).requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: gae(x, x, m, gamma=1.5), r"gamma must lie in \[0, 1\], got 1\.5"),
        (lambda x, m: gae(x, x, m, gae_lambda=-0.1), r"gae_lambda must lie in \[0, 1\], got -0\.1"),
        (lambda x, m: gae(x, x[:1], m), r"values and response_mask.*got \(1, 3\) and \(2, 3\)"),
        (
            lambda x, m: gae(x, x, m, last_values=torch.ones(3)),
            r"last_values must be \[B\] = \(2,\), got \(3,\)",
        ),
        (lambda x, m: reinforce_plus_plus(x, m, gamma=math.nan), r"gamma.*got nan"),
        (lambda x, m: grpo(x[0], torch.zeros(3, dtype=torch.long), epsilon=-1.0), r"epsilon.*got -1\.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    call: Callable[[Tensor, Tensor], object], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call(torch.ones(2, 3), torch.ones(2, 3))


def test_the_dictionary_knows_every_estimator_by_its_name() -> None:
    assert all(estimator.__name__ == name for name, estimator in ADVANTAGES.items())


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_of_one_token_that_is_no_number_is_refused(reward: float) -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, reward]]), torch.ones(2, 2)
    with pytest.raises(InvalidInputError, match=rf"token_rewards at \[1, 1\] is {reward}, which would spoil"):
        reinforce_plus_plus(rewards, mask)
    with pytest.raises(InvalidInputError, match=rf"values at \[1, 1\] is {reward}"):
        whiten(rewards, mask)
    hidden = torch.tensor([[1, 1], [1, 0]])
    assert reinforce_plus_plus(rewards, hidden).isfinite().all()
