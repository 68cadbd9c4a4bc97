"""Two processes over gloo: GRPO's course, one process's course, and a sharded head's gradient."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_language_model import make_tiny_model
from two_processes_worker import SAME_GLOBAL_BATCH, scripted_trainer

from ranks import run_two_ranks

WORKER = Path(__file__).with_name("two_processes_worker.py")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder two processes filled; started once, for their imports take longer than their work."""
    output = tmp_path_factory.mktemp("two")
    run_two_ranks(
        WORKER, output, output=output, timeout=400,
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), TRL_EXPERIMENTAL_SILENCE="1",
    )  # fmt: skip
    return output


def _numbers(together: Path, rank: int = 0) -> dict[str, float]:
    return json.loads((together / f"numbers-{rank}.json").read_text())


@pytest.mark.parametrize("variant", ["dapo", "gspo", "checkpointing", "accumulation", "packing"])
def test_without_bound_two_processes_follow_grpo(together: Path, variant: str) -> None:
    numbers = _numbers(together)
    assert numbers[f"to GRPO, {variant}"] < 1e-5
    assert numbers[f"moved, {variant}"] > 1e-2


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainers = {}
    for name, settings in SAME_GLOBAL_BATCH.items():
        trainers[name] = scripted_trainer(tmp_path_factory.mktemp("one"), 8, **settings)
        trainers[name].train()
    return trainers


@pytest.mark.parametrize("name", SAME_GLOBAL_BATCH)
def test_two_processes_do_what_one_does_with_the_whole_batch(
    together: Path, alone: dict[str, Any], name: str
) -> None:
    """Projection and regression at work; in one case a process has no token that counts."""
    start = make_tiny_model().state_dict()
    parameters = [load_file(together / f"{name}-{rank}.safetensors") for rank in range(2)]
    for key, expected in alone[name].model.state_dict().items():
        assert torch.equal(parameters[0][key], parameters[1][key])
        torch.testing.assert_close(parameters[0][key], expected, atol=1e-5, rtol=1e-4)
    assert max((parameters[0][key] - start[key]).abs().max() for key in start) > 1e-3


@pytest.mark.parametrize("name", SAME_GLOBAL_BATCH)
def test_two_processes_log_what_one_logs(together: Path, alone: dict[str, Any], name: str) -> None:
    rows = [row for row in alone[name].state.log_history if "loss" in row]
    assert len(rows) == 6
    for rank in range(2):
        numbers = _numbers(together, rank)
        for step, row in enumerate(rows):
            for key in ("kl_mean", "kl_max", "projected", "mean_step", "regression"):
                expected = pytest.approx(row[f"trust_region/{key}"], rel=1e-3, abs=1e-5)
                assert numbers[f"{name} {step} {key}"] == expected
    assert max(row["trust_region/projected"] for row in rows) > 0.3


@pytest.mark.parametrize("kind", ["head in the root", "head apart", "packed"])
def test_sharded_parameters_give_the_unsharded_results(together: Path, kind: str) -> None:
    """FSDP2 on both processes, each with data of its own; gradients are averaged, the head's too."""
    for rank in range(2):
        numbers = _numbers(together, rank)
        assert numbers[f"sharded log-probs, {kind}"] < 1e-6
        assert numbers[f"sharded gradient, {kind}"] < 1e-5
