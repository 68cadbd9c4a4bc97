"""The dense projection against float64, finite differences and independent convex solvers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracles
from rounding import SUMMED_ANOTHER_WAY, error_of, rounding_of, unit_of
from tether.errors import InvalidInputError
from tether.projection import (
    CategoricalProjection,
    categorical,
    divergence,
    geodesic,
    kl_categorical,
    project_categorical,
    solve,
)
from tether.settings import Region

INF = math.inf


def _rows(
    n: int, v: int, shift: float, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(n, v, dtype=torch.float64, generator=generator) * 2
    new = old + shift * torch.randn(n, v, dtype=torch.float64, generator=generator)
    return new.log_softmax(-1).to(dtype), old.log_softmax(-1).to(dtype)


def _kl(result: CategoricalProjection | Tensor, old: Tensor) -> np.ndarray:
    log_probs = result if isinstance(result, Tensor) else result.log_probs
    return oracles.kl(log_probs.detach().double(), old.double())


# Values


@pytest.mark.parametrize("bound", [1e-4, 0.05, 1.0, 5.0])
@pytest.mark.parametrize("v", [2, 7, 1000])
def test_in_float64_projected_rows_meet_the_bound_to_1e_9(v: int, bound: float) -> None:
    new, old = _rows(300, v, 3.0)
    result = project_categorical(new, old, bound)
    assert (result.projected.numpy() == (oracles.kl(new, old) > bound)).all()
    assert result.projected.any()
    np.testing.assert_allclose(_kl(result, old)[result.projected], bound, rtol=1e-9)


def test_in_float64_a_step_of_a_hundred_nats_still_meets_the_bound_to_1e_9() -> None:
    _, old = _rows(200, 50, 0.0, seed=1)
    new, _ = _rows(200, 50, 60.0, seed=2)
    old = (old * 30).log_softmax(-1)
    result = project_categorical(new, old, 0.05)
    assert float(result.kl.max()) > 100
    np.testing.assert_allclose(_kl(result, old)[result.projected], 0.05, rtol=1e-9)


@pytest.mark.parametrize("seed", range(1, 7))
def test_the_result_solves_the_primal_problem_by_an_interior_point_solver(seed: int) -> None:
    new, old = _rows(1, 2 + seed, 2.0, seed=seed)
    bound = 0.4 * float(oracles.kl(new[0], old[0]))
    result = project_categorical(new[0], old[0], bound)
    assert bool(result.projected)
    expected = oracles.project_by_cone_program(new[0], old[0], bound)
    np.testing.assert_allclose(result.log_probs.exp(), expected, atol=oracles.CONE_PROGRAM_ERROR)


@pytest.mark.parametrize("seed", range(4))
def test_the_result_solves_the_primal_problem_by_quadratic_programming(seed: int) -> None:
    new, old = _rows(1, 4 + seed, 1.0, seed=10 + seed)
    result = project_categorical(new[0], old[0], 0.1)
    np.testing.assert_allclose(
        result.log_probs.exp(), oracles.project_by_descent(new[0], old[0], 0.1), atol=1e-6
    )


def test_step_and_result_agree_with_brent_on_every_row() -> None:
    new, old = _rows(40, 12, 2.0)
    result = project_categorical(new, old, 0.2)
    for row in range(40):
        expected, s = oracles.project_by_root(new[row], old[row], 0.2)
        assert result.step[row].item() == pytest.approx(s, rel=1e-8)
        np.testing.assert_allclose(result.log_probs[row], expected, atol=1e-9)


def test_two_outcomes_by_hand() -> None:
    """q = (1/2, 1/2): the answer is (a, 1-a) with log 2 - H(a) = bound; a = 0.8 has 0.19274 nats."""
    bound = math.log(2) + 0.8 * math.log(0.8) + 0.2 * math.log(0.2)
    old = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    new = torch.tensor([0.99, 0.01], dtype=torch.float64).log()
    result = project_categorical(new, old, bound)
    np.testing.assert_allclose(result.log_probs.exp(), [0.8, 0.2], rtol=1e-9)
    assert result.step.item() == pytest.approx(math.log(4) / math.log(99), rel=1e-9)


def test_the_divergence_before_the_projection_is_reported() -> None:
    new, old = _rows(50, 20, 1.0)
    np.testing.assert_allclose(project_categorical(new, old, 0.05).kl, oracles.kl(new, old), rtol=1e-12)


def test_constants_added_to_rows_change_nothing() -> None:
    new, old = _rows(20, 9, 2.0)
    plain = project_categorical(new, old, 0.05)
    moved = project_categorical(new + 17.0, old - 40.0, 0.05)
    acted = plain.projected
    assert int(acted.sum()) > 10
    torch.testing.assert_close(moved.log_probs[acted], plain.log_probs[acted], rtol=0, atol=1e-12)
    torch.testing.assert_close(moved.step, plain.step, rtol=1e-10, atol=0)


def test_any_leading_shape_is_a_batch_of_rows() -> None:
    new, old = _rows(24, 6, 1.5)
    flat = project_categorical(new, old, 0.05)
    shaped = project_categorical(new.view(2, 3, 4, 6), old.view(2, 3, 4, 6), 0.05)
    assert torch.equal(shaped.log_probs.view(24, 6), flat.log_probs)
    assert torch.equal(shaped.step.flatten(), flat.step)
    assert shaped.kl.shape == shaped.projected.shape == (2, 3, 4)
    single = project_categorical(new[0], old[0], 0.05)
    assert single.step.shape == ()
    torch.testing.assert_close(single.log_probs, flat.log_probs[0], rtol=0, atol=1e-14)


# Inside the bound


def test_inside_the_bound_values_and_gradients_are_untouched_to_the_bit() -> None:
    new, old = _rows(400, 30, 0.35, dtype=torch.float32)
    new.requires_grad_()
    result = project_categorical(new, old, 0.05)
    inside = ~result.projected
    assert 50 < int(inside.sum()) < 350
    upstream = torch.randn_like(new)
    (gradient,) = torch.autograd.grad(result.log_probs, new, upstream)
    assert torch.equal(result.log_probs[inside], new[inside])
    assert torch.equal(gradient[inside], upstream[inside])
    assert not torch.isclose(gradient[~inside], upstream[~inside]).all(-1).any()
    assert bool((result.step[inside] == 1).all())


def test_an_infinite_bound_is_the_identity_even_for_infinite_divergences() -> None:
    new, old = _rows(30, 8, 5.0, dtype=torch.float32)
    old[:10, 3] = -INF
    new.requires_grad_()
    result = project_categorical(new, old, INF)
    upstream = torch.randn_like(new)
    assert torch.equal(result.log_probs, new)
    assert torch.equal(torch.autograd.grad(result.log_probs, new, upstream)[0], upstream)
    assert not result.projected.any()
    assert bool((result.step == 1).all())


def test_inputs_are_not_written_to() -> None:
    new, old = _rows(50, 7, 2.0)
    new[3, 2], old[4, 1], old[5, 5] = -INF, -INF, -INF
    new_before, old_before = new.clone(), old.clone()
    leaf = new.requires_grad_()
    project_categorical(leaf, old, 0.05).log_probs.sum().backward()
    assert torch.equal(leaf.detach(), new_before)
    assert torch.equal(old, old_before)


def test_the_result_does_not_alias_its_input() -> None:
    new, old = _rows(4, 7, 0.001)
    result = project_categorical(new, old, 0.05)
    result.log_probs.zero_()
    assert not bool((new == 0).any())


# Gradients


def _gradcheck(new: Tensor, old: Tensor, bound: float, **options: object) -> None:
    """Through log_softmax, because the projection ignores constants added to a row."""
    assert torch.autograd.gradcheck(
        lambda z: project_categorical(z.log_softmax(-1), old, bound, **options).log_probs,  # type: ignore[arg-type]
        new.clone().requires_grad_(),
        eps=1e-6,
        atol=1e-7,
        rtol=1e-6,
    )


@pytest.mark.parametrize("bound", [0.01, 0.2, 2.0])
def test_gradient_equals_finite_differences_for_projected_and_unprojected_rows_together(bound: float) -> None:
    new, old = _rows(6, 5, 1.0)
    new = torch.cat((new, old[:3] + 1e-3 * torch.randn(3, 5, dtype=torch.float64)))
    old = torch.cat((old, old[:3]))
    acted = project_categorical(new, old, bound).projected
    assert not acted.all()
    assert acted.any() or bound > 1
    _gradcheck(new, old, bound)


def test_gradient_of_an_unnormalised_input_equals_finite_differences() -> None:
    new, old = _rows(5, 6, 2.0)
    assert torch.autograd.gradcheck(
        lambda z: project_categorical(z, old, 0.05).log_probs, (new + 3.0).requires_grad_(), atol=1e-7
    )


@pytest.mark.parametrize("masked", [False, True])
def test_sequence_gradient_equals_finite_differences(masked: bool) -> None:
    new, old = _rows(3 * 4, 5, 1.5, seed=5)
    new, old = new.view(3, 4, 5), old.view(3, 4, 5)
    new = torch.cat((new, old[:1] + 0.01 * torch.randn(1, 4, 5, dtype=torch.float64)))  # stays inside
    old = torch.cat((old, old[:1]))
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]) if masked else None
    acted = project_categorical(new, old, 0.02, region="sequence", mask=mask).projected
    assert acted.tolist() == [True, True, True, False]
    _gradcheck(new, old, 0.02, region="sequence", mask=mask)


@pytest.mark.parametrize(("holes", "bound"), [("old", 0.05), ("new", 0.4), ("new", 0.01), ("both", 0.05)])
def test_gradient_next_to_zeros_equals_finite_differences(holes: str, bound: float) -> None:
    new, old = _rows(4, 6, 1.5)
    hole = torch.zeros(4, 6, dtype=torch.bool)
    hole[:, 2] = True
    hole[1, 4] = True
    old = old.masked_fill(hole, -INF) if holes in ("old", "both") else old

    def projected(z: Tensor) -> Tensor:
        z = z.masked_fill(hole, -INF) if holes in ("new", "both") else z
        log_probs = project_categorical(z.log_softmax(-1), old, bound).log_probs
        return torch.where(torch.isneginf(log_probs), 0.0, log_probs)

    assert torch.autograd.gradcheck(projected, new.requires_grad_(), atol=1e-7, rtol=1e-6)


def test_the_gradient_has_no_component_that_changes_the_divergence() -> None:
    """The divergence of the result does not depend on the input: it is the bound."""
    new, old = _rows(20, 9, 2.0)
    new.requires_grad_()
    result = project_categorical(new, old, 0.05)
    divergence = (result.log_probs.exp() * (result.log_probs - old)).sum()
    (gradient,) = torch.autograd.grad(divergence, new)
    assert float(gradient[result.projected].abs().max()) < 1e-12
    assert float(gradient[~result.projected].abs().max()) > 1e-3


def test_no_gradient_reaches_the_old_policy_or_is_needed_for_values() -> None:
    new, old = _rows(5, 6, 2.0)
    old.requires_grad_()
    result = project_categorical(new, old, 0.05)
    assert not result.log_probs.requires_grad
    result = project_categorical(new.requires_grad_(), old, 0.05)
    result.log_probs.sum().backward()
    assert old.grad is None
    assert not result.kl.requires_grad
    assert not result.step.requires_grad


def test_unused_upstream_gradients_are_allowed() -> None:
    new, old = _rows(5, 6, 2.0)
    new.requires_grad_()
    result = project_categorical(new, old, 0.05)
    (result.log_probs[:2, 1].sum() + new.sum()).backward()
    assert new.grad is not None
    assert torch.equal(new.grad[2:], torch.ones(3, 6, dtype=torch.float64))


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    new, old = _rows(3, 4, 2.0)
    new.requires_grad_()
    log_probs = project_categorical(new, old, 0.05).log_probs
    for value in (log_probs[:, 0], log_probs.square()):  # its own gradient depends on nothing, and on new
        with pytest.raises(InvalidInputError, match="create_graph=True"):
            torch.autograd.grad(value.sum(), new, create_graph=True)


# Sequences


def test_a_sequence_meets_the_bound_in_the_mean_with_one_step() -> None:
    new, old = _rows(8 * 11, 6, 1.0)
    new, old = new.view(8, 11, 6), old.view(8, 11, 6)
    mask = torch.rand(8, 11) < 0.6
    mask[:, 0] = True
    result = project_categorical(new, old, 0.05, region="sequence", mask=mask)
    assert result.step.shape == (8,)
    assert bool(result.projected.all())
    kl = _kl(result, old)
    for row in range(8):
        counted = mask[row].numpy()
        assert kl[row][counted].mean() == pytest.approx(0.05, rel=1e-9)
        expected, s = oracles.project_by_root(new[row][mask[row]], old[row][mask[row]], 0.05)
        assert result.step[row].item() == pytest.approx(s, rel=1e-8)
        np.testing.assert_allclose(result.log_probs[row][mask[row]], expected, atol=1e-9)
    assert torch.equal(result.log_probs[~mask], new[~mask])


def test_a_sequence_solves_its_primal_problem_by_an_interior_point_solver() -> None:
    new, old = _rows(3, 4, 1.2, seed=3)
    result = project_categorical(new, old, 0.1, region="sequence")
    expected = oracles.project_by_cone_program(new, old, 0.1)
    np.testing.assert_allclose(result.log_probs.exp(), expected, atol=oracles.CONE_PROGRAM_ERROR)


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF, 1e30])
def test_tokens_that_do_not_count_may_hold_anything(garbage: float) -> None:
    new, old = _rows(2 * 5, 6, 2.0)
    new, old = new.view(2, 5, 6), old.view(2, 5, 6)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], dtype=torch.bool)
    new[0, 0, 1] = new[1, 2, 0] = -INF  # zeros, so that the careful path runs too
    dirty_new, dirty_old = new.clone(), old.clone()
    dirty_new[~mask] = garbage
    dirty_old[~mask] = garbage
    dirty_new.requires_grad_()
    clean = project_categorical(new, old, 0.1, region="sequence", mask=mask)
    dirty = project_categorical(dirty_new, dirty_old, 0.1, region="sequence", mask=mask)
    assert bool(clean.projected.all())
    assert torch.equal(dirty.log_probs[mask], clean.log_probs[mask])
    assert torch.equal(dirty.step, clean.step)
    upstream = torch.randn_like(new)
    (gradient,) = torch.autograd.grad(dirty.log_probs, dirty_new, upstream)
    assert bool(gradient.isfinite().all())
    assert torch.equal(gradient[~mask], upstream[~mask])


def test_a_sequence_of_which_nothing_counts_is_left_alone() -> None:
    new, old = _rows(2 * 3, 4, 3.0)
    new, old = new.view(2, 3, 4), old.view(2, 3, 4)
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    result = project_categorical(new, old, 0.05, region="sequence", mask=mask)
    assert result.projected.tolist() == [False, True]
    assert result.kl[0].item() == 0
    assert torch.equal(result.log_probs[0], new[0])


def test_a_mask_means_the_same_as_bool_as_int_and_as_float() -> None:
    new, old = _rows(2 * 3, 4, 3.0)
    new, old = new.view(2, 3, 4), old.view(2, 3, 4)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    results = [
        project_categorical(new, old, 0.05, region="sequence", mask=m).log_probs
        for m in (mask.bool(), mask, mask.double())
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# Zeros


def test_what_the_old_policy_cannot_do_the_projection_does_not_do() -> None:
    old = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    new = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    result = project_categorical(new, old, 0.05)
    assert result.kl.item() == INF
    assert bool(result.projected)
    np.testing.assert_allclose(result.log_probs.exp(), [0.5, 0.5, 0.0], rtol=1e-12)
    shifted = torch.tensor([0.55, 0.05, 0.4], dtype=torch.float64).log()
    result = project_categorical(shifted, old, 0.05)
    assert result.log_probs[2].item() == -INF
    assert oracles.kl(result.log_probs, old) == pytest.approx(0.05, rel=1e-9)


def test_a_new_zero_within_reach_is_reached() -> None:
    """q = (.97, .02, .01), p = (.2, .8, 0): leaving .01 costs 0.01005 nats, which a bound of .05 allows."""
    old = torch.tensor([0.97, 0.02, 0.01], dtype=torch.float64).log()
    new = torch.tensor([0.2, 0.8, 0.0], dtype=torch.float64).log()
    result = project_categorical(new, old, 0.05)
    assert result.log_probs[2].item() == -INF
    expected, _ = oracles.project_by_root(new, old, 0.05)
    np.testing.assert_allclose(result.log_probs.exp(), np.exp(expected), rtol=1e-9)


def test_a_new_zero_out_of_reach_is_the_limit_of_small_probabilities() -> None:
    """q = (.6, .1, .3), p = (.5, .5, 0): leaving .3 costs .357 nats, so .3 shrinks until .05 are spent."""
    old = torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64).log()
    new = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    result = project_categorical(new, old, 0.05)
    assert oracles.kl(result.log_probs, old) == pytest.approx(0.05, rel=1e-9)
    # In the limit all of the divergence goes into the vanishing outcome; the others keep their odds.
    assert (result.log_probs[0] - result.log_probs[1]).item() == pytest.approx(math.log(6), rel=1e-9)
    errors = []
    for log_small in (-1e3, -1e5, -1e7):
        nearly = project_categorical(
            torch.tensor([math.log(0.5), math.log(0.5), log_small]).double(), old, 0.05
        )
        errors.append(float((nearly.log_probs - result.log_probs).abs().max()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


def test_disjoint_supports_project_onto_the_old_policy() -> None:
    old = torch.tensor([0.4, 0.6, 0.0], dtype=torch.float64).log()
    new = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).log()
    result = project_categorical(new.requires_grad_(), old, 0.05)
    np.testing.assert_allclose(result.log_probs.detach().exp(), [0.4, 0.6, 0.0], rtol=1e-12)
    (gradient,) = torch.autograd.grad(result.log_probs[:2].sum(), new)
    assert bool(gradient.isfinite().all())


def test_padding_that_both_policies_mask_changes_nothing() -> None:
    new, old = _rows(30, 8, 1.0)
    pad = torch.full((30, 5), -INF, dtype=torch.float64)
    plain = project_categorical(new.requires_grad_(), old, 0.05)
    padded_new = torch.cat((new.detach(), pad), -1).requires_grad_()
    padded = project_categorical(padded_new, torch.cat((old, pad), -1), 0.05)
    torch.testing.assert_close(padded.log_probs[:, :8], plain.log_probs, rtol=0, atol=1e-12)
    acted = padded.projected
    assert bool(torch.isneginf(padded.log_probs[:, 8:]).all())
    upstream = torch.randn(30, 13, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(padded.log_probs, padded_new, upstream)
    (expected,) = torch.autograd.grad(plain.log_probs, new, upstream[:, :8])
    torch.testing.assert_close(gradient[:, :8], expected, rtol=0, atol=1e-10)
    assert bool((gradient[acted][:, 8:] == 0).all())


# Precision


def test_float32_gradients_match_float64_ones() -> None:
    new, old = _rows(2000, 40, 2.0)
    upstream = torch.randn_like(new)
    gradients = []
    for dtype in (torch.float64, torch.float32):
        leaf = new.to(dtype).requires_grad_()
        result = project_categorical(leaf, old.to(dtype), 0.05)
        gradients.append(torch.autograd.grad(result.log_probs, leaf, upstream.to(dtype))[0].double())
    error = (gradients[0] - gradients[1]).norm(dim=-1) / gradients[0].norm(dim=-1)
    # As well as the step is known; a hundredfold where a row lies just outside of the bound.
    tolerance = solve.TOLERANCE[torch.float32]
    assert float(error.max()) < 100 * tolerance
    assert float(error.median()) < tolerance


@pytest.mark.parametrize("region", ["token", "sequence"])
@pytest.mark.parametrize("least", [-1e15, -1e17, torch.finfo(torch.float32).min])
def test_float32_gradients_survive_an_outcome_that_is_masked_by_a_huge_number(
    least: float, region: Region
) -> None:
    """Of whose log-ratio the others' are less than a float32 can square."""
    new, old = _rows(3, 6, 1.5)
    new[0, 4], old[0, 4] = least, -30.0
    upstream = torch.randn_like(new)
    upstream[0, 4] = 0.0
    gradients = []
    for dtype in (torch.float64, torch.float32):
        leaf = new.to(dtype).requires_grad_()
        result = project_categorical(leaf, old.to(dtype), 0.05, region=region)
        assert result.projected.all()
        gradients.append(torch.autograd.grad(result.log_probs, leaf, upstream.to(dtype))[0].double())
    assert torch.allclose(*gradients, rtol=0, atol=10 * solve.TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_and_returned_in_float32(dtype: torch.dtype) -> None:
    new, old = _rows(500, 60, 2.0, dtype=dtype)
    new.requires_grad_()
    result = project_categorical(new, old, 0.05)
    assert result.log_probs.dtype == result.step.dtype == result.kl.dtype == torch.float32
    assert bool(result.projected.any())
    wide = project_categorical(new.detach().float(), old.float(), 0.05)
    assert torch.equal(result.log_probs, wide.log_probs)
    assert float(_kl(result, old).max()) <= 0.05 * (1 + 1e-3)
    result.log_probs[:, 0].sum().backward()
    assert new.grad is not None
    assert new.grad.dtype == dtype


def test_autocast_does_not_lower_the_precision() -> None:
    new, old = _rows(200, 60, 2.0, dtype=torch.float32)
    plain = project_categorical(new, old, 0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = project_categorical(new, old, 0.05)
    assert torch.equal(plain.log_probs, under.log_probs)


def _mass_error(log_probs: Tensor) -> float:
    mass = log_probs.detach().double().exp().sum(-1)
    return error_of(mass, torch.ones_like(mass)) if len(mass) else 0.0


def _extreme_rows(n: int, v: int, kind: str) -> tuple[Tensor, Tensor]:
    """float32 log-probabilities that have broken trust-region solvers before."""
    old = torch.randn(n, v) * 2
    new = old + torch.randn(n, v) * (torch.rand(n, 1) * 9) ** 2 / 8
    row, column = torch.arange(n), torch.randint(v, (n,))
    if kind == "one-hot new":
        old[row, column] -= torch.rand(n) * 80
        new[row, column] += torch.rand(n) * 120
    elif kind == "one-hot old":
        old[row, column] += torch.rand(n) * 60
    elif kind == "ties":
        old, new = old.round(), new.round()
    elif kind == "zeros":
        chance = torch.rand(n, 1) * 0.5
        in_new = torch.rand(n, v) < chance
        in_old = (torch.rand(n, v) < chance) & (in_new | (row % 4 == 0)[:, None])
        in_old[row, column] = in_new[row, column] = False  # nobody's row is empty
        old, new = old.masked_fill(in_old, -INF), new.masked_fill(in_new, -INF)
    old, new = old.log_softmax(-1), new.log_softmax(-1)
    return new, old


# Rows and vocabularies: a million rows in total.
_SIZES = [(80_000, 2), (60_000, 3), (50_000, 10), (9_000, 100), (940, 1000), (50, 20_000), (10, 262_144)]
_KINDS = ["plain", "one-hot new", "one-hot old", "ties", "zeros"]


def test_the_battery_of_extreme_rows_is_a_million() -> None:
    assert sum(n for n, _ in _SIZES) * len(_KINDS) == 1_000_000


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(("n", "v"), _SIZES)
def test_in_float32_no_row_exceeds_the_bound_by_a_thousandth(n: int, v: int, kind: str) -> None:
    checked, largest_kl = 0, 0.0
    for chunk, rows in enumerate(torch.arange(n).split(max(1, 2_000_000 // v))):
        new, old = _extreme_rows(len(rows), v, kind)
        bound = (0.05, 0.01, 0.5)[(chunk + v) % 3]
        result = project_categorical(new, old, bound)
        kl = oracles.kl(result.log_probs, old, smallest=oracles.SMALLEST_FLOAT32)
        assert kl.max() <= bound * (1 + 1e-3)
        # And it is not met by standing still: on the boundary unless a zero of the old policy, or the
        # end of the curve, holds the row back.
        before = oracles.kl(new, old, smallest=oracles.SMALLEST_FLOAT32)
        finite = result.projected.numpy() & np.isfinite(before)
        assert finite.any()
        assert kl[finite].min() >= bound * (1 - 1e-3)
        assert (result.projected.numpy() | (before <= bound * (1 + 1e-4))).all()
        # torch's own log_softmax of 262,144 numbers is off by 1e-4 where a processor adds them one by one.
        within = SUMMED_ANOTHER_WAY * max(unit_of(1.0), _mass_error(new), _mass_error(old))
        assert _mass_error(result.log_probs) <= within
        checked += len(rows)
        largest_kl = max(largest_kl, float(before[np.isfinite(before)].max()))
    assert checked == n
    if kind == "one-hot new" and v >= 10 and n >= 900:
        assert largest_kl > 50


_finite_logits = st.one_of(
    st.floats(-5, 5, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 30.0, -80.0, -200.0, 1e4, -1e4, 1e30, -1e30, -3e38]),
)


@st.composite
def _nasty_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    n, v = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    logit = st.one_of(_finite_logits, _finite_logits, st.just(-INF))
    rows = [[draw(logit) for _ in range(v)] for _ in range(2 * n)]
    for row in rows:
        if all(value == -INF for value in row):
            row[draw(st.integers(0, v - 1))] = 0.0
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    tensor = torch.tensor(rows, dtype=dtype)
    return tensor[:n], tensor[n:], draw(st.sampled_from([1e-3, 0.05, 0.7, 4.0]))


@given(_nasty_rows())
def test_nasty_rows_stay_inside_normalised_and_with_finite_gradients(
    case: tuple[Tensor, Tensor, float],
) -> None:
    new, old, bound = case
    new.requires_grad_()
    result = project_categorical(new, old, bound)
    projected = result.log_probs.detach()
    exact = torch.where(result.projected[:, None], projected, new.detach().double().log_softmax(-1))
    assert oracles.kl(exact, old, smallest=oracles.SMALLEST_FLOAT32).max() <= bound * (1 + 1e-3)
    assert torch.equal(projected[~result.projected], new.detach()[~result.projected])
    moved = projected[result.projected]
    assert _mass_error(moved) <= SUMMED_ANOTHER_WAY * unit_of(1.0, terms=new.shape[-1])
    assert not bool((moved.exp() > 0)[torch.isneginf(old[result.projected])].any())
    assert bool(((result.step >= 0) & (result.step <= 1)).all())
    upstream = torch.randn_like(new)
    (gradient,) = torch.autograd.grad(result.log_probs, new, upstream)
    assert bool(gradient.isfinite().all())
    assert torch.equal(gradient[~result.projected], upstream[~result.projected])


def test_the_gradient_is_finite_where_no_step_can_meet_the_bound() -> None:
    """Half of the mass where the old policy had e^-1e30: the step is 1 but for less than rounding."""
    new = torch.tensor([[0.0, -80.0, 0.0, -80.0, -INF]], requires_grad=True)
    old = torch.tensor([[-1e30, 0.0, 30.0, 0.0, 0.0]])
    result = project_categorical(new, old, 1e-3)
    (gradient,) = torch.autograd.grad(result.log_probs, new, torch.tensor([[1.0, -1.0, 1.0, 1.0, 1.0]]))
    assert gradient.abs().max() <= 10


@given(_nasty_rows())
def test_the_divergence_of_nasty_rows_equals_a_term_by_term_sum(case: tuple[Tensor, Tensor, float]) -> None:
    new, old, _ = case
    smallest = 1e-37 if new.dtype == torch.float32 else 0.0
    expected = oracles.kl(new, old, smallest=smallest)
    rounding = SUMMED_ANOTHER_WAY * unit_of(1.0, terms=new.shape[-1])
    tolerance = rounding if new.dtype == torch.float32 else 1e-9
    for value in (kl_categorical(new, old), project_categorical(new, old, 1.0).kl):
        np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)


# The code paths of accelerators, on the CPU


@pytest.mark.parametrize("region", ["token", "sequence"])
def test_the_path_that_never_asks_equals_the_one_that_does(
    monkeypatch: pytest.MonkeyPatch, region: str
) -> None:
    new, old = _rows(60 * 4, 9, 0.7)
    new, old = new.view(60, 4, 9), old.view(60, 4, 9)
    new[5, 1, 2], old[6, 2, 3], new[7, 0, :5] = -INF, -INF, -INF
    new[8, :, 1], old[8, :, 1] = -INF, -INF
    mask = torch.rand(60, 4) < 0.8 if region == "sequence" else None
    upstream = torch.randn_like(new)
    outcomes = []
    for ask in (True, False):
        for module in (categorical, divergence, geodesic, solve):
            monkeypatch.setattr(module, "may_ask", lambda tensor, ask=ask: ask)
        leaf = new.clone().requires_grad_()
        result = project_categorical(leaf, old, 0.1, region=region, mask=mask)  # type: ignore[arg-type]
        gradient = torch.autograd.grad(result.log_probs, leaf, upstream)[0]
        outcomes.append((result.log_probs.detach(), result.step, gradient, result.projected))
    assert outcomes[0][3].any()
    assert not outcomes[0][3].all()
    for asked, unasked in zip(*outcomes, strict=True):
        torch.testing.assert_close(unasked, asked, rtol=1e-8, atol=1e-8)


def test_a_nan_is_reported_without_asking_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (categorical, divergence, geodesic, solve):
        monkeypatch.setattr(module, "may_ask", lambda tensor: False)
    new, old = _rows(4, 3, 1.0)
    new[2, 1] = math.nan
    with pytest.raises(RuntimeError, match="NaN"):
        project_categorical(new, old, 0.05)


# The divergence alone


def test_kl_by_hand() -> None:
    new, old = torch.tensor([0.5, 0.25, 0.25]).double().log(), torch.tensor([0.25, 0.5, 0.25]).double().log()
    assert kl_categorical(new, old).item() == pytest.approx(0.25 * math.log(2), rel=1e-12)


def test_kl_of_half_precision_is_computed_in_float32() -> None:
    new, old = _rows(100, 300, 0.3, dtype=torch.bfloat16)
    value = kl_categorical(new, old)
    assert value.dtype == torch.float32
    exact = torch.from_numpy(oracles.kl(new.double(), old.double()))
    p, q = (side.float().log_softmax(-1) for side in (new, old))
    naive = (p.exp() * (p - q)).sum(-1)
    assert error_of(value, exact) <= SUMMED_ANOTHER_WAY * rounding_of(naive, exact)


def test_kl_is_differentiable_next_to_zeros() -> None:
    new, old = _rows(3, 5, 1.0)
    old[0, 1] = -INF
    hole = torch.zeros(3, 5, dtype=torch.bool)
    hole[0, 1] = hole[1, 3] = True

    def divergence(z: Tensor) -> Tensor:
        return kl_categorical(z.masked_fill(hole, -INF), old)

    assert torch.autograd.gradcheck(divergence, new.requires_grad_())


def test_kl_of_identical_rows_is_zero_and_never_negative() -> None:
    new, _ = _rows(2000, 50, 1.0, dtype=torch.float32)
    value = kl_categorical(new, new + 1e-7)
    assert float(value.min()) >= 0
    assert float(value.max()) <= 2 * unit_of(new)  # what two log-probabilities that round once differ by


# Errors and edges


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0,)])
def test_nothing_in_nothing_out(shape: tuple[int, ...]) -> None:
    if shape == (0,):
        with pytest.raises(InvalidInputError, match=r"vocabulary.*\(0,\)"):
            project_categorical(torch.zeros(0), torch.zeros(0), 0.05)
        return
    result = project_categorical(torch.zeros(shape).half().requires_grad_(), torch.zeros(shape).half(), 0.05)
    assert result.log_probs.shape == shape
    assert result.log_probs.dtype == torch.float32
    assert result.step.shape == result.kl.shape == result.projected.shape == shape[:-1]
    assert result.projected.dtype == torch.bool
    result.log_probs.sum().backward()


def test_a_vocabulary_of_one_has_nothing_to_project() -> None:
    result = project_categorical(torch.zeros(3, 1), torch.full((3, 1), -4.0), 0.05)
    assert not result.projected.any()
    assert result.kl.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bound", [0.0, -0.1, math.nan, "0.05", None])
def test_a_bound_that_is_not_positive_is_refused(bound: object) -> None:
    with pytest.raises(InvalidInputError, match=r"kl_bound must be a positive.*got " + str(repr(bound))):
        project_categorical(torch.zeros(2, 3), torch.zeros(2, 3), bound)  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["new", "old"])
@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("v", [3, 200])
def test_nan_and_infinity_are_refused_and_located(v: int, value: float, side: str) -> None:
    new, old = _rows(4, v, 0.5, dtype=torch.float32)
    (new if side == "new" else old)[2, v - 1] = value
    with pytest.raises(InvalidInputError, match=r"NaN.*1 of 4 regions, the first at flat index 2"):
        project_categorical(new, old, 0.05)


@pytest.mark.parametrize("side", ["new", "old"])
def test_an_empty_row_is_refused(side: str) -> None:
    new, old = _rows(4, 5, 0.5)
    (new if side == "new" else old)[1] = -INF
    with pytest.raises(InvalidInputError, match=r"nothing but -inf.*mask that removed every token"):
        project_categorical(new, old, 0.05)


def test_shapes_that_differ_are_refused_with_both_shapes() -> None:
    with pytest.raises(InvalidInputError, match=r"\(2, 3\) and \(2, 4\)"):
        project_categorical(torch.zeros(2, 3), torch.zeros(2, 4), 0.05)


def test_integers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"floating point, got torch\.int64"):
        project_categorical(torch.zeros(2, 3).long(), torch.zeros(2, 3), 0.05)


def test_regions_and_masks_that_do_not_fit_are_refused() -> None:
    rows = torch.zeros(2, 3, 4)
    with pytest.raises(InvalidInputError, match="region must be one of token, sequence, got 'batch'"):
        project_categorical(rows, rows, 0.05, region="batch")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match='mask only has a meaning with region="sequence"'):
        project_categorical(rows, rows, 0.05, mask=torch.ones(2, 3))
    with pytest.raises(InvalidInputError, match=r"\(2, 3\).*got \(2, 4\)"):
        project_categorical(rows, rows, 0.05, region="sequence", mask=torch.ones(2, 4))
    with pytest.raises(InvalidInputError, match=r"tokens, vocabulary\], got \(4,\)"):
        project_categorical(rows[0, 0], rows[0, 0], 0.05, region="sequence")


def test_a_gradient_is_finite_beside_an_outcome_that_only_just_is_no_zero() -> None:
    new = torch.tensor([[0.0, 0.0, 50.0, -50.0, -1e4, 0.0, 0.275]], requires_grad=True)
    old = torch.tensor([[50.0, 0.4, 6.1e-5, 0.0, -1e30, -2.85, -2.7]])
    result = project_categorical(new, old, 0.05)
    (gradient,) = torch.autograd.grad(result.log_probs, new, torch.randn_like(new))
    assert gradient.isfinite().all()


@pytest.mark.parametrize("shapes", [((3, 1), (3, 5)), ((3, 0), (3, 0))])
def test_a_divergence_of_different_vocabularies_is_refused(shapes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidInputError, match=r"the same last dimension, V >= 1, got \(3, "):
        kl_categorical(*(torch.zeros(shape) for shape in shapes))
