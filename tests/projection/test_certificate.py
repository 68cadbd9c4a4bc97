"""What is certified is inside the bound in float64, over the whole vocabulary, on rows made to fool it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import oracles
from rounding import unit_of
from tether.errors import InvalidInputError
from tether.projection import SparseLogProbs, certify

BOUND = 0.05

VOCABULARY = 300

# Of float64 sums over the vocabulary; the smallest of them come out negative.
ORACLE_ERROR = unit_of(1.0, torch.float64, terms=VOCABULARY)


def _pairs(seed: int, vocabulary: int = VOCABULARY) -> Iterator[tuple[Tensor, Tensor]]:
    """Old and new logits [64, V] of many kinds, from equal to far beyond the bound."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    distance = 10 ** (3 * torch.rand(64, 1, generator=generator) - 2.5)
    for sharpness in (0.1, 2.0, 8.0, 40.0):
        old = sharpness * normal(64, vocabulary)
        yield old, old + distance * normal(64, vocabulary)
        yield old + 1e4, old + 1e4 + distance * normal(64, vocabulary)  # huge logits
    # All that changes is one id of the tail, and only there.
    old = 6 * normal(64, vocabulary)
    new = old.clone()
    least = old.argmin(-1, keepdim=True)
    yield old, new.scatter_add(-1, least, 40 * distance.clamp_max(1))
    # Tails of next to nothing, which rounding could hide.
    old = torch.cat((3 * normal(64, 20), normal(64, vocabulary - 20) - 22), -1)
    yield old, torch.cat((old[:, :20] + 0.01 * distance, old[:, 20:] + 6 * normal(64, vocabulary - 20)), -1)
    # Zeros in both, in the old alone and in the new alone.
    old, new = 3 * normal(64, vocabulary), 3 * normal(64, vocabulary)
    old[:, -9:] = new[:, -9:] = -torch.inf
    yield old, old + 0.05 * new.nan_to_num(neginf=0.0)
    old[::2, 5] = -torch.inf
    new[1::2, 7] = -torch.inf
    yield old, torch.where(new.isneginf(), new, old.nan_to_num(neginf=-3.0))


def _true_kl(new: Tensor, old: Tensor) -> Tensor:
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(oracles.kl(new.double(), old.double())))


@pytest.mark.parametrize("top_k", [1, 8, 64, 299, 400])
@pytest.mark.parametrize("known", ["tail minimum", "range", "both", "nothing"])
def test_bounds_hold_in_exact_arithmetic(top_k: int, known: str) -> None:
    inside = 0
    for new, old in ((n, o) for seed in range(4) for o, n in _pairs(seed)):
        few_old = SparseLogProbs.from_logits(old, top_k)
        few_new = SparseLogProbs.at_ids(new, few_old.ids)
        truth, ratio = _true_kl(new, old), (new - old).double()
        spread = ratio.nan_to_num(-torch.inf).amax(-1) - ratio.nan_to_num(torch.inf).amin(-1)
        if known in ("range", "nothing"):
            few_old = SparseLogProbs(few_old.ids, few_old.log_probs, few_old.log_tail)
        bounds = certify(
            few_new, few_old, BOUND, log_ratio_range=spread if known in ("range", "both") else None
        )
        assert (bounds.kl_lower <= truth + ORACLE_ERROR).all()
        assert (bounds.kl_upper >= truth - ORACLE_ERROR).all()
        assert (truth[bounds.inside] <= BOUND).all()
        assert (truth[bounds.outside] > BOUND).all()
        assert torch.equal(bounds.uncertain, ~bounds.inside & ~bounds.outside)
        inside += int(bounds.inside.sum())
    # A certificate that certifies nothing would pass all of the above.
    assert inside > 100 or (known == "nothing" and top_k < 300)


def test_bounds_from_the_lm_heads_sparse_outputs() -> None:
    """Tails known as 1 minus a float32 sum, where masses below 1e-7 are lost."""
    for new, old in ((n, o) for seed in range(4) for o, n in _pairs(seed)):
        dense = old.log_softmax(-1)
        top, ids = dense.topk(32)
        few_old = SparseLogProbs.from_log_probs(ids, top, log_tail_min=dense.amin(-1))
        few_new = SparseLogProbs.from_log_probs(ids, new.log_softmax(-1).gather(-1, ids))
        bounds, truth = certify(few_new, few_old, BOUND), _true_kl(new, old)
        assert (bounds.kl_lower <= truth + ORACLE_ERROR).all()
        assert (truth[bounds.inside] <= BOUND).all()


def test_the_crude_bound_by_hand() -> None:
    old, new = torch.tensor([0.6, 0.3, 0.07, 0.03]).log(), torch.tensor([0.55, 0.35, 0.05, 0.05]).log()
    few = SparseLogProbs.from_logits(old, top_k=2)
    bounds = certify(SparseLogProbs.at_ids(new, few.ids), few, BOUND)
    kept = 0.55 * math.log(0.55 / 0.6) + 0.35 * math.log(0.35 / 0.3)
    assert bounds.kl_upper.item() == pytest.approx(kept + 0.1 * math.log(0.1 / 0.03), abs=3e-4)
    assert bounds.kl_lower.item() == pytest.approx(kept + 0.1 * math.log(0.1 / 0.1), abs=3e-4)
    assert bounds.uncertain


def test_hoeffdings_bound_by_hand() -> None:
    old = torch.zeros(4)
    few = SparseLogProbs.from_logits(old, top_k=2)
    new = SparseLogProbs.at_ids(torch.tensor([0.1, 0.0, 0.1, 0.0]), few.ids)
    assert certify(new, few, BOUND, log_ratio_range=torch.tensor(0.1)).kl_upper <= 0.1**2 / 8 + 1e-9
    assert certify(few, few, 1e-9, log_ratio_range=torch.tensor(0.0)).inside


def test_different_ids_are_refused() -> None:
    few = SparseLogProbs.from_logits(torch.tensor([2.0, 1.0, 0.0]), top_k=2)
    other = SparseLogProbs.from_logits(torch.tensor([0.0, 1.0, 2.0]), top_k=2)
    with pytest.raises(InvalidInputError, match="at_ids"):
        certify(other, few, BOUND)
    with pytest.raises(InvalidInputError, match="kl_bound must be a positive number"):
        certify(few, few, 0.0)
