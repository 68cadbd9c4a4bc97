"""Two processes over gloo: GRPO's course, one process's course, and a sharded head's gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from courses import CourseRounding, nudge
from safetensors.torch import load_file
from tiny_language_model import make_tiny_model
from two_processes_worker import SAME_GLOBAL_BATCH, scripted_trainer

from ranks import run_two_ranks
from rounding import SUMMED_ANOTHER_WAY, unit_of

Alone = dict[str, tuple[Any, CourseRounding]]

WORKER = Path(__file__).with_name("two_processes_worker.py")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder two processes filled; started once, for their imports take longer than their work."""
    output = tmp_path_factory.mktemp("two")
    run_two_ranks(WORKER, output, output=output, timeout=550, TRL_EXPERIMENTAL_SILENCE="1")
    return output


def _numbers(together: Path, rank: int = 0) -> dict[str, float]:
    return json.loads((together / f"numbers-{rank}.json").read_text())


@pytest.mark.parametrize("variant", ["dapo", "gspo", "checkpointing", "accumulation", "packing"])
def test_without_bound_two_processes_follow_grpo(together: Path, variant: str) -> None:
    numbers = _numbers(together)
    assert numbers[f"to GRPO, {variant}"] <= numbers[f"rounding, {variant}"]
    assert numbers[f"moved, {variant}"] > 1e-2


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The trained trainer of each case, and how far another may end from it."""
    torch.set_num_threads(1)
    found = {}
    for name, settings in SAME_GLOBAL_BATCH.items():
        reference, nudged = (
            scripted_trainer(tmp_path_factory.mktemp("one"), 8, **settings) for _ in range(2)
        )
        nudge(nudged.model)
        for trainer in (reference, nudged):
            trainer.train()
        found[name] = (reference, CourseRounding.between(reference, nudged))
    return found


@pytest.mark.parametrize("name", SAME_GLOBAL_BATCH)
def test_two_processes_do_what_one_does_with_the_whole_batch(together: Path, alone: Alone, name: str) -> None:
    """Projection and regression at work; in one case a process has no token that counts."""
    start = make_tiny_model().state_dict()
    parameters = [load_file(together / f"{name}-{rank}.safetensors") for rank in range(2)]
    reference, rounding = alone[name]
    for key, expected in reference.model.state_dict().items():
        assert torch.equal(parameters[0][key], parameters[1][key])
        torch.testing.assert_close(parameters[0][key], expected, atol=rounding.weights, rtol=0)
    assert max((parameters[0][key] - start[key]).abs().max() for key in start) > 1e-3


@pytest.mark.parametrize("name", SAME_GLOBAL_BATCH)
def test_two_processes_log_what_one_logs(together: Path, alone: Alone, name: str) -> None:
    reference, rounding = alone[name]
    rows = [row for row in reference.state.log_history if "loss" in row]
    assert len(rows) == 6
    for rank in range(2):
        numbers = _numbers(together, rank)
        for step, row in enumerate(rows):
            for key in ("kl_mean", "kl_max", "projected", "mean_step", "regression"):
                within = rounding.logged[f"trust_region/{key}"]
                assert numbers[f"{name} {step} {key}"] == pytest.approx(
                    row[f"trust_region/{key}"], abs=within
                )
    assert max(row["trust_region/projected"] for row in rows) > 0.3


@pytest.mark.parametrize("kind", ["head in the root", "head apart", "packed"])
def test_sharded_parameters_give_the_unsharded_results(together: Path, kind: str) -> None:
    """FSDP2 on both processes, each with data of its own; gradients are averaged, the head's too."""
    for rank in range(2):
        numbers = _numbers(together, rank)
        # Packed rows begin at other positions, which rotary embeddings tell in float32, always.
        within = 4 * SUMMED_ANOTHER_WAY * unit_of(1.0) if kind == "packed" else 1e-9
        assert numbers[f"sharded log-probs, {kind}"] <= within
        assert numbers[f"sharded gradient, {kind}"] <= within
