"""Sparse supports against the dense projection, hand numbers and a stable sort."""

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
from rounding import SUMMED_ANOTHER_WAY, error_of, unit_of
from tether.errors import InvalidInputError
from tether.projection import SparseLogProbs, project_categorical, project_sparse
from tether.projection.support import EMPTY, select_support, top_k_lowest_id, union_of_ids

INF = math.inf


def _logits(n: int, v: int, shift: float, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(n, v, dtype=torch.float64, generator=generator) * 2
    return old + shift * torch.randn(n, v, dtype=torch.float64, generator=generator), old


def _pair(new: Tensor, old: Tensor, k: int, **options: object) -> tuple[SparseLogProbs, SparseLogProbs]:
    few = SparseLogProbs.from_logits(old, k, **options)  # type: ignore[arg-type]
    return SparseLogProbs.at_ids(new, few.ids), few


# Choosing ids


@given(
    st.integers(1, 40).flatmap(
        lambda size: st.tuples(
            st.lists(st.sampled_from([-INF, -2.0, -1.5, 0.0, 1.0, 1.0, 7.5]), min_size=size, max_size=size),
            st.integers(1, size),
        )
    )
)
def test_top_k_equals_a_stable_sort_whatever_ties(case: tuple[list[float], int]) -> None:
    values, k = torch.tensor(case[0]), case[1]
    expected = sorted(range(len(case[0])), key=lambda i: -case[0][i])[:k]  # sorted is stable
    assert top_k_lowest_id(values, k).tolist() == expected


def test_top_k_of_bfloat16_logits_equals_a_stable_sort() -> None:
    values = (torch.randn(30, 5000) * 3).bfloat16()
    top = values.topk(64).values
    assert bool((top[:, 1:] == top[:, :-1]).any(-1).all())  # ties in every row
    expected = values.float().sort(descending=True, stable=True).indices[:, :64]
    assert torch.equal(top_k_lowest_id(values, 64), expected)


def test_ids_stop_once_they_hold_the_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert select_support(logits, 4, mass=0.79).tolist() == [0, 1, EMPTY, EMPTY]
    assert select_support(logits, 4, mass=0.81).tolist() == [0, 1, 2, EMPTY]
    assert select_support(logits, 4, mass=1e-9).tolist() == [0, EMPTY, EMPTY, EMPTY]


def test_the_sampled_token_is_kept_whatever_its_rank_and_never_twice() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    ids = select_support(logits, 2, keep_ids=torch.tensor([3, 1]))
    assert ids.tolist() == [[0, 1, 3], [0, 1, EMPTY]]
    cut = select_support(logits, 2, mass=0.5, keep_ids=torch.tensor([1, 0]))
    assert cut.tolist() == [[0, EMPTY, 1], [0, EMPTY, EMPTY]]
    assert select_support(logits, 2, keep_ids=torch.tensor([-100, 3])).tolist() == [[0, 1, EMPTY], [0, 1, 3]]
    padded = SparseLogProbs.from_logits(logits, 2, keep_ids=torch.tensor([-100, 3]))
    assert padded.log_tail[0] == pytest.approx(logits[0].log_softmax(-1)[2:].logsumexp(-1).item())


@given(
    st.lists(st.sets(st.integers(0, 12), max_size=5), min_size=2, max_size=2),
    st.integers(0, 2),
)
def test_a_union_holds_each_id_of_either_side_once(sides: list[set[int]], spare: int) -> None:
    first, second = (torch.tensor([*side, *[EMPTY] * (5 - len(side) + spare)]) for side in sides)
    union = union_of_ids(first, second)
    held = union[union != EMPTY].tolist()
    assert held == sorted(sides[0] | sides[1])
    assert union[: len(held)].tolist() == held  # empty slots last
    assert union.shape == (first.numel() + second.numel(),)


# Distributions


def test_log_probs_and_tail_equal_the_dense_distribution() -> None:
    new, _ = _logits(20, 50, 0.0)
    few = SparseLogProbs.from_logits(new, 8, keep_ids=torch.arange(20))
    dense = oracles.normalise(new)
    for row in range(20):
        held = [i for i in few.ids[row].tolist() if i != EMPTY]
        assert row in held
        np.testing.assert_allclose(few.log_probs[row][few.ids[row] != EMPTY], dense[row, held], rtol=1e-12)
        rest = np.delete(np.exp(dense[row]), held).sum()
        assert few.log_tail[row].exp().item() == pytest.approx(rest, rel=1e-10)
    assert bool(torch.isneginf(few.log_probs[few.ids == EMPTY]).all())


def test_a_tiny_tail_keeps_its_digits() -> None:
    """Two outcomes of weight e^-40 beside one of weight 1: 1 - sum would be 0 or noise."""
    logits = torch.tensor([0.0, -40.0, -40.0])
    found, expected = SparseLogProbs.from_logits(logits, 1).log_tail.item(), -40 + math.log(2)
    assert found == pytest.approx(expected, abs=4 * unit_of(expected))


def test_rows_that_hold_nothing_yet_leave_all_mass_to_the_tail() -> None:
    logits = torch.randn(2, 6, dtype=torch.float64)
    ids = torch.tensor([[EMPTY, EMPTY, EMPTY], [EMPTY, 4, EMPTY]])
    few = SparseLogProbs.at_ids(logits, ids)
    assert few.log_tail[0].item() == pytest.approx(0, abs=1e-12)
    assert few.log_tail[1].exp().item() == pytest.approx(1 - logits.softmax(-1)[1, 4].item(), rel=1e-12)


def test_masked_logits_are_zeros_in_the_support_and_absent_from_the_tail() -> None:
    logits = torch.tensor([1.0, -INF, 0.5, -INF, 0.0], dtype=torch.float64)
    few = SparseLogProbs.at_ids(logits, torch.tensor([0, 1]))
    q = np.exp(oracles.normalise(logits))
    assert few.log_probs[1].item() == -INF
    assert few.log_tail.exp().item() == pytest.approx(q[2] + q[4], rel=1e-12)
    assert SparseLogProbs.at_ids(logits, torch.tensor([0, 2, 4])).log_tail.item() == -INF


def test_the_whole_vocabulary_leaves_exactly_no_tail() -> None:
    few = SparseLogProbs.from_logits(torch.randn(4, 7), 100, keep_ids=torch.tensor([0, 1, 2, 3]))
    assert few.ids.shape == (4, 8)
    assert bool(torch.isneginf(few.log_tail).all())


def test_completing_log_probs_equals_the_dense_tail() -> None:
    new, _ = _logits(50, 40, 0.0)
    few = SparseLogProbs.from_logits(new, 5)
    np.testing.assert_allclose(
        SparseLogProbs.from_log_probs(few.ids, few.log_probs).log_tail, few.log_tail, rtol=1e-9
    )


def test_a_tail_below_rounding_counts_as_the_rounding() -> None:
    """In float32 the kept probabilities of a certain token sum to 1, or a little more."""
    for log_prob in (0.0, -1e-9, 1e-7):
        few = SparseLogProbs.from_log_probs(torch.tensor([[3]]), torch.tensor([[log_prob]]))
        assert few.log_tail.item() == pytest.approx(math.log(torch.finfo(torch.float32).eps), rel=1e-6)


def test_completing_half_precision_is_done_in_float32() -> None:
    log_probs = torch.tensor([[0.5, 0.25]]).log().bfloat16()
    few = SparseLogProbs.from_log_probs(torch.tensor([[0, 1]]), log_probs)
    assert few.log_probs.dtype == torch.float32
    expected = 1 - log_probs.double().exp().sum().item()
    assert few.log_tail.exp().item() == pytest.approx(expected, abs=4 * unit_of(1.0))


def test_a_top_k_result_becomes_the_same_distribution_as_its_logits() -> None:
    logits = torch.randn(30, 25, dtype=torch.float64)
    sampled = torch.arange(30) % 25
    dense = logits.log_softmax(-1)
    top = dense.topk(6)
    built = SparseLogProbs.from_top_k(
        top.indices, top.values, sampled, dense.gather(-1, sampled[:, None]).squeeze(-1), mass=0.9
    )
    expected = SparseLogProbs.from_logits(logits, 6, mass=0.9, keep_ids=sampled)
    assert torch.equal(built.ids, expected.ids)
    torch.testing.assert_close(built.log_probs, expected.log_probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(built.log_tail, expected.log_tail, rtol=1e-9, atol=0)


def test_the_log_prob_of_a_token_is_read_off_and_absent_ones_are_impossible() -> None:
    few = SparseLogProbs(
        torch.tensor([[7, 2, EMPTY]]), torch.tensor([[0.5, 0.25, 0.0]]).log(), torch.tensor([0.25]).log()
    )
    assert few.log_prob_of(torch.tensor([2])).exp().item() == pytest.approx(0.25)
    assert few.log_prob_of(torch.tensor([3])).item() == -INF


def test_entropy_is_that_of_the_outcomes_and_differentiable_next_to_empty_slots() -> None:
    few = SparseLogProbs(
        torch.tensor([[7, 2, EMPTY]]), torch.tensor([[0.5, 0.25, 0.0]]).log(), torch.tensor([0.25]).log()
    )
    assert few.entropy().item() == pytest.approx(1.5 * math.log(2), rel=1e-6)
    logits = torch.randn(3, 6, dtype=torch.float64)
    ids = torch.tensor([[0, 3, EMPTY], [1, EMPTY, EMPTY], [5, 4, 2]])
    assert torch.autograd.gradcheck(
        lambda z: SparseLogProbs.at_ids(z, ids).entropy(), logits.requires_grad_(), atol=1e-8
    )


def test_rows_are_selected_and_detached_together() -> None:
    few = SparseLogProbs.from_logits(torch.randn(4, 9).requires_grad_(), 3)
    row = few[2]
    assert torch.equal(row.ids, few.ids[2])
    assert torch.equal(row.log_tail, few.log_tail[2])
    assert few.log_tail.requires_grad
    assert not few.detach().log_probs.requires_grad
    assert not few.detach().log_tail.requires_grad


# The bucket


def test_the_bucket_meets_the_bound_on_its_outcomes_to_1e_9() -> None:
    new, old = _pair(*_logits(200, 60, 1.5), 7)
    result = project_sparse(new, old, 0.05)
    assert int(result.projected.sum()) > 100
    kl = oracles.kl(result.log_probs.with_buckets(), old.with_buckets())
    np.testing.assert_allclose(kl[result.projected], 0.05, rtol=1e-9)


@pytest.mark.parametrize("how", ["at_ids", "from_log_probs"])
@pytest.mark.parametrize("region", ["token", "sequence"])
def test_bucket_gradients_through_support_and_tail_equal_finite_differences(how: str, region: str) -> None:
    new, old = _logits(6, 9, 1.0)
    new[0] = old[0] + 1e-3  # one row inside the bound
    few = SparseLogProbs.from_logits(old, 3, keep_ids=torch.tensor([8, 0, 1, 2, 3, 4]))
    assert bool((few.ids == EMPTY).any())
    few = SparseLogProbs(few.ids.view(2, 3, 4), few.log_probs.view(2, 3, 4), few.log_tail.view(2, 3))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]) if region == "sequence" else None

    def projected(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.view(2, 3, 9)
        if how == "at_ids":
            seen = SparseLogProbs.at_ids(z, few.ids)
        else:
            held = few.ids != EMPTY
            log_probs = z.log_softmax(-1).gather(-1, few.ids.clamp_min(0))
            seen = SparseLogProbs.from_log_probs(few.ids, torch.where(held, log_probs, -INF))
        result = project_sparse(seen, few, 0.05, region=region, mask=mask).log_probs  # type: ignore[arg-type]
        return torch.where(few.ids != EMPTY, result.log_probs, 0.0), result.log_tail

    acted = project_sparse(
        SparseLogProbs.at_ids(new.view(2, 3, 9), few.ids),
        few,
        0.05,
        region=region,
        mask=mask,  # type: ignore[arg-type]
    ).projected
    assert acted.any()
    assert region == "sequence" or not acted.all()
    assert torch.autograd.gradcheck(projected, new.requires_grad_(), atol=1e-7, rtol=1e-6)


def test_with_all_ids_kept_values_and_gradients_equal_the_dense_projection() -> None:
    new, old = _logits(40, 12, 1.2)
    upstream = torch.randn_like(new)
    dense_leaf, sparse_leaf = new.clone().requires_grad_(), new.clone().requires_grad_()
    dense = project_categorical(dense_leaf.log_softmax(-1), old.log_softmax(-1), 0.05)
    few = SparseLogProbs.from_logits(old, 99)
    sparse = project_sparse(SparseLogProbs.at_ids(sparse_leaf, few.ids), few, 0.05)
    restored = torch.empty_like(new).scatter(-1, few.ids, sparse.log_probs.log_probs)
    torch.testing.assert_close(restored, dense.log_probs, rtol=0, atol=1e-9)
    torch.testing.assert_close(sparse.kl, dense.kl, rtol=1e-9, atol=0)
    (expected,) = torch.autograd.grad(dense.log_probs, dense_leaf, upstream)
    (gradient,) = torch.autograd.grad(restored, sparse_leaf, upstream)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_the_bucket_divergence_never_exceeds_the_true_one_and_reaches_it() -> None:
    """Data processing: merging outcomes loses divergence; every id kept apart gives some back."""
    new, old = _logits(100, 64, 1.0)
    true = oracles.kl(new, old)
    previous = np.zeros(100)
    for k in (1, 2, 8, 32, 63, 64):
        pair = _pair(new, old, k)
        kl = project_sparse(*pair, INF).kl.numpy()
        assert (kl <= true * (1 + 1e-9)).all()
        assert (kl >= previous - 1e-12).all()
        previous = kl
    np.testing.assert_allclose(previous, true, rtol=1e-9)
    assert np.median(project_sparse(*_pair(new, old, 2), INF).kl.numpy() / true) < 0.9


def test_inside_the_bound_the_sparse_projection_is_the_identity_to_the_bit() -> None:
    new, old = _pair(*(x.float() for x in _logits(60, 30, 0.02)), 5)
    result = project_sparse(new, old, 0.05)
    assert not result.projected.any()
    assert torch.equal(result.log_probs.log_probs, new.log_probs)
    assert torch.equal(result.log_probs.log_tail, new.log_tail)


def test_empty_slots_stay_empty_and_harmless() -> None:
    new, old = _logits(10, 20, 2.0)
    few = SparseLogProbs.from_logits(old, 6)
    padded_ids = torch.cat((few.ids, torch.full((10, 3), EMPTY)), -1)
    plain = project_sparse(SparseLogProbs.at_ids(new, few.ids), few, 0.05)
    padded_old = SparseLogProbs.at_ids(old, padded_ids)
    padded = project_sparse(SparseLogProbs.at_ids(new, padded_ids), padded_old, 0.05)
    torch.testing.assert_close(
        padded.log_probs.log_probs[:, :6], plain.log_probs.log_probs, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(padded.log_probs.log_tail, plain.log_probs.log_tail, rtol=0, atol=1e-12)
    assert bool(torch.isneginf(padded.log_probs.log_probs[:, 6:]).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_projected_in_float32(dtype: torch.dtype) -> None:
    new, old = (x.to(dtype) for x in _logits(300, 400, 1.0))
    pair = _pair(new, old, 16)
    result = project_sparse(*pair, 0.05)
    assert result.log_probs.log_probs.dtype == torch.float32
    assert result.projected.any()
    kl = oracles.kl(result.log_probs.with_buckets().double(), pair[1].with_buckets().double())
    assert kl.max() <= 0.05 * (1 + 1e-3)


# The paper's tail


def test_the_papers_tail_by_hand() -> None:
    """new holds {0: .6, 1: .3}, old holds {1: .5, 2: .4}; the union's missing ids get 1e-12."""
    new = SparseLogProbs(
        torch.tensor([[0, 1]]),
        torch.tensor([[0.6, 0.3]], dtype=torch.float64).log(),
        torch.tensor([0.1]).double().log(),
    )
    old = SparseLogProbs(
        torch.tensor([[2, 1]]),
        torch.tensor([[0.4, 0.5]], dtype=torch.float64).log(),
        torch.tensor([0.1]).double().log(),
    )
    result = project_sparse(new, old, INF, support="paper")
    assert result.new.ids.tolist() == [[0, 1, 2, EMPTY]]
    p = np.array([0.6, 0.3, 1e-12]) / (0.9 + 1e-12)
    q = np.array([1e-12, 0.5, 0.4]) / (0.9 + 1e-12)
    np.testing.assert_allclose(result.new.log_probs.exp()[0, :3], p, rtol=1e-12)
    np.testing.assert_allclose(result.old.log_probs.exp()[0, :3], q, rtol=1e-12)
    assert result.kl.item() == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-10)
    assert result.kl.item() == pytest.approx(2 / 3 * math.log(0.6e12) + math.log(0.6) / 3, rel=1e-9)
    assert result.log_probs.log_tail.item() == -INF
    projected = project_sparse(new, old, 0.05, support="paper")
    expected, _ = oracles.project_by_root(np.log(p), np.log(q), 0.05)
    np.testing.assert_allclose(projected.log_probs.log_probs[0, :3].exp(), np.exp(expected), rtol=1e-8)


def test_the_papers_union_holds_the_last_id_of_a_narrow_type() -> None:
    ids, log_probs = torch.tensor([[127, 3]]), torch.tensor([[0.6, 0.4]]).log()
    nothing = torch.tensor([-INF])
    few = {t: SparseLogProbs(ids.to(t), log_probs, nothing) for t in (torch.int8, torch.int64)}
    wanted, found = (
        project_sparse(few[t], few[t], 0.05, support="paper").log_probs for t in (torch.int64, torch.int8)
    )
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.log_probs, wanted.log_probs)


def test_paper_gradients_equal_finite_differences() -> None:
    new, old = _logits(5, 9, 1.0)
    few_old = SparseLogProbs.from_logits(old, 3)
    ids = select_support(new, 3)

    def projected(z: Tensor) -> Tensor:
        result = project_sparse(SparseLogProbs.at_ids(z, ids), few_old, 0.05, support="paper").log_probs
        return torch.where(result.ids != EMPTY, result.log_probs, 0.0)

    assert torch.autograd.gradcheck(projected, new.requires_grad_(), atol=1e-6, rtol=1e-5)


def test_the_papers_tail_can_leave_the_ball_where_the_bucket_does_not() -> None:
    """All of the movement is inside the dropped ids or between support and tail: the paper sees none."""
    old = torch.tensor([0.3, 0.2, 0.25, 0.25], dtype=torch.float64).log()
    new = torch.tensor([0.03, 0.02, 0.475, 0.475], dtype=torch.float64).log()
    few_old = SparseLogProbs.at_ids(old, torch.tensor([0, 1]))
    few_new = SparseLogProbs.at_ids(new, torch.tensor([0, 1]))
    paper = project_sparse(few_new, few_old, 0.05, support="paper")
    bucket = project_sparse(few_new, few_old, 0.05)
    assert paper.kl.item() == pytest.approx(0, abs=1e-9)
    assert not paper.projected
    true = oracles.kl(new, old)
    assert bucket.kl.item() == pytest.approx(float(true), rel=1e-9)
    assert bool(bucket.projected)


# Nasty inputs


@st.composite
def _nasty_logits(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    n, v = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    value = st.one_of(
        st.floats(-4, 4, width=16), st.sampled_from([0.0, 0.0, 50.0, -50.0, 1e4, -1e4, 1e30, -1e30, -INF])
    )
    rows = [[draw(value) for _ in range(v)] for _ in range(2 * n)]
    for row in rows:
        if all(x == -INF for x in row):
            row[0] = 0.0
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    both = torch.tensor(rows, dtype=dtype)
    keep = torch.tensor([draw(st.integers(0, v - 1)) for _ in range(n)])
    return both[:n], both[n:], keep, draw(st.integers(1, v + 2))


@given(_nasty_logits())
def test_nasty_logits_give_normalised_supports_inside_the_bound_with_finite_gradients(
    case: tuple[Tensor, Tensor, Tensor, int],
) -> None:
    logits, old_logits, keep, k = case
    old = SparseLogProbs.from_logits(old_logits, k, keep_ids=keep)
    logits.requires_grad_()
    new = SparseLogProbs.at_ids(logits, old.ids)
    for side in (new, old):
        total = side.with_buckets().detach().exp().sum(-1)
        assert error_of(total, torch.ones_like(total)) <= SUMMED_ANOTHER_WAY * unit_of(1.0)
    assert bool((old.ids == keep[:, None]).any(-1).all())
    result = project_sparse(new, old, 0.05)
    outcomes = result.log_probs.with_buckets()
    kl = oracles.kl(outcomes.detach(), old.with_buckets(), smallest=oracles.SMALLEST_FLOAT32)
    assert kl.max() <= 0.05 * (1 + 1e-3)
    finite = torch.where(torch.isneginf(outcomes), 0.0, outcomes)
    (gradient,) = torch.autograd.grad(finite, logits, torch.randn_like(finite))
    assert bool(gradient.isfinite().all())


# Errors


def test_supports_that_differ_are_refused_with_the_remedy() -> None:
    new = SparseLogProbs.from_logits(torch.tensor([[0.0, 1.0, 2.0]]), 2)
    old = SparseLogProbs.from_logits(torch.tensor([[2.0, 1.0, 0.0]]), 2)
    with pytest.raises(InvalidInputError, match=r"SparseLogProbs\.at_ids\(new_logits, old\.ids\)"):
        project_sparse(new, old, 0.05)
    with pytest.raises(InvalidInputError, match="support must be one of bucket, paper, got 'none'"):
        project_sparse(new, new, 0.05, support="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", [0, -3, 2.0, True, None])
def test_a_support_of_less_than_one_id_is_refused(top_k: object) -> None:
    with pytest.raises(InvalidInputError, match=f"top_k must be an integer of at least 1, got {top_k!r}"):
        SparseLogProbs.from_logits(torch.zeros(2, 5), top_k)  # type: ignore[arg-type]


@pytest.mark.parametrize("mass", [0.0, -1.0, 1.5, math.nan])
def test_a_mass_outside_its_range_is_refused(mass: float) -> None:
    with pytest.raises(InvalidInputError, match=r"mass must lie in \(0, 1\]"):
        SparseLogProbs.from_logits(torch.zeros(2, 5), 2, mass=mass)


@pytest.mark.parametrize("broken", [math.nan, math.inf, [-math.inf] * 5])
def test_rows_that_are_no_distribution_are_refused_and_counted(broken: Any) -> None:
    logits = torch.zeros(3, 5)
    logits[1] = torch.tensor(broken) if isinstance(broken, list) else torch.tensor([0, 0, broken, broken, 0])
    logits[2, 0] = -math.inf
    with pytest.raises(InvalidInputError, match="the logits of 1 of 3 rows"):
        SparseLogProbs.from_logits(logits, 2)


def test_shapes_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\(2, 3\), \(2, 4\) and \(2,\)"):
        SparseLogProbs(torch.zeros(2, 3).long(), torch.zeros(2, 4), torch.zeros(2))


@pytest.mark.parametrize(
    ("keep_ids", "message"),
    [
        (torch.tensor([5, 4, 3]), r"keep_ids must be one id a row, \(2, 3\), got \(3,\)"),
        (torch.full((2, 3), 6), r"keep_ids must lie in \[0, 6\) or be -1 for an empty slot; found 6"),
        (torch.zeros(2, 3), "keep_ids must be integers, got torch.float32"),
    ],
)
def test_ids_to_keep_that_do_not_fit_are_refused(keep_ids: Tensor, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SparseLogProbs.from_logits(torch.randn(2, 3, 6), 2, keep_ids=keep_ids)
    padded = SparseLogProbs.from_logits(torch.randn(2, 3, 6), 2, keep_ids=torch.full((2, 3), -100))
    assert (padded.ids[..., -1] == -1).all()


def test_ids_to_look_at_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"ids must lie in \[0, 5\).*found 9"):
        SparseLogProbs.at_ids(torch.randn(1, 5), torch.tensor([[9]]))
    with pytest.raises(InvalidInputError, match=r"ids must be \[..., K\] for logits \(2, 5\), got \(1, 1\)"):
        SparseLogProbs.at_ids(torch.randn(2, 5), torch.tensor([[1]]))
