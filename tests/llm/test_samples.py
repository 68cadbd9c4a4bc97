"""Responses kept for the report: those the update learnt from, as they were written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from short_run import config

from tether.llm import moved_tokens
from tether.llm.callbacks import SamplesCallback
from tether.llm.methods import TROLL
from tether.llm.models import load_model_and_tokenizer
from tether.llm.tasks import make_task
from tether.llm.train import train

# Two passes in float32, whose log-probabilities differ by some hundred roundings.
TOLERANCE = 1e-4


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
        kl=values,
        projected=values > 0,
        new_log_probs=values,
        projected_log_probs=values,
        old_log_probs=values,
    )
    state = SimpleNamespace(global_step=7)
    problems = [{"prompt": "37+58=", "answer": "95"}, {"prompt": "29+29=", "answer": "58"}]
    trainer = SimpleNamespace(state=state, rollout_rows=problems)
    inputs = {"completion_ids": ids, "completion_mask": mask, "rollout_row": torch.arange(2)}
    callback._on_tokens(trainer, inputs, tokens)
    callback.on_step_end(None, state, None)
    assert [(row["prompt"], row["reward"], len(row["tokens"])) for row in kept] == [("29+29=", 1.0, 2)]
    assert kept[0]["correct"] is True

    kept.clear()  # the rest of a batch that a checkpoint was written in, whose problems have no names
    callback._on_tokens(trainer, {name: v for name, v in inputs.items() if name != "rollout_row"}, tokens)
    callback.on_step_end(None, state, None)
    assert kept == []


def test_the_bars_of_a_token_are_its_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every entry kept they sum to one, and what was projected lies on the bound."""
    monkeypatch.setattr(moved_tokens, "ENTRIES", 1000)
    changes = {
        "steps": 8,
        "updates_per_rollout": 8,
        "save_every": 0,
        "learning_rate": 3e-3,
        "method": TROLL(mass=1.0),
    }
    run = train(config(tmp_path / "run", **changes))
    rows = run.samples(run.sample_steps()[-1])
    moved = [(row["tokens"][one["at"]], one) for row in rows for one in row["moved"]]
    assert len(moved) == 4  # two responses an update, two tokens each
    assert any(token["projected"] for token, _ in moved)
    for token, one in moved:
        old, new, projected = (
            torch.tensor([entry[name] for entry in one["entries"]], dtype=torch.float64)
            for name in ("old", "new", "projected")
        )
        assert [entry["text"] for entry in one["entries"] if entry["sampled"]] == [token["text"]]
        for probabilities in (old, new, projected):
            assert probabilities.sum().item() == pytest.approx(1.0, abs=TOLERANCE)
        place = [entry["sampled"] for entry in one["entries"]].index(True)
        assert projected[place].log().item() == pytest.approx(token["log_prob"], abs=TOLERANCE)
        assert new[place].log().item() == pytest.approx(token["new_log_prob"], abs=TOLERANCE)
        moved_by = torch.special.xlogy(new, new / old).nansum().item()
        assert moved_by == pytest.approx(token["kl"], abs=TOLERANCE)
        if token["projected"]:
            kept = torch.special.xlogy(projected, projected / old).nansum().item()
            assert kept == pytest.approx(0.05, abs=TOLERANCE)
