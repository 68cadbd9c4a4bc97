"""Log-probabilities from logits at hand, whole or split over two processes, against dense float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing

from rounding import SUMMED_ANOTHER_WAY, error_of, rounding_of
from tether.errors import InvalidInputError
from tether.ops import logits as logits_module
from tether.ops.logits import VocabularyShard, logits_least_id, logits_log_probs, logits_top_ids

VOCABULARY, TOKENS = 300, 12


def _case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(TOKENS + 4, VOCABULARY, generator=generator)).to(dtype)
    rows = torch.randperm(TOKENS + 4, generator=generator)[:TOKENS]
    ids = torch.randint(0, VOCABULARY, (TOKENS, 5), generator=generator)
    ids[2, 3] = -1
    ids[4, 1] = ids[4, 0]  # the same id twice counts twice
    return logits, rows, ids


def _dense(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    log_probs = logits[rows].log_softmax(-1).gather(-1, ids.clamp_min(0))
    return torch.where(ids < 0, -torch.inf, log_probs)


@pytest.mark.parametrize("block", [VOCABULARY * 5, 1 << 24], ids=["in blocks", "at once"])
def test_values_and_gradient_are_those_of_dense_log_softmax(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits_module, "_BLOCK_ELEMENTS", block)
    logits, rows, ids = _case()
    weights = torch.randn(ids.shape, dtype=torch.float64).masked_fill(ids < 0, 0.0)
    gradients = []
    for function in (lambda x: logits_log_probs(x, ids, rows=rows), lambda x: _dense(x, rows, ids)):
        leaf = logits.clone().requires_grad_()
        found = function(leaf)
        torch.where(ids < 0, 0.0, found).mul(weights).sum().backward()
        gradients.append((found.detach(), leaf.grad))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("block", [VOCABULARY, 1 << 24], ids=["in blocks", "at once"])
def test_a_row_may_predict_several_tokens(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a prompt that several responses share."""
    monkeypatch.setattr(logits_module, "_BLOCK_ELEMENTS", block)
    logits, _, ids = _case()
    rows = torch.zeros(len(ids), dtype=torch.long)
    rows[-1] = 2
    gradients = []
    for function in (lambda x: logits_log_probs(x, ids, rows=rows), lambda x: _dense(x, rows, ids)):
        leaf = logits.clone().requires_grad_()
        torch.where(ids < 0, 0.0, function(leaf)).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


def test_half_precision_logits_give_float32_log_probs() -> None:
    logits, rows, ids = _case(torch.bfloat16)
    found = logits_log_probs(logits.requires_grad_(), ids, rows=rows)
    assert found.dtype == torch.float32
    exact = _dense(logits.double(), rows, ids)
    within = SUMMED_ANOTHER_WAY * rounding_of(_dense(logits.float(), rows, ids), exact)
    assert error_of(found, exact) <= within
    found[0, 0].backward()
    assert logits.grad.dtype == torch.bfloat16


def test_autocast_does_not_reach_in() -> None:
    logits, rows, ids = _case(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = logits_log_probs(logits, ids, rows=rows)
    assert torch.equal(inside, logits_log_probs(logits, ids, rows=rows))


def test_no_rows_keep_the_graph() -> None:
    """A micro-batch of which nothing counts must still reach the parameters."""
    logits = torch.randn(3, VOCABULARY, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    logits_log_probs(logits, torch.zeros(0, 4, dtype=torch.long), rows=none).sum().backward()
    assert logits.grad.abs().max() == 0
    assert logits_top_ids(logits, 3, rows=none).shape == (0, 3)


def test_columns_that_cannot_be_sampled_have_no_say() -> None:
    logits, rows, ids = _case()
    logits[:, 250:] = -torch.inf
    found = logits_log_probs(logits, ids, rows=rows)
    torch.testing.assert_close(found, _dense(logits, rows, ids))


def test_top_ids_are_those_of_a_stable_sort() -> None:
    logits, rows, _ = _case()
    logits = logits.round()  # ties
    expected = logits[rows].sort(dim=-1, descending=True, stable=True).indices[:, :9]
    assert torch.equal(logits_top_ids(logits, 9, rows=rows), expected)
    assert logits_top_ids(logits, 10_000).shape == (TOKENS + 4, VOCABULARY)
    least = logits[rows].sort(dim=-1, stable=True).indices[:, :1]
    assert torch.equal(logits_least_id(logits, rows=rows), least)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, ids: (x[0], ids), r"logits must be floating point \[M, V\]"),
        (lambda x, ids: (x, ids[0]), r"ids must be \[N, K\] for 12 rows"),
        (lambda x, ids: (x, ids + 300), "ids must lie in .0, 300. .*found 5"),
        (lambda x, ids: (x, ids >= 0), "ids must be integers, got torch.bool"),
        (lambda x, ids: (x.fill_(torch.nan), ids), "12 of 12 rows of logits hold NaN"),
    ],
)
def test_what_cannot_be_worked_with_is_named(change, message) -> None:  # type: ignore[no-untyped-def]
    logits, rows, ids = _case()
    logits, ids = change(logits, ids)
    with pytest.raises(InvalidInputError, match=message):
        logits_log_probs(logits, ids, rows=rows)


def _split(rank: int, folder: str) -> None:
    """On each of two processes: 170 columns here, 130 there, and ties across the border."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=2, init_method=f"file://{folder}/meeting"
    )
    logits, rows, ids = _case()
    logits = logits.round()
    start, stop = ((0, 170), (170, VOCABULARY))[rank]
    shard = VocabularyShard(torch.distributed.group.WORLD, start, VOCABULARY)
    mine = logits[:, start:stop].clone().requires_grad_()
    found = logits_log_probs(mine, ids, rows=rows, shard=shard)
    weights = torch.linspace(-1, 1, ids.numel(), dtype=torch.float64).view(ids.shape)
    torch.where(ids < 0, 0.0, found).mul(weights).sum().backward()
    top = logits_top_ids(mine, 150, rows=rows, shard=shard)  # more than the narrower shard holds
    least = logits_least_id(mine, rows=rows, shard=shard)
    torch.save((found.detach(), mine.grad, top, least), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_a_split_vocabulary_gives_what_the_whole_one_gives(tmp_path: Path) -> None:
    multiprocessing.start_processes(_split, (str(tmp_path),), nprocs=2, start_method="fork")
    logits, rows, ids = _case()
    logits = logits.round()
    leaf = logits.clone().requires_grad_()
    expected = _dense(leaf, rows, ids)
    weights = torch.linspace(-1, 1, ids.numel(), dtype=torch.float64).view(ids.shape)
    torch.where(ids < 0, 0.0, expected).mul(weights).sum().backward()
    top = logits[rows].sort(dim=-1, descending=True, stable=True).indices[:, :150]
    for rank, columns in enumerate((slice(0, 170), slice(170, VOCABULARY))):
        found, gradient, found_top, least = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found, expected.detach(), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(gradient, leaf.grad[:, columns], atol=1e-12, rtol=1e-12)
        assert torch.equal(found_top, top)
        assert torch.equal(least, logits[rows].sort(dim=-1, stable=True).indices[:, :1])
