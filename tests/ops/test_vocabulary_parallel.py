"""A head split over two processes against the whole head in one; the worker compares, this judges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from naive_head import SETTINGS, make_inputs

from ranks import run_two_ranks
from rounding import SUMMED_ANOTHER_WAY
from tether.errors import InvalidInputError
from tether.ops import vocabulary_parallel
from tether.ops.shards import VocabularyShard

WORKER = Path(__file__).with_name("vocabulary_parallel_worker.py")

Differences = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Differences]:
    """What each of two processes found; started once, for their imports take longer than their work."""
    output = tmp_path_factory.mktemp("shards")
    run_two_ranks(WORKER, output, output=output, timeout=500)
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("split", ["even", "uneven", "narrow"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_two_processes_give_what_one_gives(by_rank: list[Differences], setting: str, split: str) -> None:
    """With padding, the second process of an uneven split has little that is real, or nothing."""
    for found in by_rank:
        for bias in ("bias", "no bias"):
            for quantity, difference in found[f"{setting}, {split}, {bias}"].items():
                assert difference < 1e-11, (quantity, bias)


@pytest.mark.parametrize(
    "scenario",
    [
        "ties",
        "a shard narrower than top_k",
        "log_probs alone",
        "entropy alone",
        "log_sum_exp alone",
        "a shard of impossible ids",
        "a group of one",
        "gathered",
        "used where it lies",
    ],
)
def test_nasty_cases_give_what_one_process_gives(by_rank: list[Differences], scenario: str) -> None:
    for found in by_rank:
        assert all(difference < 1e-11 for difference in found[scenario].values()), found[scenario]


def test_float32_differs_by_rounding_alone(by_rank: list[Differences]) -> None:
    for found in by_rank:
        roundings = dict(found["ties in float32"])
        assert roundings.pop("top_ids") == 0
        assert max(roundings.values()) <= SUMMED_ANOTHER_WAY, roundings


def test_a_certain_token_keeps_the_digits_of_its_entropy(by_rank: list[Differences]) -> None:
    """Logits near 1000 whose entropy is about 1e-3: merging log-sum-exps would lose it."""
    for found in by_rank:
        assert found["a certain token in float32"]["entropy"] <= SUMMED_ANOTHER_WAY
        assert found["a certain token in float32"]["log_probs"] <= SUMMED_ANOTHER_WAY


def test_half_precision_differs_by_the_rounding_of_the_gradients(by_rank: list[Differences]) -> None:
    for found in by_rank:
        roundings = dict(found["bfloat16"])
        assert roundings.pop("top_ids") == 0
        assert max(roundings.values()) <= SUMMED_ANOTHER_WAY, roundings


def test_shards_may_run_on_triton(by_rank: list[Differences]) -> None:
    if "triton" not in by_rank[0]:
        pytest.skip("these processes work on a CPU, where kernels must be interpreted")
    for found in by_rank:
        assert all(difference < 1e-9 for difference in found["triton"].values()), found["triton"]


@pytest.fixture
def _group_of_one(tmp_path: Path) -> object:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group_of_one")
@pytest.mark.parametrize(
    ("start", "whole", "options", "message"),
    [
        (1, 37, {}, r"37 rows from 1 does not fit a head of 37 rows"),
        (-1, 37, {}, r"from -1"),
        (0, 37, {"vocabulary_size": 38}, r"\[1, 37\].*got 38"),
        (0, 37, {"top_k": 0}, r"top_k must be an integer of at least 1"),
        (0, 37, {"temperature": -1.0}, r"temperature must be positive"),
    ],
)
def test_a_shard_that_does_not_fit_is_refused(
    start: int, whole: int, options: dict[str, int], message: str
) -> None:
    hidden, weight, _, ids = make_inputs()
    shard = VocabularyShard(dist.group.WORLD, start, whole)
    with pytest.raises(InvalidInputError, match=message):
        vocabulary_parallel.linear_log_probs(hidden, weight, ids, shard=shard, **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_group_of_one")
def test_an_id_outside_the_whole_vocabulary_is_refused() -> None:
    hidden, weight, _, ids = make_inputs()
    shard = VocabularyShard(dist.group.WORLD, 0, 40)
    ids[3, 2] = 39  # another shard's, if there were one
    vocabulary_parallel.linear_log_probs(hidden, weight, ids, shard=shard)
    ids[3, 2] = 40
    with pytest.raises(InvalidInputError, match=r"\[0, 40\).*found 40"):
        vocabulary_parallel.linear_log_probs(hidden, weight, ids, shard=shard)
    assert torch.isfinite(hidden).all()


@pytest.mark.usefixtures("_group_of_one")
def test_ids_may_be_narrower_than_the_vocabulary() -> None:
    """A number that the type does not hold wraps where it is compared with: every id was impossible."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 2, generator=generator) for n in (2, 40_000))
    ids, shard = torch.tensor([[7], [32_767]]), VocabularyShard(dist.group.WORLD, 0, 40_000)
    wide = vocabulary_parallel.linear_log_probs(hidden, weight, ids, shard=shard)
    narrow = vocabulary_parallel.linear_log_probs(hidden, weight, ids.short(), shard=shard)
    assert wide.log_probs.isfinite().all()
    assert torch.equal(narrow.log_probs, wide.log_probs)
