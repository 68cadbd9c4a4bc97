"""What is packed comes back, in the bytes it should take."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from rounding import SUMMED_ANOTHER_WAY, error_of, unit_of
from tether.errors import InvalidInputError
from tether.projection import CompactLogProbs, SparseLogProbs, kl_categorical


def _rows(shape: tuple[int, ...] = (3, 20), mass: float = 0.95) -> tuple[SparseLogProbs, torch.Tensor]:
    """Rows of 1 to 33 ids with their sampled ones; the last of each sequence are empty."""
    generator = torch.Generator().manual_seed(0)
    sharpness = 0.5 + 6 * torch.rand(*shape, 1, generator=generator)
    logits = sharpness * torch.randn(*shape, 200, generator=generator)
    sampled = torch.distributions.Categorical(logits=logits).sample()
    few = SparseLogProbs.from_logits(logits, 32, mass=mass, keep_ids=sampled)
    few.ids[:, -4:], few.log_probs[:, -4:], few.log_tail[:, -4:] = -1, -torch.inf, 0.0
    return few, sampled


def _as_sets(rows: SparseLogProbs) -> list[dict[int, float]]:
    pairs = zip(rows.ids.flatten(0, -2).tolist(), rows.log_probs.flatten(0, -2).tolist(), strict=True)
    return [{i: p for i, p in zip(ids, values, strict=True) if i >= 0} for ids, values in pairs]


def test_float32_rows_come_back_bit_for_bit() -> None:
    few, _ = _rows()
    compact = CompactLogProbs.pack(few)
    back = compact.unpack()
    assert _as_sets(back) == _as_sets(few)
    assert torch.equal(back.log_tail, few.log_tail)
    assert few.log_tail_min is not None
    assert back.log_tail_min is not None
    assert torch.equal(back.log_tail_min, few.log_tail_min)
    assert back.ids.shape == (3, 20, compact.width)
    assert compact.nbytes < few.ids.int().nbytes + few.log_probs.nbytes
    assert compact.ids.dtype == torch.int32


def test_the_default_type_of_tensors_does_not_matter() -> None:
    few, _ = _rows()
    expected = CompactLogProbs.pack(few).unpack().log_probs
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(CompactLogProbs.pack(few).unpack().log_probs, expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_bytes_are_those_of_the_ids_that_are_there() -> None:
    few, sampled = _rows()
    held = int((few.ids >= 0).sum())
    assert CompactLogProbs.pack(few).nbytes == 8 * held + (60 + 1) * 8 + 60 * 8
    half = CompactLogProbs.pack(few, precision="float16", keep_ids=sampled)
    assert half.nbytes == 6 * held + (60 + 1) * 8 + 60 * (4 + 8 + 4)


def test_float16_rows_are_normalised_and_close_and_the_sampled_token_is_exact() -> None:
    few, sampled = _rows(mass=1.0)
    back = CompactLogProbs.pack(few, precision="float16", keep_ids=sampled).unpack()
    filled = (few.ids >= 0).any(-1)
    total = back.with_buckets().logsumexp(-1)[filled]
    assert error_of(total, torch.zeros_like(total)) <= SUMMED_ANOTHER_WAY * unit_of(1.0)
    assert torch.equal(back.log_prob_of(sampled)[filled], few.log_prob_of(sampled)[filled])
    order = few.ids.sort(dim=-1).indices
    aligned = SparseLogProbs(few.ids.gather(-1, order), few.log_probs.gather(-1, order), few.log_tail)
    order = back.ids.sort(dim=-1).indices
    again = SparseLogProbs(back.ids.gather(-1, order), back.log_probs.gather(-1, order), back.log_tail)
    width = back.ids.shape[-1]  # one slot more or less where a sampled token had its own
    pairs = [
        torch.cat((s.log_probs[..., -width:], s.log_tail[..., None]), -1)[filled] for s in (again, aligned)
    ]
    divergence = kl_categorical(pairs[0].double(), pairs[1].double())
    # Log-probabilities that move by d, half a rounding of float16, give a divergence of d^2 / 2 on average.
    moved = unit_of(aligned.log_probs[filled], torch.float16) / 2
    assert 0 < divergence.max() <= moved**2 / 2
    assert back.log_tail_min is None


def test_rows_of_nothing() -> None:
    few, sampled = _rows()
    none = SparseLogProbs(torch.full_like(few.ids, -1), torch.full_like(few.log_probs, -torch.inf),
                          torch.zeros_like(few.log_tail))  # fmt: skip
    for options in ({}, {"precision": "float16", "keep_ids": sampled}):
        back = CompactLogProbs.pack(none, **options).unpack()
        assert back.ids.shape == (3, 20, 1)  # a place for a maximum over ids
        assert torch.equal(back.log_probs.amax(-1), torch.full((3, 20), -torch.inf))
        assert torch.equal(back.log_tail, none.log_tail)
    empty = CompactLogProbs.pack(few[:0])
    assert empty.unpack().log_tail.shape == (0, 20)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_one_row_without_a_batch(precision: Literal["float32", "float16"]) -> None:
    few, sampled = _rows((1, 8))
    one = SparseLogProbs(few.ids[0, 0], few.log_probs[0, 0], few.log_tail[0, 0])
    back = CompactLogProbs.pack(one, precision=precision, keep_ids=sampled[0, 0]).unpack()
    in_a_batch = CompactLogProbs.pack(few, precision=precision, keep_ids=sampled).unpack()
    assert back.log_tail.shape == ()
    width = back.ids.shape[0]
    assert torch.equal(back.ids, in_a_batch.ids[0, 0, :width])
    assert torch.equal(back.log_probs, in_a_batch.log_probs[0, 0, :width])
    assert torch.equal(back.log_tail, in_a_batch.log_tail[0, 0])


def test_a_certain_sampled_token_survives_float16() -> None:
    few = SparseLogProbs.from_logits(torch.tensor([[60.0, 0.0, -1.0]]), 2, keep_ids=torch.tensor([0]))
    back = CompactLogProbs.pack(few, precision="float16", keep_ids=torch.tensor([0])).unpack()
    assert back.log_probs.isnan().sum() == 0
    assert back.log_prob_of(torch.tensor([0])).item() == few.log_prob_of(torch.tensor([0])).item()


def test_float16_without_the_sampled_tokens_is_refused() -> None:
    few, _ = _rows()
    with pytest.raises(InvalidInputError, match="keep_ids"):
        CompactLogProbs.pack(few, precision="float16")
    with pytest.raises(InvalidInputError, match="precision must be"):
        CompactLogProbs.pack(few, precision="bfloat16")  # type: ignore[arg-type]
