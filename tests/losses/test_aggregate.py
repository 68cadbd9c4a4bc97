"""From token losses to one number, by hand and against plain loops."""

from __future__ import annotations

import math

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl_reference import trl_loss

import oracles
from tether.errors import InvalidInputError
from tether.losses import aggregate, ppo_clip
from tether.losses.aggregate import LossAggMode
from tether.projection.tokens import masked_max, masked_mean

LOSS = [[1.0, 3.0, 100.0], [5.0, 100.0, 100.0], [100.0, 100.0, 100.0]]
MASK = [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("mode", "length", "expected"),
    [
        ("token-mean", None, (1 + 3 + 5) / 3),
        ("seq-mean-token-mean", None, (2 + 5 + 0) / 3),
        ("seq-mean-token-sum", None, (4 + 5 + 0) / 3),
        ("seq-mean-token-sum-norm", None, (4 + 5 + 0) / (3 * 3)),
        ("seq-mean-token-sum-norm", 50, (4 + 5 + 0) / (3 * 50)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_each_mode_by_hand(mode: str, length: int | None, expected: float, dtype: torch.dtype) -> None:
    value = aggregate(
        torch.tensor(LOSS),
        torch.tensor(MASK).to(dtype),
        mode,  # type: ignore[arg-type]
        max_response_length=length,
    )
    assert value.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_response_without_a_token_counts_as_in_verls_trainers_not_as_in_its_function_alone(
    mode: LossAggMode,
) -> None:
    verls = references.fixtures()["averages"]
    loss = torch.tensor(verls["token_loss"], dtype=torch.float64)
    ours = aggregate(loss, torch.tensor(verls["response_mask"]), mode).item()
    theirs = verls["modes"][mode]
    within = 2e-8  # verl divides a response by its tokens + 1e-8
    assert ours == pytest.approx(theirs["global_batch_size=3"], rel=within)
    share = 1 if mode == "token-mean" else 2 / 3  # two of the three have a token
    assert ours == pytest.approx(theirs["alone"] * share, rel=within)


@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [
        ("bnpo", "token-mean"),
        ("dapo", "token-mean"),
        ("grpo", "seq-mean-token-mean"),
        ("luspo", "seq-mean-token-sum"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
    ],
)
def test_a_response_without_a_token_counts_as_in_trl(loss_type: str, mode: LossAggMode) -> None:
    new, mask = torch.tensor(LOSS, dtype=torch.float64).neg() / 100, torch.tensor(MASK)
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    theirs, gradient = trl_loss(new, new, advantages, mask, loss_type=loss_type)
    leaf = new.clone().requires_grad_()
    ours = ppo_clip(leaf, new, advantages, mask, loss_agg_mode=mode).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(ours, leaf)[0], gradient, rtol=1e-12, atol=0)


@given(
    st.integers(1, 5).flatmap(
        lambda t: st.lists(
            st.tuples(
                st.lists(st.floats(-10, 10), min_size=t, max_size=t),
                st.lists(st.integers(0, 1), min_size=t, max_size=t),
            ),
            min_size=1,
            max_size=4,
        )
    ),
    st.sampled_from(MODES),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_every_mode_equals_a_plain_loop(
    rows: list[tuple[list[float], list[int]]], mode: str, length: int | None
) -> None:
    losses, mask = [row[0] for row in rows], [row[1] for row in rows]
    value = aggregate(
        torch.tensor(losses, dtype=torch.float64),
        torch.tensor(mask),
        mode,  # type: ignore[arg-type]
        max_response_length=length,
    )
    assert value.item() == pytest.approx(oracles.aggregate(losses, mask, mode, length), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
def test_what_the_mask_hides_leaks_into_neither_value_nor_gradient(mode: str, garbage: float) -> None:
    mask = torch.tensor(MASK)
    clean = torch.tensor(LOSS, requires_grad=True)
    dirty = torch.where(mask > 0, torch.tensor(LOSS), garbage).requires_grad_()
    expected, value = (aggregate(x, mask, mode) for x in (clean, dirty))  # type: ignore[arg-type]
    assert value.item() == expected.item()
    (wanted,), (gradient,) = torch.autograd.grad(expected, clean), torch.autograd.grad(value, dirty)
    assert torch.equal(gradient, wanted)
    assert bool((gradient[mask == 0] == 0).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_mask_gives_zero_with_zero_gradient(mode: str, shape: tuple[int, int]) -> None:
    loss = torch.ones(shape, requires_grad=True)
    value = aggregate(loss, torch.zeros(shape), mode)  # type: ignore[arg-type]
    value.backward()
    assert value.item() == 0
    assert loss.grad is not None
    assert bool((loss.grad == 0).all())


def test_settings_and_shapes_that_make_no_sense_are_refused() -> None:
    rows = torch.zeros(2, 3)
    with pytest.raises(InvalidInputError, match=r"token-mean, seq-mean.*got 'mean'"):
        aggregate(rows, rows, "mean")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"\(2, 3\) and \(2, 4\)"):
        aggregate(rows, torch.zeros(2, 4))
    with pytest.raises(InvalidInputError, match=r"\[B, T\], got \(3,\)"):
        aggregate(rows[0], rows[0])
    for length in (0, "9"):
        with pytest.raises(
            InvalidInputError, match=f"max_response_length must be at least 1, got {length!r}"
        ):
            aggregate(rows, rows, "seq-mean-token-sum-norm", max_response_length=length)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_more_tokens_are_counted_than_half_precision_can_count(dtype: torch.dtype) -> None:
    loss = torch.full((1, 70_001), 0.5, dtype=dtype)
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert float(aggregate(loss, torch.ones_like(loss), mode)) == 0.5  # type: ignore[arg-type]
    assert float(masked_mean(loss, torch.ones_like(loss))) == 0.5


def test_the_largest_of_negative_numbers_is_one_of_them() -> None:
    values, mask = torch.tensor([[-2.0, -3.0, 7.0]]), torch.tensor([[1, 1, 0]])
    assert float(masked_max(values, mask)) == -2.0
    assert float(masked_max(values, 0 * mask)) == 0.0
    assert float(masked_max(torch.ones(2, 1), torch.ones(2, 0))) == 0.0
