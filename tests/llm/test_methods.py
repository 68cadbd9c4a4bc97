"""Rivals and estimators through `tether llm train`: the same run twice, resumed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import short_run
from safetensors.torch import load_file

from tether.experiments import RunFolder
from tether.integrations import packing
from tether.llm.callbacks import MetricsCallback
from tether.llm.config import TrainConfig
from tether.llm.tasks import make_task
from tether.llm.train import train


def config(output: Path, **changes: object) -> TrainConfig:
    return short_run.config(output, **{"steps": 8, "eval_problems": 8, **changes})


def model(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same_model(first: Path, second: Path) -> None:
    ours, theirs = model(first), model(second)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_the_clip_is_the_same_method_by_either_name(tmp_path: Path) -> None:
    """TRL's own clip and ours end in the same weights, up to the rounding Adam lets through."""
    for name in ("clip", "ppo_clip"):
        train(config(tmp_path / name, method=name))
    ours, theirs = model(tmp_path / "ppo_clip"), model(tmp_path / "clip")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4


@pytest.mark.parametrize("method", ["troll", "sapo"])
def test_ppo_with_a_critic_resumes_bit_for_bit(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"method": method, "estimator": {"name": "ppo", "gae_lambda": 0.9}}
    train(config(tmp_path / "whole", **changes))
    log = MetricsCallback.on_log

    def break_off(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 6:
            raise RuntimeError("the power went")
        log(self, args, state, control, **rest)

    with monkeypatch.context() as broken:
        broken.setattr(MetricsCallback, "on_log", break_off)
        with pytest.raises(RuntimeError, match="the power went"):
            train(config(tmp_path / "parts", **changes))
    train(config(tmp_path / "parts", **changes, resume=True))
    assert_same_model(tmp_path / "parts", tmp_path / "whole")
    lines = RunFolder.open(tmp_path / "parts").metrics()
    assert [line["critic_loss"] for line in lines] == [
        line["critic_loss"] for line in RunFolder.open(tmp_path / "whole").metrics()
    ]
    assert [line["step"] for line in lines if "explained_variance" in line] == [1, 5]
    assert max(line["kl_max"] for line in lines) > 0


def test_a_stop_acts_with_a_critic_and_is_logged(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run", kl_stop=0.05, estimator="ppo"))
    lines = RunFolder.open(run.path).metrics()
    assert [line["stopped"] for line in lines][:2] == [0, 1]


@pytest.mark.parametrize("method", ["troll", "sapo"])
def test_the_network_is_held_to_a_budget_and_that_is_logged(tmp_path: Path, method: str) -> None:
    run = train(config(tmp_path / "run", method=method, step_back=1e-4, step_back_every=2))
    lines = RunFolder.open(run.path).metrics()
    assert ["network_kl" in line for line in lines] == [line["step"] % 2 == 0 for line in lines]
    assert 0 < max(line.get("network_kl", 0) for line in lines) <= 1e-4
    assert max(line.get("network_kl_before", 0) for line in lines) > 1e-4


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_estimators_train(tmp_path: Path, estimator: str) -> None:
    run = train(config(tmp_path / "run", estimator=estimator, steps=4, eval_every=0))
    assert RunFolder.open(run.path).metrics()[-1]["kl_max"] > 0


@pytest.mark.parametrize(
    "changes",
    [{"method": "troll", "estimator": "ppo"}, {"method": "clip"}, {"method": "sapo"}],
    ids=lambda changes: changes["method"],
)
def test_packed_sequences_change_nothing_but_rounding(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run that began on padded ones may go on packed: what memory takes may change on resume."""
    seen: list[int] = []
    original = packing._run_packed
    monkeypatch.setattr(packing, "_run_packed", lambda *a, **k: seen.append(1) or original(*a, **k))
    lines = {}
    for packed in (False, True):
        assert not seen
        folder = tmp_path / str(packed)
        run = train(config(folder, steps=4, eval_every=0, pack_sequences=packed, **changes))
        lines[packed] = RunFolder.open(run.path).metrics()
    assert seen
    for name in ("loss", "kl_mean", "kl_max", "entropy", "grad_norm"):
        values = {packed: [line[name] for line in lines[packed]] for packed in lines}
        assert values[True] == pytest.approx(values[False], rel=1e-2, abs=1e-4), name
    train(config(tmp_path / "False", eval_every=0, pack_sequences=True, resume=True, **changes))
    assert len(RunFolder.open(tmp_path / "False").metrics()) == 8


def test_what_was_chosen_is_in_the_label_and_the_numbers(tmp_path: Path) -> None:
    method = {"name": "dppo", "divergence": "top-k-kl", "divergence_low": 1e-4, "divergence_high": 1e-4}
    run = train(config(tmp_path / "run", method=method, steps=4, eval_every=0))
    found = RunFolder.open(run.path)
    assert found.config.label == "dppo divergence=top-k-kl, divergence_low=0.0001, divergence_high=0.0001"
    last = found.metrics()[-1]
    assert last["clipped"] > 0
    assert last["divergence_max"] > 1e-4
    assert found.metrics()[0]["tokens"] > 0


def test_one_update_a_batch_trains_and_keeps_samples(tmp_path: Path) -> None:
    with pytest.warns(match="single update"):
        run = train(
            config(
                tmp_path / "run",
                method="gmpo",
                updates_per_rollout=1,
                steps=2,
                eval_every=2,
                save_every=2,
            )
        )
    assert RunFolder.open(run.path).samples()


def test_held_out_problems_come_from_the_split_that_was_asked_for(tmp_path: Path) -> None:
    task = make_task("arithmetic")
    prompts = {
        split: [problem.prompt for problem in task.problems(split, 8, 0)] for split in ("validation", "test")
    }
    assert prompts["validation"] != prompts["test"]
    seen: list[str] = []
    original = type(task).problems

    def problems(self: Any, split: Any, count: int, seed: int) -> Any:
        seen.append(split)
        return original(self, split, count, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(task), "problems", problems)
        train(config(tmp_path / "run", eval_split="test", steps=4))
    assert "test" in seen
    assert "validation" not in seen
