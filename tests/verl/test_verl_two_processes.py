"""FSDP2 on two processes: verl's course, and one process's course with the whole batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from actor import Rollouts, acting, make_actor, parameters
from parallel_seams import losses_and_gradients, split_vocabulary
from safetensors.torch import load_file
from two_ranks_worker import CASES, DENSE, UPDATES

from ranks import run_two_ranks

# Of a worker alone.
COSTS = {f"actor/troll/{name}" for name in ("store_bytes", "record_seconds", "projection_seconds")}
WORKER = Path(__file__).with_name("two_ranks_worker.py")


@pytest.fixture(scope="module")
def together(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder two processes filled; started once, for their imports take longer than their work."""
    output = tmp_path_factory.mktemp("two")
    run_two_ranks(WORKER, model, output, output=output, timeout=400, cwd=WORKER.parent, LOCAL_RANK="0")
    return output


def _numbers(together: Path, rank: int) -> dict[str, float]:
    return json.loads((together / f"numbers-{rank}.json").read_text())


def test_without_bound_two_processes_follow_verls_unclipped_loss(together: Path) -> None:
    for rank in range(2):
        assert _numbers(together, rank)["to verl"] < 1e-5
        assert _numbers(together, rank)["moved"] > 1e-3


@pytest.mark.parametrize("mode", CASES)
def test_two_processes_do_what_one_does_with_the_whole_batch(together: Path, model: Path, mode: str) -> None:
    rollouts = Rollouts.scripted()
    alone = make_actor(model, acting(**CASES[mode]), loss_agg_mode=mode)
    old = rollouts.score(alone)
    for step in range(UPDATES):
        metrics = rollouts.update(alone, old, update_lr_scheduler=step == UPDATES - 1)
        for rank in range(2):
            numbers = _numbers(together, rank)
            for name, value in metrics.items():
                if name == "loss" or (name.startswith("actor/troll/") and name not in COSTS):
                    assert numbers[f"{mode} {step} {name}"] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert metrics["actor/troll/projected"] > 0.2
    if "troll_step_back" in CASES[mode]:
        assert metrics["actor/troll/step_back/fraction"] < 0.9
    for rank in range(2):
        sharded = load_file(together / f"{mode}-{rank}.safetensors")
        for name, expected in parameters(alone).items():
            torch.testing.assert_close(sharded[name], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", DENSE)
def test_the_gradient_is_the_dense_one_of_both_processes_tokens(together: Path, name: str) -> None:
    """Exact support in float64, two micro-batches on each process."""
    for rank in range(2):
        assert _numbers(together, rank)[f"gradient {name}"] < 1e-6
        assert _numbers(together, rank)[f"projected {name}"] > 0.2


def test_slices_of_sequences_give_what_whole_sequences_give(together: Path) -> None:
    """Ulysses, behind the model: each rank has the logits of half of the packed sequence.

    verl scales the gradient that comes back through its gathering; TROLL's must be scaled as verl's own is.
    Under exact support a rank needs hidden states that the other has recorded.
    """
    whole = losses_and_gradients(None)
    scales = {}
    for name, (loss, gradient) in whole.items():
        parts = [load_file(together / f"ulysses {name}-{rank}.safetensors")["gradient"] for rank in range(2)]
        for rank in range(2):
            assert _numbers(together, rank)[f"ulysses {name}"] == pytest.approx(loss, abs=1e-6)
        found = parts[0] + parts[1]  # each is zero outside its slice
        scales[name] = (found.norm() / gradient.norm()).item()
        torch.testing.assert_close(found / scales[name], gradient, atol=1e-6, rtol=1e-5)
    for name in whole:
        assert scales[name] == pytest.approx(scales["verl"], rel=1e-5), name


def test_a_split_vocabulary_gives_what_the_whole_one_gives(together: Path) -> None:
    """As Megatron's tensor parallelism cuts it: half of the columns on each rank, sequences padded."""
    loss, gradient, ids = split_vocabulary(None, 0)
    parts = [load_file(together / f"split-{rank}.safetensors") for rank in range(2)]
    for rank in range(2):
        assert _numbers(together, rank)["split vocabulary"] == pytest.approx(loss, abs=1e-6)
        assert torch.equal(parts[rank]["ids"], ids)
    found = torch.cat([part["gradient"] for part in parts], -1)
    torch.testing.assert_close(found, gradient, atol=1e-5, rtol=0)
    assert gradient.abs().max() > 1e-2
