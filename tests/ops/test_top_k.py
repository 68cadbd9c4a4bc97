"""Top-K by group maxima against a stable sort of everything."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.errors import InvalidInputError
from tether.ops import top_k as module
from tether.ops.top_k import group_maxima, top_k_by_groups


def _sorted_ids(logits: torch.Tensor, top_k: int) -> list[list[int]]:
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].tolist()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(1, 4000),
    top_k=st.integers(1, 40),
    levels=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_ids_and_order_equal_a_stable_sort_with_many_ties(
    vocabulary: int, top_k: int, levels: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (3, vocabulary), generator=generator).float()
    top_k = min(top_k, vocabulary)
    assert top_k_by_groups(logits, top_k).tolist() == _sorted_ids(logits, top_k)


def test_bfloat16_ties_of_a_real_width_go_to_the_lowest_id() -> None:
    logits = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert len(logits[0].unique()) < 2_500  # most ids share their logit with others
    assert top_k_by_groups(logits, 64).tolist() == _sorted_ids(logits, 64)


def test_everything_in_one_group_is_found() -> None:
    logits = torch.zeros(1, 20 * module.GROUP)
    first = 7 * module.GROUP
    logits[0, first : first + 5] = torch.arange(1.0, 6.0)
    assert top_k_by_groups(logits, 5).tolist() == [[first + 4, first + 3, first + 2, first + 1, first]]


def test_ids_beyond_the_last_whole_group_are_found() -> None:
    logits = torch.zeros(1, 20 * module.GROUP + 3)
    logits[0, -1] = 2.0
    logits[0, -3] = 1.0
    assert top_k_by_groups(logits, 3).tolist() == [[20 * module.GROUP + 2, 20 * module.GROUP, 0]]


def test_impossible_ids_come_last_in_order() -> None:
    logits = torch.full((1, 20 * module.GROUP), -math.inf)
    logits[0, 900] = -5.0
    assert top_k_by_groups(logits, 3).tolist() == [[900, 0, 1]]


def test_wide_rows_are_never_sorted_or_searched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    search = module.top_k_lowest_id

    def spy(values: torch.Tensor, k: int) -> torch.Tensor:
        widths.append(values.shape[-1])
        return search(values, k)

    monkeypatch.setattr(module, "top_k_lowest_id", spy)
    logits = torch.randn(2, 1000 * module.GROUP + 5, generator=torch.Generator().manual_seed(1))
    ids = top_k_by_groups(logits, 10, group_maxima(logits))
    assert widths == [1000, 10 * module.GROUP + 5]
    assert ids.tolist() == _sorted_ids(logits, 10)


@pytest.mark.parametrize("top_k", [0, 11])
def test_more_ids_than_there_are_is_refused(top_k: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"\[1, 10\].*got {top_k}"):
        top_k_by_groups(torch.zeros(1, 10), top_k)
