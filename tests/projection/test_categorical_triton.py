"""The projection kernel against the plain path and float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracles
from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.errors import InvalidInputError
from tether.projection import (
    CategoricalProjection,
    SparseLogProbs,
    project_categorical,
    project_sparse,
    solve,
)

pytest.importorskip("triton", reason="the kernel needs the package", exc_type=ImportError)

from tether.projection import categorical_triton, categorical_triton_chunks

# The interpreter's numpy says aloud what a GPU computes silently, and what is masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

INF = math.inf
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module", params=["in registers", "in chunks"])
def _rows_in_one_piece_or_many(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of this holds for rows of any width, in as many chunks of 16 outcomes as wide rows have of 4096."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in chunks":
            patch.setattr(categorical_triton, "_IN_REGISTERS", 1)
            patch.setattr(categorical_triton, "_CHUNK", 16)
        yield


def _rows(
    n: int, v: int, shift: float, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(n, v, dtype=torch.float64, generator=generator) * 2
    new = old + shift * torch.randn(n, v, dtype=torch.float64, generator=generator)
    return new.log_softmax(-1).to(DEVICE, dtype), old.log_softmax(-1).to(DEVICE, dtype)


def _both(
    new: Tensor, old: Tensor, bound: float, upstream: Tensor
) -> list[tuple[CategoricalProjection, Tensor]]:
    """Result and gradient of the plain path and of the kernel."""
    results = []
    for path in ("torch", "triton"):
        leaf = new.clone().requires_grad_()
        result = project_categorical(leaf, old, bound, backend=path)
        results.append((result, torch.autograd.grad(result.log_probs, leaf, upstream)[0]))
    return results


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isneginf(), 0.0, values)


@pytest.mark.parametrize(("v", "bound"), [(2, 0.05), (7, 1e-4), (65, 0.05), (300, 2.0)])
def test_in_float64_rows_meet_the_bound_and_equal_the_plain_path(v: int, bound: float) -> None:
    new, old = _rows(8, v, 2.0)
    (plain, plain_gradient), (result, gradient) = _both(new, old, bound, torch.randn_like(new))
    assert result.projected.any()
    kl = oracles.kl(result.log_probs.detach().cpu(), old.cpu())
    np.testing.assert_allclose(kl[result.projected.cpu()], bound, rtol=1e-9)
    assert torch.equal(result.projected, plain.projected)
    torch.testing.assert_close(result.log_probs, plain.log_probs, rtol=0, atol=1e-10)
    torch.testing.assert_close(result.step, plain.step, rtol=1e-9, atol=0)
    torch.testing.assert_close(result.kl, plain.kl, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-8, atol=1e-10)


def test_gradient_equals_finite_differences_for_projected_and_unprojected_rows_together() -> None:
    new, old = _rows(2, 3, 2.0, seed=1)
    new = torch.cat((new, old[:1] + 1e-3 * torch.randn(1, 3, dtype=torch.float64, device=DEVICE)))
    old = torch.cat((old, old[:1]))
    assert project_categorical(new, old, 0.05).projected.tolist() == [True, True, False]
    assert torch.autograd.gradcheck(
        lambda z: project_categorical(z.log_softmax(-1), old, 0.05, backend="triton").log_probs,
        new.requires_grad_(),
        atol=1e-7,
        rtol=1e-6,
    )


def test_inside_the_bound_values_and_gradients_are_untouched_to_the_bit() -> None:
    new, old = _rows(24, 30, 0.35, dtype=torch.float32)
    leaf = new.clone().requires_grad_()
    result = project_categorical(leaf, old, 0.05, backend="triton")
    inside = ~result.projected
    assert 3 < int(inside.sum()) < 21
    upstream = torch.randn_like(new)
    (gradient,) = torch.autograd.grad(result.log_probs, leaf, upstream)
    assert torch.equal(result.log_probs[inside], new[inside])
    assert torch.equal(gradient[inside], upstream[inside])
    assert bool((result.step[inside] == 1).all())
    assert bool((result.step[~inside] < 1).all())


@pytest.mark.parametrize("bound", [0.05, 0.4])
def test_zeros_on_either_side_are_treated_as_in_the_plain_path(bound: float) -> None:
    new, old = _rows(24, 9, 1.5)
    old[:6, 2] = -INF
    new[3:9, 2] = -INF  # both, new alone
    new[9:12, 4] = new[9:12, 5] = -INF
    old[12:15, 0] = new[12:15, 1] = -INF
    likeliest = old[15:18].argmax(-1, keepdim=True)
    new[15:18] = new[15:18].scatter(-1, likeliest, -INF)  # its loss alone exceeds the bound
    new[18, 1:] = old[19, 1:] = -INF
    upstream = torch.randn_like(new)
    (plain, plain_gradient), (result, gradient) = _both(new, old, bound, upstream)
    assert torch.equal(result.log_probs.isneginf(), plain.log_probs.isneginf())
    torch.testing.assert_close(_finite(result.log_probs), _finite(plain.log_probs), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.step, plain.step, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(result.kl, plain.kl, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-7, atol=1e-9)
    assert bool(gradient.isfinite().all())


@settings(max_examples=20)
@given(
    v=st.integers(2, 40),
    shift=st.sampled_from([0.3, 3.0, 60.0, 1e4]),
    bound=st.sampled_from([1e-3, 0.05, 1.0]),
    holes=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_in_float32_no_row_leaves_the_ball(v: int, shift: float, bound: float, holes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old = _rows(2, v, shift, dtype=torch.float32, seed=seed)
    for side in (new, old):
        for _ in range(holes):
            side[0, int(torch.randint(v - 1, (1,), generator=generator))] = -INF
    result = project_categorical(new, old, bound, backend="triton")
    kl = oracles.kl(result.log_probs.cpu(), old.cpu(), smallest=oracles.SMALLEST_FLOAT32)
    assert bool((kl <= bound * (1 + 1e-3) + SUMMED_ANOTHER_WAY * unit_of(1.0)).all())
    plain = project_categorical(new, old, bound, backend="torch")
    assert torch.equal(result.projected, plain.projected)
    # Both may be a thousandth off the bound.
    torch.testing.assert_close(result.step, plain.step, rtol=2e-3, atol=unit_of(1.0))


def test_float32_gradients_are_within_twice_the_rounding_of_the_plain_path() -> None:
    new, old = _rows(12, 65, 1.0)
    upstream = torch.randn_like(new)
    exact = _both(new, old, 0.05, upstream)[0][1]
    plain, ours = (g for _, g in _both(new.float(), old.float(), 0.05, upstream.float()))
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


def test_float32_gradients_are_finite_where_no_step_can_meet_the_bound() -> None:
    new = torch.tensor([[0.0, -80.0, 0.0, -80.0, -INF]], device=DEVICE)
    old = torch.tensor([[-1e30, 0.0, 30.0, 0.0, 0.0]], device=DEVICE)
    (_, plain), (_, ours) = _both(new, old, 1e-3, torch.ones_like(new))
    leaf = new.double().cpu().requires_grad_()
    project_categorical(leaf, old.double().cpu(), 1e-3).log_probs.sum().backward()
    assert leaf.grad is not None
    assert plain.isfinite().all()
    assert torch.allclose(ours.double().cpu(), leaf.grad, rtol=0, atol=SUMMED_ANOTHER_WAY * unit_of(1.0))


def test_float32_gradients_survive_an_outcome_that_is_masked_by_a_huge_number() -> None:
    new, old = _rows(2, 40, 1.5)
    new[0, 4], old[0, 4] = torch.finfo(torch.float32).min, -30.0
    upstream = torch.randn_like(new)
    upstream[0, 4] = 0.0
    exact, _ = _both(new, old, 0.05, upstream)
    _, ours = _both(new.float(), old.float(), 0.05, upstream.float())
    assert exact[0].projected.all()
    assert torch.allclose(ours[1].double(), exact[1], rtol=0, atol=10 * solve.TOLERANCE[torch.float32])


def test_half_precision_and_any_leading_shape() -> None:
    new, old = _rows(12, 20, 1.0, dtype=torch.bfloat16)
    result = project_categorical(new.view(3, 4, 20), old.view(3, 4, 20), 0.05, backend="triton")
    plain = project_categorical(new, old, 0.05, backend="torch")
    assert result.log_probs.dtype == torch.float32
    assert result.step.shape == result.kl.shape == (3, 4)
    # Both know the step to the solver's tolerance.
    within = solve.TOLERANCE[torch.float32] * float((new.float() - old.float()).abs().max())
    torch.testing.assert_close(result.log_probs.view(12, 20), plain.log_probs, rtol=0, atol=within)


def test_an_infinite_bound_is_the_identity_and_a_finite_one_leaves_the_inputs_alone() -> None:
    new, old = _rows(6, 8, 5.0, dtype=torch.float32)
    old[:3, 3] = -INF
    before = new.clone(), old.clone()
    assert torch.equal(project_categorical(new, old, INF, backend="triton").log_probs, new)
    leaf = new.requires_grad_()
    project_categorical(leaf, old, 0.05, backend="triton").log_probs[1:, 0].exp().sum().backward()
    assert torch.equal(new.detach(), before[0])
    assert torch.equal(old, before[1])
    assert bool((leaf.grad[0] == 0).all())  # type: ignore[index]


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("side", ["new", "old"])
@pytest.mark.skipif(DEVICE == "cuda", reason="there the check is a device assertion")
def test_values_that_are_no_log_probabilities_are_refused(value: float, side: str) -> None:
    new, old = _rows(4, 6, 1.0)
    (new if side == "new" else old)[2, 3] = value
    with pytest.raises(InvalidInputError, match="first at flat index 2"):
        project_categorical(new, old, 0.05, backend="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="there the check is a device assertion")
def test_a_row_of_nothing_is_refused() -> None:
    new, old = _rows(4, 6, 1.0)
    new[1] = -INF
    with pytest.raises(InvalidInputError, match="first at flat index 1"):
        project_categorical(new, old, 0.05, backend="triton")


def test_rows_of_three_chunks() -> None:
    """The last of them not full; with the sizes of today's kernels that is more than registers hold."""
    new, old = _rows(2, 9 * categorical_triton._CHUNK // 4, 1.0, dtype=torch.float32)
    exact, _ = _both(new.double(), old.double(), 0.05, torch.randn_like(new).double())
    plain, ours = (result.log_probs for result, _ in _both(new, old, 0.05, torch.randn_like(new)))
    assert exact[0].projected.all()
    errors = [float((found.double() - exact[0].log_probs).abs().max()) for found in (plain, ours)]
    assert errors[1] <= 2 * errors[0] + solve.TOLERANCE[torch.float32] * float((new - old).abs().max())


@pytest.mark.skipif(DEVICE == "cuda", reason="there the kernels are compiled and nobody can count")
@pytest.mark.parametrize(("shift", "projected", "passes"), [(1e-3, False, 2), (1.0, True, 12)])
def test_passes_over_a_wide_row_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, shift: float, projected: bool, passes: int
) -> None:
    chunks, counted = 4, []
    monkeypatch.setattr(categorical_triton, "_IN_REGISTERS", 1)
    monkeypatch.setattr(categorical_triton, "_CHUNK", 16)
    read = categorical_triton_chunks._normalised_chunk

    def count(*arguments: Any) -> Any:
        counted.append(1)
        return read(*arguments)

    monkeypatch.setattr(categorical_triton_chunks, "_normalised_chunk", count)
    new, old = _rows(1, 16 * chunks, shift, dtype=torch.float32)
    leaf = new.requires_grad_()
    result = project_categorical(leaf, old, 0.05, backend="triton")
    result.log_probs[0, :3].sum().backward()
    assert bool(result.projected) == projected
    # One more before these normalises both rows; what is copied is not looked at.
    assert 2 <= 1 + len(counted) / chunks <= passes


def test_what_the_kernel_cannot_do_is_refused_and_left_to_the_plain_path() -> None:
    new, old = _rows(2, 12, 1.0, dtype=torch.float32)
    with pytest.raises(InvalidInputError, match="single tokens, not sequences"):
        project_categorical(new[None], old[None], 0.05, region="sequence", backend="triton")
    assert bool(project_categorical(new, old, 0.05).projected.any())


def test_a_sparse_support_is_projected_by_the_kernel_as_by_the_plain_path() -> None:
    old_logits = torch.randn(6, 50, dtype=torch.float64, device=DEVICE)
    new_logits = (old_logits + torch.randn_like(old_logits)).requires_grad_()
    old = SparseLogProbs.from_logits(old_logits, top_k=8)
    results = []
    for path in ("torch", "triton"):
        result = project_sparse(SparseLogProbs.at_ids(new_logits, old.ids), old, 0.05, backend=path)
        (gradient,) = torch.autograd.grad(result.log_probs.log_tail.sin().sum(), new_logits)
        results.append((result.log_probs.with_buckets(), gradient))
    assert result.projected.any()
    for plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-9, atol=1e-11)
