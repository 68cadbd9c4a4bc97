"""`tether llm train` with vLLM in the trainer's process and as a server: the embedded model, and SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from async_run import finish

from tether.experiments import RunFolder
from tether.llm.models import load_model_and_tokenizer

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
_FEW = ("--prompts-per-rollout", "2", "--responses-per-prompt", "4", "--eval-problems", "2")


def _smollm2() -> tuple[str, ...]:
    if not SMOLLM2.is_dir():
        pytest.fail(f"There is no model in {SMOLLM2}. Make it with: make models/smollm2-135m-instruct")
    return ("--model", str(SMOLLM2), "--task", "word_problems", "--learning-rate", "1e-5")


def _trained(output: Path, steps: int) -> list[dict[str, Any]]:
    rows = list(RunFolder.open(output).metrics())
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert RunFolder.open(output).finished
    load_model_and_tokenizer(output / "model")
    return rows


@pytest.mark.parametrize("model", ["embedded", "SmolLM2"])
def test_colocated_by_one_command(tmp_path: Path, model: str) -> None:
    """Two batches of two updates each: each begins at the policy that sampled, in vLLM's arithmetic."""
    chosen = () if model == "embedded" else _smollm2()
    finish(tmp_path / "run", "--rollouts", "vllm", "--anchor", "sampler", "--updates-per-rollout", "2",
           "--steps", "4", *_FEW, *chosen)  # fmt: skip
    rows = _trained(tmp_path / "run", 4)
    assert [row["lag"] for row in rows] == [0, 1, 0, 1]
    found = [row["sampler_mismatch"] for row in rows if "sampler_mismatch" in row]
    assert len(found) == 2  # after each transfer
    assert max(found) < 1e-4  # float32 in both
    assert max(row["kl_mean"] for row in rows[::2]) < 1e-6
    if any(row.get("reward_std") for row in rows):  # of eight answers of SmolLM2 all may be wrong
        assert max(row["kl_mean"] for row in rows[1::2]) > 1e-6


def test_smollm2_with_a_server_in_half_precision(tmp_path: Path) -> None:
    finish(tmp_path / "run", "--vllm-dtype", "bfloat16", "--steps", "3", *_FEW, *_smollm2())
    rows = _trained(tmp_path / "run", 3)
    found = [row["sampler_mismatch"] for row in rows]
    assert 1e-4 < min(found) <= max(found) < 0.15
    assert 1 <= max(row["lag"] for row in rows) <= 4
