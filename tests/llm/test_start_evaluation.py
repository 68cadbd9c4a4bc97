"""The evaluation before the first update: shared by runs that begin alike, and by no others."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from short_run import assert_same_run, config, record

from tether.experiments import RunFolder
from tether.llm.config import TrainConfig
from tether.llm.evaluate import Evaluation, evaluate_model
from tether.llm.start_evaluation import evaluate_start
from tether.llm.tasks import Problem
from tether.llm.train import train

PROBLEMS = [Problem("1+1=", "2"), Problem([{"role": "user", "content": "2+2="}], "4")]
MEASURED = Evaluation(success=0.5, success_greedy=1.0, reward=0.25, problems=2)


def never() -> Evaluation:
    raise AssertionError("measured again")


def start(
    folder: Path | None,
    run: TrainConfig,
    evaluate: Callable[[], Evaluation],
    problems: list[Problem] = PROBLEMS,
) -> Evaluation:
    run = replace(run, start_evaluations=folder)
    return evaluate_start(run, problems, evaluate, lambda seconds: None)


def test_runs_that_begin_alike_measure_once_whatever_they_do_then(tmp_path: Path) -> None:
    first = config(tmp_path / "a")
    assert start(tmp_path / "starts", first, lambda: MEASURED) == MEASURED
    other = config(tmp_path / "b", method="clip", seed=7, learning_rate=3.0, steps=32, estimator="rloo")
    assert start(tmp_path / "starts", other, never) == MEASURED


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.5}, {"model": "embedded-llama"}, {"rollouts": "compact"}, {"eval_samples": 2},
     {"mixed_precision": True}, {"max_response_tokens": 3}, {"task_options": {"digits": 3}}],
)  # fmt: skip
def test_another_start_is_measured(tmp_path: Path, changes: dict[str, object]) -> None:
    start(tmp_path, config(tmp_path / "a"), lambda: MEASURED)
    other = replace(MEASURED, success=0.75)
    assert start(tmp_path, config(tmp_path / "b", **changes), lambda: other) == other


def test_other_problems_are_measured(tmp_path: Path) -> None:
    run, other = config(tmp_path / "a"), replace(MEASURED, problems=1)
    start(tmp_path, run, lambda: MEASURED)
    assert start(tmp_path, run, lambda: other, PROBLEMS[:1]) == other
    harder = [replace(PROBLEMS[0], answer="3"), PROBLEMS[1]]
    assert start(tmp_path, run, lambda: other, harder) == other


def test_a_run_without_a_folder_measures(tmp_path: Path) -> None:
    assert start(None, config(tmp_path), lambda: MEASURED) == MEASURED


def test_what_is_shared_is_what_would_have_been_measured_and_changes_nothing_else(
    tmp_path: Path, uninterrupted: Path
) -> None:
    starts = tmp_path / "starts"
    train(config(tmp_path / "other", seed=3, method="clip", steps=4, eval_every=0, start_evaluations=starts))
    (shared,) = starts.iterdir()
    train(config(tmp_path / "run", start_evaluations=starts))
    assert list(starts.iterdir()) == [shared]
    assert record(tmp_path / "run") == record(uninterrupted)

    kept = json.loads(shared.read_text())
    assert kept["seconds"] > 0
    shared.write_text(json.dumps(kept | {"success": 0.125, "seconds": 1e6}))  # it is this that is read
    run = train(config(tmp_path / "third", steps=4, eval_every=0, start_evaluations=starts))
    assert run.evals()[0]["success"] == 0.125
    # The run that measured took so long: the times of methods are compared.
    assert run.evals()[0]["time_s"] > 1e6
    assert run.end()["training_seconds"] > 1e6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["tether.llm.evaluate.evaluate_model", "tether.llm.train.server_at_hand"])
def test_a_run_that_is_asked_to_stop_before_its_first_batch_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: signal.Signals
) -> None:
    """While the starting model is evaluated, or a server begins to answer: there is nothing to save."""

    def interrupted(*_: object, **__: object) -> Evaluation:
        signal.raise_signal(number)
        raise AssertionError("went on")

    before = signal.signal(number, signal.default_int_handler)
    try:
        monkeypatch.setattr(place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config(tmp_path / "run"))
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert RunFolder.open(tmp_path / "run").evals() == []


def test_in_a_later_evaluation_it_goes_on_to_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Path
) -> None:
    evaluations: list[int] = []

    def interrupted(*args: object, **keywords: object) -> Evaluation:
        evaluations.append(len(evaluations))
        if len(evaluations) == 2:
            signal.raise_signal(signal.SIGINT)
        return evaluate_model(*args, **keywords)

    monkeypatch.setattr("tether.llm.evaluate.evaluate_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path / "run", save_every=16))
    assert [checkpoint.step for checkpoint in RunFolder.open(tmp_path / "run").checkpoints()] == [8]
    train(config(tmp_path / "run", save_every=16, resume=True))
    assert_same_run(tmp_path / "run", uninterrupted)
