"""Responses kept for the report: those the update learnt from, as they were written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from short_run import config

from tether.llm.callbacks import SamplesCallback
from tether.llm.models import load_model_and_tokenizer
from tether.llm.tasks import make_task


def test_a_response_that_does_not_count_is_not_shown_as_an_empty_wrong_one(tmp_path: Path) -> None:
    """With mask_truncated a response that was cut off has a mask of zeros."""
    kept: list[dict[str, Any]] = []
    run: Any = SimpleNamespace(save_samples=lambda step, rows: kept.extend(rows))
    _, tokenizer = load_model_and_tokenizer("embedded")
    task = make_task("arithmetic")
    callback = SamplesCallback(run, task, tokenizer, config(tmp_path))
    ids = tokenizer(["95", "58"], return_tensors="pt")["input_ids"]
    mask = torch.tensor([[0, 0], [1, 1]])
    values = torch.zeros(2, 2)
    tokens: Any = SimpleNamespace(
        kl=values, projected=values > 0, projected_log_probs=values, old_log_probs=values
    )
    state = SimpleNamespace(global_step=7)
    problems = [{"prompt": "37+58=", "answer": "95"}, {"prompt": "29+29=", "answer": "58"}]
    trainer = SimpleNamespace(state=state, rollout_rows=problems)
    inputs = {"completion_ids": ids, "completion_mask": mask, "rollout_row": torch.arange(2)}
    callback._on_tokens(trainer, inputs, tokens)
    callback.on_step_end(None, state, None)
    assert [(row["prompt"], row["reward"], len(row["tokens"])) for row in kept] == [("29+29=", 1.0, 2)]
