"""What the table of where models start on tasks counts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import task_starts
from tether.llm.tasks import Problem, Verdict


def test_shares_are_of_the_problems_that_a_split_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 that were asked for it has three, every one of them answered right."""

    def right(*given: Any, **options: Any) -> list[tuple[SimpleNamespace, Verdict]]:
        problems: Sequence[Problem] = given[3]
        return [(SimpleNamespace(truncated=False, ids=[1, 2]), Verdict(1.0, True)) for _ in problems]

    task = SimpleNamespace(problems=lambda split, limit: [Problem("1+1=", "2")] * 3)
    monkeypatch.setattr(task_starts, "make_task", lambda name, **options: task)
    monkeypatch.setattr(task_starts, "load_model_and_tokenizer", lambda path: (None, None))
    monkeypatch.setattr(task_starts, "answer_and_judge", right)
    row = task_starts.measure("smollm2-135m-instruct", "code-one-step", 400)
    assert row["problems"] == row["sampled_right"] == row["greedy_right"] == 3
    assert "100.0% [" in task_starts.shown(row)


def test_a_candidate_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["task_starts", "code-one-step", "code-one-stop"])
    with pytest.raises(SystemExit, match="2"):
        task_starts.main()
    assert "no candidate 'code-one-stop'; choose of" in capsys.readouterr().err
