"""The certificate's kernel: against the reference it repeats, and against whole rows in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tether.projection import SparseLogProbs, certify, kl_categorical
from tether.projection.support import EMPTY

pytest.importorskip("triton", reason="the kernels need the package", exc_type=ImportError)

from tether.ops.certificate_triton import certify_rows
from tether.ops.token_state import TokenState

# The interpreter's numpy says aloud what a GPU computes silently.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, V, BOUND = 40, 61, 0.05


def _rows(spread: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits of both policies, moved by ever more."""
    generator = torch.Generator().manual_seed(0)
    old, moved = (torch.randn(N, V, generator=generator, dtype=torch.float64) for _ in range(2))
    new = spread * old + moved * torch.logspace(-6, 0, N, dtype=torch.float64)[:, None]
    return new.to(dtype), (spread * old).to(dtype)


def _found(new: Tensor, old: SparseLogProbs, ratio_range: Tensor) -> TokenState:
    new = new.to(DEVICE)
    state = TokenState.empty(new)
    state.log_sum.copy_(new.logsumexp(-1))
    least = None if old.log_tail_min is None else old.log_tail_min.to(DEVICE)
    moved = SparseLogProbs(old.ids.to(DEVICE), old.log_probs.to(DEVICE), old.log_tail.to(DEVICE), least)
    certify_rows(new, moved, ratio_range.to(DEVICE), BOUND, V, state)
    return state.each(torch.Tensor.cpu)


def _reference(new: Tensor, old: SparseLogProbs, ratio_range: Tensor) -> tuple[Tensor, ...]:
    """In float64, but for the precision that the inputs are known to have."""
    held = old.ids != EMPTY
    log_probs = new.gather(-1, torch.where(held, old.ids, 0).long()) - new.logsumexp(-1, keepdim=True)
    log_probs = torch.where(held, log_probs, -torch.inf)
    few = SparseLogProbs.from_log_probs(old.ids, log_probs, vocabulary_size=V)
    found = certify(few, old, BOUND, log_ratio_range=ratio_range)
    return found.kl_lower, few.log_tail.exp(), found.inside, found.uncertain, found.kl_upper


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("least", [True, False])
@pytest.mark.parametrize("top_k", [1, 5, 16, V])
@pytest.mark.parametrize("spread", [0.1, 5.0, 40.0])
def test_it_says_what_the_reference_says(spread: float, top_k: int, least: bool, dtype: torch.dtype) -> None:
    new, old_logits = _rows(spread, dtype)
    old = SparseLogProbs.from_logits(old_logits, top_k)
    if not least:
        old = replace(old, log_tail_min=None)
    ratio_range = torch.logspace(-5, 1, N, dtype=torch.float64).flip(0)
    found = _found(new, old, ratio_range)
    lower, tail_mass, inside, uncertain, upper = _reference(new, old, ratio_range)
    # Logits and their log-sums are rounded in units of their size.
    unit = torch.finfo(dtype).eps * (64 + 4 * float(new.abs().max()))
    torch.testing.assert_close(found.kl.double(), lower, rtol=unit, atol=unit)
    torch.testing.assert_close(found.tail_mass, tail_mass, rtol=unit, atol=unit)
    # Where a bound is nearer to the limit than its rounding, either answer is right.
    clear = ((upper - BOUND).abs() > unit) & ((lower - BOUND).abs() > unit)
    assert int(clear.sum()) >= N - 2
    assert torch.equal(found.certified[clear], inside[clear])
    assert torch.equal(found.uncertain[clear], uncertain[clear])


@pytest.mark.parametrize("spread", [0.1, 5.0, 40.0])
def test_what_it_certifies_is_inside_over_the_whole_vocabulary(spread: float) -> None:
    new, old_logits = _rows(spread)
    kl = kl_categorical(new.double(), old_logits.double())
    difference = new.double() - old_logits.double()
    ratio_range = difference.amax(-1) - difference.amin(-1)
    found = _found(new, SparseLogProbs.from_logits(old_logits, 8), ratio_range)
    assert bool((kl[found.certified] <= BOUND).all())
    assert bool((found.kl.double() <= kl).all())
    assert 0 < int(found.certified.sum()) < N


def test_empty_slots_hold_nothing() -> None:
    new, old_logits = _rows(5.0)
    old = SparseLogProbs.from_logits(old_logits, 6)
    more = torch.full((N, 3), EMPTY, dtype=old.ids.dtype)
    wider = SparseLogProbs(
        torch.cat((old.ids, more), -1),
        torch.cat((old.log_probs, torch.full((N, 3), -torch.inf)), -1),
        old.log_tail,
        old.log_tail_min,
    )
    ratio_range = torch.full((N,), 0.3, dtype=torch.float64)
    found, expected = _found(new, wider, ratio_range), _found(new, old, ratio_range)
    assert torch.equal(found.certified, expected.certified)
    # What is allowed for rounding grows with the logarithm of the slots; both are rounded once when stored.
    epsilon = torch.finfo(new.dtype).eps
    torch.testing.assert_close(found.kl, expected.kl, rtol=2 * epsilon, atol=16 * epsilon * math.log(10 / 7))


@pytest.mark.parametrize("spoil", ["logit", "log_sum of nothing", "old", "tail", "least", "range"])
def test_nan_proves_nothing(spoil: str) -> None:
    new, old_logits = _rows(5.0)
    old = SparseLogProbs.from_logits(old_logits, 6)
    assert old.log_tail_min is not None
    ratio_range = torch.full((N,), 1e-4, dtype=torch.float64)
    if spoil == "logit":
        new = new.clone()
        new[0, int(old.ids[0, 0])] = torch.nan
    elif spoil == "log_sum of nothing":
        new = new.clone()
        new[0] = -torch.inf
    elif spoil == "old":
        old.log_probs[0, 0] = torch.nan
    elif spoil == "tail":
        old.log_tail[0] = torch.nan
    elif spoil == "least":
        old.log_tail_min[0] = torch.nan
    else:
        ratio_range[0] = torch.nan
    found = _found(new, old, ratio_range)
    assert found.certified.tolist() == [False] + [True] * (N - 1)


def test_what_the_old_policy_cannot_produce_is_in_no_bound() -> None:
    new, old_logits = _rows(5.0)
    old = SparseLogProbs.from_logits(old_logits, 6)
    old.log_probs[0, 1] = -torch.inf
    found = _found(new, old, torch.full((N,), 1e-4, dtype=torch.float64))
    assert found.kl[0] == torch.inf
    assert not bool(found.certified[0])
    assert not bool(found.uncertain[0])
