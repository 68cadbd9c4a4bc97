"""PPO's clip against a case-by-case loop, and the plain policy gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracles
from tether.errors import InvalidInputError
from tether.losses import LOSSES, ppo_clip, troll, unclipped

METHODS = ("ppo_clip", "troll", "unclipped")


def _tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


_log_probs = st.floats(-6, 0)


@given(
    st.lists(st.tuples(_log_probs, _log_probs, st.floats(-3, 3), st.integers(0, 1)), min_size=1, max_size=8),
    st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.5), (0.3, 0.0)]),
    st.sampled_from([None, 1.5, 3.0, 10.0]),
)
def test_the_clip_equals_a_loop_over_its_cases(
    tokens: list[tuple[float, float, float, int]], clip: tuple[float, float], dual: float | None
) -> None:
    new, old, advantages, mask = (list(column) for column in zip(*tokens, strict=True))
    result = ppo_clip(
        _tensor(new),
        _tensor(old),
        _tensor(advantages),
        torch.tensor([mask]),
        clip_ratio_low=clip[0],
        clip_ratio_high=clip[1],
        dual_clip=dual,
    )
    losses = [
        oracles.ppo_clip_token(p, q, a, *clip, dual) for p, q, a in zip(new, old, advantages, strict=True)
    ]
    expected = oracles.aggregate([losses], [mask], "token-mean")
    assert result.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_clips_gradient_equals_finite_differences_in_all_its_regions() -> None:
    ratios = np.array([[0.5, 0.9, 1.1, 1.5, 9.0], [0.5, 0.9, 1.1, 1.5, 9.0]])
    old = np.full((2, 5), -3.0)
    advantages = _tensor([1.0] * 5, [-1.0] * 5)
    mask = torch.ones(2, 5)
    options: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "dual_clip": 4.0}

    def loss(log_probs: np.ndarray) -> float:
        return ppo_clip(
            torch.from_numpy(log_probs), torch.from_numpy(old), advantages, mask, **options
        ).loss.item()

    point = np.log(ratios) + old
    leaf = torch.from_numpy(point).requires_grad_()
    ppo_clip(leaf, torch.from_numpy(old), advantages, mask, **options).loss.backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad, oracles.central_differences(loss, point), atol=1e-8)
    stopped = leaf.grad == 0
    assert stopped.tolist() == [[False, False, False, True, True], [True, False, False, False, True]]


def test_the_clips_metrics_by_hand() -> None:
    ratio = torch.tensor([[1.5, 0.5, 1.0, 7.0]]).log()
    result = ppo_clip(ratio, torch.zeros(1, 4), torch.tensor([1.0]), torch.tensor([[1, 1, 1, 0]]))
    assert result.metrics["clipped"].item() == pytest.approx(1 / 3)  # .5 with A > 0 is not clipped
    assert result.metrics["ratio_mean"].item() == pytest.approx(1.0)
    assert result.metrics["ratio_max"].item() == pytest.approx(1.5)


def test_a_token_that_the_dual_clip_holds_is_counted_as_clipped() -> None:
    # Held at 3; held at .8; free, though above 1.2, for A < 0; under the mask.
    new = torch.tensor([[50.0, 0.5, 2.0, 50.0]], dtype=torch.float64).log().requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0]])
    result = ppo_clip(new, torch.zeros(1, 4), torch.tensor([-1.0]), mask, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(result.loss, new)
    assert (gradient[0, :3] == 0).tolist() == [True, True, False]
    assert result.metrics["clipped"].item() == pytest.approx(2 / 3)


def test_the_plain_loss_by_hand_and_its_gradient() -> None:
    new, old = _tensor([math.log(0.4), math.log(0.3)]), _tensor([math.log(0.2), math.log(0.6)])
    new.requires_grad_()
    result = unclipped(new, old, torch.tensor([2.0]).double(), torch.ones(1, 2))
    assert result.loss.item() == pytest.approx(-(2.0 * 2 + 0.5 * 2) / 2)
    result.loss.backward()
    np.testing.assert_allclose(new.grad, [[-2.0, -0.5]], rtol=1e-12)  # -r A / 2


def test_an_unbounded_clip_is_the_plain_loss() -> None:
    new, old = torch.randn(3, 4).sub(2), torch.randn(3, 4).sub(2)
    advantages, mask = torch.randn(3, 4), (torch.rand(3, 4) < 0.7)
    clip = ppo_clip(new, old, advantages, mask, clip_ratio_low=math.inf, clip_ratio_high=math.inf)
    assert torch.equal(clip.loss, unclipped(new, old, advantages, mask).loss)


def _call(name: str, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **options: Any) -> Any:
    """Any of the losses; where it needs distributions, with two outcomes made of the sampled token's."""
    if name == "troll":
        options["response_ids"] = torch.zeros(log_probs.shape, dtype=torch.long)
    if name in ("trm", "troll"):
        for side, value in (("new", log_probs), ("old", old)):
            value = value.clamp(-20, -1e-3)
            options[side] = torch.stack((value, (-value.exp()).log1p()), -1)
    return LOSSES[name](log_probs, old, advantages, mask, **options)


@pytest.mark.parametrize("name", METHODS)
def test_advantages_may_be_given_once_a_sequence_or_once_a_token(name: str) -> None:
    new, old = -torch.rand(3, 4).double() - 0.1, -torch.rand(3, 4).double() - 0.1
    mask, advantages = torch.ones(3, 4), torch.randn(3).double()
    once = _call(name, new, old, advantages, mask).loss
    for shaped in (advantages[:, None], advantages[:, None].expand(3, 4)):
        assert torch.equal(_call(name, new, old, shaped, mask).loss, once)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_an_empty_response_mask_gives_zero_loss_and_zero_gradient(name: str, mode: str) -> None:
    new = (-torch.rand(2, 3) - 0.1).requires_grad_()
    old = -torch.rand(2, 3) * 9 - 0.1
    result = _call(name, new, old, torch.ones(2), torch.zeros(2, 3), loss_agg_mode=mode)
    result.loss.backward()
    assert result.loss.item() == 0
    assert new.grad is not None
    assert bool((new.grad == 0).all())
    assert all(math.isfinite(value.item()) for value in result.metrics.values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("garbage", [1e30, -1e30, 80.0])
def test_huge_values_under_the_mask_leak_nowhere(name: str, garbage: float) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]])
    new, old = -torch.rand(2, 4) - 0.1, -torch.rand(2, 4) - 0.1
    outcomes = []
    for dirty in (False, True):
        fill = lambda x, dirty=dirty: torch.where(mask > 0, x, garbage if dirty else -1.0)  # noqa: E731
        leaf = fill(new).requires_grad_()
        result = _call(name, leaf, fill(old * 1.5), fill(torch.full((2, 4), 0.7)), mask)
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        outcomes.append((result.loss, gradient, result.metrics))
    (loss, gradient, metrics), (dirty_loss, dirty_gradient, dirty_metrics) = outcomes
    assert torch.equal(loss, dirty_loss)
    assert torch.equal(gradient, dirty_gradient)
    assert {k: v.item() for k, v in metrics.items()} == {k: v.item() for k, v in dirty_metrics.items()}


@pytest.mark.parametrize("name", METHODS)
def test_losses_and_their_metrics_are_scalars_and_metrics_are_detached(name: str) -> None:
    new = (-torch.rand(2, 3) - 0.1).requires_grad_()
    result = _call(name, new, new.detach() - 0.5, torch.ones(2), torch.ones(2, 3))
    assert result.loss.shape == ()
    assert result.loss.requires_grad
    for value in result.metrics.values():
        assert value.shape == ()
        assert not value.requires_grad


@pytest.mark.parametrize("name", METHODS)
def test_shapes_that_do_not_fit_are_refused_by_name(name: str) -> None:
    rows = -torch.ones(2, 3)
    with pytest.raises(InvalidInputError, match=r"log_probs must be \[B, T\], got \(3,\)"):
        _call(name, rows[0], rows[0], torch.ones(2), rows[0])
    with pytest.raises(InvalidInputError, match=r"response_mask must.*\(2, 3\), got \(2, 4\)"):
        _call(name, rows, rows, torch.ones(2), torch.ones(2, 4))
    with pytest.raises(InvalidInputError, match=r"advantages must.*got \(3,\)|advantages must.*got \(3, 1\)"):
        _call(name, rows, rows, torch.ones(3), torch.ones(2, 3))
    with pytest.raises(InvalidInputError, match=r"advantages must.*got \(2, 2\)"):
        _call(name, rows, rows, torch.ones(2, 2), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_ratio_low": -0.1}, r"clip_ratio_low must be at least 0, got -0\.1 \(0\.2 is usual"),
        ({"clip_ratio_high": math.nan}, r"clip_ratio_high must be at least 0, got nan"),
        ({"dual_clip": 1.0}, r"greater than 1.*got 1\.0"),
    ],
)
def test_clip_ranges_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    rows = torch.zeros(1, 2)
    with pytest.raises(InvalidInputError, match=message):
        ppo_clip(rows, rows, torch.ones(1), torch.ones(1, 2), **options)  # type: ignore[arg-type]


def test_the_dictionary_knows_every_loss_by_its_name() -> None:
    assert {ppo_clip, troll, unclipped} <= set(LOSSES.values())
    assert all(loss.__name__ == name for name, loss in LOSSES.items())


@pytest.mark.parametrize("method", [ppo_clip, unclipped])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_left_float32_has_a_finite_gradient(method, log_ratio, advantage):
    log_probs = torch.tensor([[log_ratio, 0.1]], requires_grad=True)
    old, mask = torch.zeros(1, 2), torch.ones(1, 2)
    result = method(log_probs, old, torch.tensor([advantage]), mask)
    result.loss.backward()
    assert result.loss.isfinite()
    assert log_probs.grad.isfinite().all()
