"""What holds for every rival of TROLL, whatever its rule."""

from __future__ import annotations

import inspect
import math
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses import LOSSES, PolicyLoss, aggregate

#: The rest have tests of their own in test_clipped_and_plain.py and test_troll.py.
RIVALS = sorted(set(LOSSES) - {"ppo_clip", "troll", "unclipped"})
BUT_TROLL = sorted(set(LOSSES) - {"troll"})


def call(name: str, *tokens: Tensor, **options: Any) -> PolicyLoss:
    """A rival; with distributions of two outcomes made of the sampled token's where it needs them."""
    if name == "trm":
        for side, value in zip(("new", "old"), tokens[:2], strict=True):
            value = value.nan_to_num().clamp(-20, -1e-3)
            options.setdefault(side, torch.stack((value, (-value.exp()).log1p()), -1))
    if name == "decoupled_clip":
        options.setdefault("lag", 4)
    if name == "clip_cov":
        options.setdefault("generator", torch.Generator().manual_seed(0))
    return LOSSES[name](*tokens, **options)


def _tokens(*shape: int) -> tuple[Tensor, Tensor]:
    old = -torch.rand(*shape).double() * 3 - 0.1
    return (old + 0.3 * torch.randn(*shape).double()).clamp_max(-0.01), old


@pytest.mark.parametrize("name", RIVALS)
def test_advantages_may_be_given_once_a_sequence_or_once_a_token(name: str) -> None:
    new, old = _tokens(3, 4)
    mask, advantages = torch.ones(3, 4), torch.randn(3).double()
    once = call(name, new, old, advantages, mask).loss
    for shaped in (advantages[:, None], advantages[:, None].expand(3, 4)):
        assert torch.equal(call(name, new, old, shaped, mask).loss, once)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_an_empty_response_mask_gives_zero_loss_and_zero_gradient(name: str, mode: str) -> None:
    new, old = _tokens(2, 3)
    leaf = new.requires_grad_()
    result = call(name, leaf, old, torch.ones(2), torch.zeros(2, 3), loss_agg_mode=mode)
    result.loss.backward()
    assert result.loss.item() == 0
    assert leaf.grad is not None
    assert bool((leaf.grad == 0).all())
    assert all(math.isfinite(value.item()) for value in result.metrics.values())


@pytest.mark.parametrize("name", BUT_TROLL)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_a_batch_without_tokens_gives_zero(name: str, shape: tuple[int, int]) -> None:
    leaf = torch.zeros(shape, requires_grad=True)
    result = call(name, leaf, torch.zeros(shape), torch.ones(shape[0]), torch.ones(shape))
    result.loss.backward()
    assert result.loss.item() == 0
    assert leaf.grad is not None
    assert all(math.isfinite(value.item()) for value in result.metrics.values())


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("garbage", [1e30, -1e30, math.nan, math.inf, -math.inf])
def test_garbage_under_the_mask_leaks_nowhere(name: str, garbage: float) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]])
    new, old = _tokens(2, 4)
    outcomes = []
    for fill in (-1.0, garbage):
        leaf, before, advantages = (
            torch.where(mask > 0, values, fill)
            for values in (new, old, torch.full((2, 4), 0.7, dtype=torch.float64))
        )
        result = call(name, leaf.requires_grad_(), before, advantages, mask)
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        outcomes.append((result.loss.item(), gradient, {k: v.item() for k, v in result.metrics.items()}))
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert outcomes[0][2] == outcomes[1][2]


@pytest.mark.parametrize("name", RIVALS)
def test_half_precision_is_computed_in_float32(name: str) -> None:
    new, old = (values.bfloat16() for values in _tokens(3, 5))
    advantages, mask = torch.tensor([1.0, -0.5, 0.3]).bfloat16(), torch.ones(3, 5)
    leaf = new.clone().requires_grad_()
    half = call(name, leaf, old, advantages, mask)
    single = call(name, new.float(), old.float(), advantages.float(), mask)
    assert half.loss.dtype == torch.float32
    assert half.loss.item() == pytest.approx(single.loss.item(), rel=1e-6)
    half.loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16


#: The gradient at new = old, relative to the plain policy gradient's.
_SCALE_ON_FRESH_DATA = {"pspo": 0.9}


@pytest.mark.parametrize("name", RIVALS)
def test_on_fresh_data_every_method_is_the_plain_policy_gradient(name: str) -> None:
    _, old = _tokens(4, 5)
    mask = torch.ones(4, 5)
    mask[1, 3:], mask[3, 0] = 0, 0
    advantages = torch.tensor([0.5, -0.4, 0.3, -0.2], dtype=torch.float64)
    leaf = old.clone().requires_grad_()
    mode = LOSSES[name].__kwdefaults__["loss_agg_mode"]
    (gradient,) = torch.autograd.grad(call(name, leaf, old, advantages, mask).loss, leaf)
    plain = old.clone().requires_grad_()
    objective = aggregate(-advantages[:, None] * plain, mask, mode)
    (expected,) = torch.autograd.grad(objective, plain)
    expected = expected * _SCALE_ON_FRESH_DATA.get(name, 1.0)
    # No covariance reaches 1 here, so clip_cov takes nothing out.
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("drift", [-200.0, 95.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_beyond_float32_makes_nothing_nan(name: str, drift: float, dtype: torch.dtype) -> None:
    old = torch.full((2, 3), -201.0 if drift > 0 else -0.5, dtype=dtype)
    new = old.clone()
    new[:, 1] += drift
    leaf = new.requires_grad_()
    result = call(name, leaf, old, torch.tensor([1.0, -1.0]), torch.ones(2, 3))
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert math.isfinite(result.loss.item())
    assert bool(gradient.isfinite().all())
    assert all(math.isfinite(value.item()) for value in result.metrics.values())


# An infinite divergence has an infinite price.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in sorted(set(BUT_TROLL) - {"kl_penalty"})),
        ("cispo", {"clip_ratio_low": 0.2}),
        ("ipo", {"kl_coef": 1e-3}),
        ("kl_cov", {"kl_cov_ratio": 1.0}),
    ],
)
@pytest.mark.parametrize("advantages", [[1.0, 1.0], [-1.0, -1.0], [1.0, -0.5]])
def test_a_token_that_became_impossible_makes_nothing_nan(
    name: str, options: dict[str, Any], advantages: list[float]
) -> None:
    """Its ratio is 0, and it has no gradient; those of the other tokens are finite."""
    leaf = torch.tensor([[-0.5, -math.inf, -0.7], [-0.5, -0.6, -0.7]], requires_grad=True)
    old = torch.tensor([[-0.6, -9.0, -0.6], [-0.6, -0.5, -0.6]])
    result = call(name, leaf, old, torch.tensor(advantages), torch.ones(2, 3), **options)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert math.isfinite(result.loss.item())
    assert bool(gradient.isfinite().all())
    assert gradient[0, 1] == 0
    assert all(math.isfinite(result.metrics[key].item()) for key in ("ratio_mean", "ratio_max"))


@pytest.mark.parametrize("name", RIVALS)
def test_the_old_policy_and_the_advantages_get_no_gradient(name: str) -> None:
    new, old = _tokens(2, 3)
    leaf, before, advantages = (
        x.requires_grad_() for x in (new, old, torch.tensor([1.0, -1.0], dtype=torch.float64))
    )
    call(name, leaf, before, advantages, torch.ones(2, 3)).loss.backward()
    assert leaf.grad is not None
    assert before.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize("name", RIVALS)
def test_masks_of_any_type_mean_the_same(name: str) -> None:
    new, old = _tokens(3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0]])
    results = [
        call(name, new, old, torch.tensor([1.0, -1.0, 0.5]), typed)
        for typed in (mask, mask.bool(), mask.float(), mask.double())
    ]
    assert len({result.loss.item() for result in results}) == 1
    assert len({tuple(v.item() for v in result.metrics.values()) for result in results}) == 1


@pytest.mark.parametrize("name", RIVALS)
def test_a_mask_in_half_precision_counts_every_token(name: str) -> None:
    new, old = _tokens(2, 301)  # which bfloat16 would round to 300
    mask = torch.ones(2, 301)
    losses = [
        call(name, new, old, torch.tensor([1.0, -0.5]), typed).loss for typed in (mask, mask.bfloat16())
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", RIVALS)
def test_loss_and_metrics_are_scalars_and_metrics_are_detached(name: str) -> None:
    new, old = _tokens(2, 3)
    result = call(name, new.requires_grad_(), old, torch.ones(2), torch.ones(2, 3))
    assert result.loss.shape == ()
    assert result.loss.requires_grad
    assert {"ratio_mean", "ratio_max"} <= set(result.metrics)
    for value in result.metrics.values():
        assert value.shape == ()
        assert not value.requires_grad


@pytest.mark.parametrize("name", RIVALS)
def test_shapes_that_do_not_fit_are_refused_by_name(name: str) -> None:
    rows = -torch.ones(2, 3)
    with pytest.raises(InvalidInputError, match=r"response_mask must.*\(2, 3\), got \(2, 4\)"):
        call(name, rows, rows, torch.ones(2), torch.ones(2, 4))
    with pytest.raises(InvalidInputError, match=r"advantages must.*got \(2, 2\)"):
        call(name, rows, rows, torch.ones(2, 2), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gspo", {"clip_ratio_low": -1e-4}, r"clip_ratio_low must be at least 0, got -0\.0001 \(3e-4"),
        ("gspo", {"clip_ratio_high": math.nan}, r"clip_ratio_high.*got nan"),
        ("cispo", {"clip_ratio_low": -0.1}, r"clip_ratio_low.*got -0\.1.*None for no lower bound"),
        ("cispo", {"clip_ratio_high": "5"}, r"clip_ratio_high.*got '5'"),
        ("sapo", {"tau_pos": 0.0}, r"tau_pos must be greater than 0, got 0\.0"),
        ("sapo", {"tau_neg": -1.0}, r"tau_neg must be greater than 0, got -1\.0"),
        ("gmpo", {"clip_ratio_low": -0.4}, r"clip_ratio_low must be at least 0"),
        ("dppo", {"divergence": "tv"}, r"one of binary-tv, binary-kl, top-k-tv, top-k-kl, got 'tv'"),
        ("dppo", {"divergence_low": -0.1}, r"divergence_low.*got -0\.1 \(0\.15 is usual for binary-tv"),
        ("dppo", {"ratio_cap": 0.0}, r"ratio_cap must be greater than 0"),
        ("dppo", {"divergence": "top-k-kl"}, r"new and old must be given"),
        ("dppo", {"new": torch.zeros(2, 3, 4)}, r"sampled tokens alone.*Leave them out"),
        ("trm", {"kl_bound": -1.0}, r"kl_bound must be at least 0"),
        ("trm", {"new": None}, r"^new must be given"),
        ("trm", {"kl_estimate": "k4"}, r"kl_estimate must be one of exact, k2, k3, got 'k4'"),
        ("trm", {"kl_estimate": "k1"}, r"kl_estimate must be one of exact, k2, k3, got 'k1'"),
        ("kl_penalty", {"kl_estimate": "k4"}, r"kl_estimate must be one of exact, k1, k2, k3, got 'k4'"),
        ("trm", {"new": torch.zeros(2, 4, 2)}, r"\[B, T\] = \(2, 3\), got \(2, 4, 2\)"),
        ("clip_cov", {"clip_cov_ratio": 0.0}, r"clip_cov_ratio must lie in \(0, 1\], got 0\.0"),
        ("clip_cov", {"clip_cov_low": 5.0}, r"clip_cov_high must be greater than 5, got 5\.0 \(1 and 5"),
        ("clip_cov", {"clip_ratio_low": -1.0}, r"clip_ratio_low must be at least 0"),
        ("kl_cov", {"kl_cov_ratio": 1.5}, r"kl_cov_ratio must lie in \(0, 1\], got 1\.5"),
        ("kl_cov", {"kl_coef": -1.0}, r"kl_coef must be at least 0"),
        ("vespo", {"k_neg": 0.0}, r"k_neg must be greater than 0, got 0\.0 \(3 in the paper"),
        ("vespo", {"lambda_pos": math.nan}, r"lambda_pos.*got nan"),
        ("pspo", {"smoothing": 1.0}, r"smoothing must lie in \[0, 1\), got 1\.0"),
        ("kl_penalty", {"kl_coef": True}, r"kl_coef.*got True"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    rows = -torch.ones(2, 3)
    with pytest.raises(InvalidInputError, match=message):
        call(name, rows, rows, torch.ones(2), torch.ones(2, 3), **options)


def _numbers(name: str) -> dict[str, Any]:
    """The options of a loss that may be numbers, and their defaults."""
    parameters = inspect.signature(LOSSES[name]).parameters
    return {
        option: parameters[option].default
        for option, hint in get_type_hints(LOSSES[name]).items()
        if option in parameters and float in (hint, *get_args(hint))
    }


@pytest.mark.parametrize("value", ["0.2", math.nan], ids=["text", "nan"])
@pytest.mark.parametrize(("name", "option"), [(name, key) for name in BUT_TROLL for key in _numbers(name)])
def test_every_number_is_checked_and_named(name: str, option: str, value: object) -> None:
    rows = -torch.ones(2, 3)
    with pytest.raises(InvalidInputError, match=rf"^{option}.*got {value!r}"):
        call(name, rows, rows, torch.ones(2), torch.ones(2, 3), **{option: value})


@pytest.mark.parametrize("name", [name for name in BUT_TROLL if any(_numbers(name).values())])
def test_numbers_may_be_numpys(name: str) -> None:
    new, old = _tokens(2, 3)
    numbers = {key: value for key, value in _numbers(name).items() if value is not None}
    plain, numpys = (
        call(name, new, old, torch.tensor([1.0, -1.0]), torch.ones(2, 3), **options)
        for options in (numbers, {key: np.float64(value) for key, value in numbers.items()})
    )
    assert torch.equal(plain.loss, numpys.loss)
    single = {key: np.float32(value) for key, value in numbers.items()}
    assert math.isfinite(call(name, new, old, torch.ones(2), torch.ones(2, 3), **single).loss.item())
