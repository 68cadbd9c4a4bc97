"""SmolLM2-135M-Instruct from end to end on a CPU, a few steps of each kind of task: make test-models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tether.cli import main
from tether.experiments import RunFolder

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(os.environ.get("TETHER_SMOLLM2", ROOT / "models" / "smollm2-135m-instruct"))

TASKS: dict[str, dict[str, Any]] = {
    "gsm8k": {"require_boxed": False},
    "reasoning_gym": {
        "dataset": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1,
        "instruction": "Give the result between <answer> and </answer>, as in <answer>7</answer>.",
    },
    "code": {"steps": 1, "format_reward": 0.1},
}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="needs SmolLM2: python recipes/smollm2.py"),
    # So few and short responses teach little; what matters here is that everything runs.
    pytest.mark.filterwarnings("ignore:Before training:tether.errors.TetherWarning"),
]


def word_problems() -> list[dict[str, str]]:
    """Easy ones in GSM8K's form."""
    return [
        {
            "question": f"Tom has {n} apples and buys {n % 7 + 2} more. How many apples has he now?",
            "answer": f"He has {n} + {n % 7 + 2} = {n + n % 7 + 2}. #### {n + n % 7 + 2}",
        }
        for n in range(1, 101)
    ]


def tether(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ending:
        main(list(arguments))
    assert ending.value.code == 0


@pytest.mark.parametrize("task", TASKS)
def test_train_evaluate_and_report(task: str, tmp_path: Path) -> None:
    settings = dict(TASKS[task])
    if task == "gsm8k":
        settings["path"] = tmp_path / "rows.jsonl"
        settings["path"].write_text("".join(json.dumps(row) + "\n" for row in word_problems()))
    options = [str(part) for pair in settings.items() for part in pair]
    run, measured = tmp_path / "run", tmp_path / "eval"
    tether(
        "llm", "train", "--model", str(MODEL), "--task", task, "--task-options", *options,
        "--output", str(run), "--steps", "2", "--updates-per-rollout", "2", "--prompts-per-rollout", "2",
        "--responses-per-prompt", "4", "--max-response-tokens", "40", "--learning-rate", "1e-5",
        "--eval-every", "0", "--eval-problems", "2", "--save-every", "0", "--threads", "1", "--device", "cpu",
    )  # fmt: skip
    folder = RunFolder.open(run)
    assert folder.finished
    assert [line["step"] for line in folder.metrics()] == [1, 2]
    assert [line["step"] for line in folder.evals()] == [0, 2]
    assert all(line["grad_norm"] >= 0 for line in folder.metrics())
    assert folder.metrics()[0]["truncated_responses"] <= 8
    assert task in (run / "model" / "README.md").read_text()
    tether(
        "llm", "eval", "--model", str(run / "model"), "--baseline", str(MODEL), "--task", task,
        "--task-options", *options, "--problems", "2", "--samples", "1", "--max-response-tokens", "40",
        "--output", str(measured), "--threads", "1", "--device", "cpu",
    )  # fmt: skip
    results = json.loads((measured / "results.json").read_text())[task]
    assert {"model", "baseline", "difference"} <= results.keys()
    assert (measured / "report.html").stat().st_size > 10_000
    tether("report", str(run), "--output", str(tmp_path / "report"))
    assert (tmp_path / "report" / "report.html").is_file()
