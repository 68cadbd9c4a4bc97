"""The training loop: what it writes, and that neither crashes nor evaluations change a run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from point_runs import content

from tether.episodic import commands
from tether.episodic.commands import eval_command
from tether.episodic.config import OnPolicyConfig, TrustRegionConfig, UpdateConfig
from tether.episodic.critic import Critic, CriticConfig
from tether.episodic.envs.point_reach import PointReachEnv
from tether.episodic.evaluate import Evaluation, evaluate_learner, evaluation_seeds
from tether.episodic.export import export_run
from tether.episodic.on_policy import OnPolicyLearner
from tether.episodic.options import EvalConfig, ExportConfig
from tether.episodic.policy import PolicyConfig
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.run_kind import EPISODIC_RUNS
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.tce import TCE
from tether.episodic.train import checkpoint_step, load_config, load_learner, train
from tether.errors import CheckpointError, ConfigError, SimulationError
from tether.experiments import RunFolder
from tether.experiments.files import dump_json, load_json
from tether.experiments.run_config import flatten_settings
from tether.experiments.run_data import RunData
from tether.experiments.study_table import StudyTable


def tiny(**changes: Any) -> OnPolicyConfig:
    config = OnPolicyConfig(
        env_id="tether/PointReach-v0",
        seed=3,
        iterations=6,
        episodes=4,
        num_workers=0,
        motion=ProDMPConfig(2, 0.5, relative_goal=True),
        policy=PolicyConfig((8,)),
        critic=CriticConfig((8,), epochs=2, normalise_targets=True),
        trust_region=TrustRegionConfig(0.05, 0.01, target_entropy=-1.0),
        update=UpdateConfig(epochs=2, segment_points=5),
        evaluate_every=2,
        evaluation_episodes=3,
        checkpoint_every=2,
    )
    return replace(config, **changes)


def final_state(run: Path) -> dict[str, Any]:
    checkpoint = RunFolder.open(run).latest_checkpoint()
    assert checkpoint is not None
    state = torch.load(checkpoint.path / "state.pt", weights_only=True)
    assert isinstance(state, dict)
    return state


def assert_same_state(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same_state(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for left, right in zip(first, second, strict=True):
            assert_same_state(left, right)
    else:
        assert first == second


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(tiny(), out)
    return out


def test_a_run_folder_holds_every_iteration_and_evaluation(uninterrupted: Path) -> None:
    run = RunFolder.open(uninterrupted)
    metrics, evals = run.metrics(), run.evals()
    assert run.finished
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["env_steps"] for row in metrics] == [200 * i for i in range(1, 7)]
    assert [(row["step"], row["env_steps"]) for row in evals] == [(0, 0), (2, 400), (4, 800), (6, 1200)]
    promised = {
        "return_mean", "success", "kl_mean_part", "kl_cov_part", "entropy", "projected", "critic_error",
        "sampling_seconds", "critic_seconds", "policy_seconds", "learning_rate",
    }  # fmt: skip
    assert promised <= metrics[0].keys()
    assert {"success_greedy", "return_greedy"} <= evals[0].keys()
    assert all(np.isfinite(value) for row in metrics for value in row.values())
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [4, 6]


def test_a_run_older_than_the_setting_of_its_pull_resumes_as_it_was(tmp_path: Path) -> None:
    old, file = tmp_path / "old", tmp_path / "old" / "config.json"
    pulled, alone = (
        tiny(algo="bbrl", trust_region=TrustRegionConfig(pull_covariance=v)) for v in (True, False)
    )
    train(pulled, tmp_path / "whole")
    train(pulled, old, until=2)
    config = load_json(file.read_bytes())
    del config["settings"]["trust_region"]["pull_covariance"]
    file.write_text(dump_json(config))
    # Reports tell it from no run that pulls the covariance, either.
    read = RunData.read(old, {EPISODIC_RUNS.name: EPISODIC_RUNS}).config.settings
    assert read == RunFolder.open(tmp_path / "whole").config.settings
    with pytest.raises(CheckpointError, match=r"pull_covariance: True then, False now"):
        train(alone, old, resume=True)
    train(pulled, old, resume=True)
    assert_same_state(final_state(old), final_state(tmp_path / "whole"))


def test_a_run_older_than_settings_goes_on_as_it_was(tmp_path: Path) -> None:
    """With the default of a setting it is too old to know, or with what was done before there was one."""
    old, file = tmp_path / "old", tmp_path / "old" / "config.json"
    unshifted = tiny(update=replace(tiny().update, shift_rewards=False))
    train(unshifted, tmp_path / "whole")
    train(unshifted, old, until=2)
    config = load_json(file.read_bytes())
    settings = config["settings"]
    settings["torch_threads"] = settings.pop("learner_threads")
    del settings["update"]["learning_rates_fall_from"], settings["update"]["shift_rewards"]
    file.write_text(dump_json(config))
    assert load_config(old) == unshifted
    late = replace(unshifted, update=replace(unshifted.update, learning_rates_fall_from=0.5))
    for other, difference in (
        (tiny(), "update.shift_rewards: False then, True now"),
        (late, "update.learning_rates_fall_from: 0.0 then, 0.5 now"),
        (replace(unshifted, learner_threads=2), "learner_threads: 1 then, 2 now"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f"({difference})")):
            train(other, old, resume=True)
    train(unshifted, old, resume=True)
    assert_same_state(final_state(old), final_state(tmp_path / "whole"))

    settings["update"]["rates_fall"] = 0.0  # as a setting may have been called once
    file.write_text(dump_json(config))
    with pytest.raises(CheckpointError, match=r"If there is no setting update\.rates_fall any more"):
        train(unshifted, old, resume=True)


def test_the_same_seed_repeats_the_run_and_another_does_not(uninterrupted: Path, tmp_path: Path) -> None:
    train(tiny(), tmp_path / "again")
    train(tiny(seed=4), tmp_path / "other")
    assert content(tmp_path / "again") == content(uninterrupted)
    assert_same_state(final_state(tmp_path / "again"), final_state(uninterrupted))
    assert content(tmp_path / "other") != content(uninterrupted)


def test_evaluations_do_not_change_training(uninterrupted: Path, tmp_path: Path) -> None:
    train(tiny(evaluate_every=1, evaluation_episodes=5), tmp_path / "run")
    assert content(tmp_path / "run")[0] == content(uninterrupted)[0]


@pytest.mark.parametrize("crash_at", [1, 3, 5])
def test_a_crashed_run_resumes_to_the_same_end(uninterrupted: Path, tmp_path: Path, crash_at: int) -> None:
    def crash(step: int, metrics: dict[str, float]) -> None:
        if step == crash_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path / "run", report=crash)
    assert len(content(tmp_path / "run")[0]) == crash_at
    train(tiny(), tmp_path / "run", resume=True)
    assert content(tmp_path / "run") == content(uninterrupted)
    assert_same_state(final_state(tmp_path / "run"), final_state(uninterrupted))


def test_kill_9_and_resume_reproduce_the_run(uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    script = textwrap.dedent(
        f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_training import tiny, train
        train(tiny(), {str(out)!r}, report=lambda step, metrics: time.sleep(0.3))
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 300
    while not (out / "checkpoints" / "step-000002" / "COMPLETE").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not RunFolder.open(out).finished
    train(tiny(), out, resume=True)
    assert content(out) == content(uninterrupted)
    assert_same_state(final_state(out), final_state(uninterrupted))


def test_a_run_stopped_early_goes_on_to_the_same_end(uninterrupted: Path, tmp_path: Path) -> None:
    train(tiny(), tmp_path / "run", until=3)
    assert not RunFolder.open(tmp_path / "run").finished
    metrics, evaluations = content(tmp_path / "run")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    # What it reached is known, also where the unbroken run would not have looked.
    assert [row["step"] for row in evaluations] == [0, 2, 3]
    train(tiny(), tmp_path / "run", resume=True)
    metrics, evaluations = content(tmp_path / "run")
    assert [row["step"] for row in evaluations] == [0, 2, 3, 4, 6]
    assert (metrics, [row for row in evaluations if row["step"] != 3]) == content(uninterrupted)


def raise_exit(number: int, frame: object) -> None:
    """What the command line makes of SIGTERM."""
    raise SystemExit(128 + number)


@pytest.fixture
def _signals_end() -> Iterator[None]:
    """Also where the tests run in the background, whose Ctrl-C is ignored."""
    handlers = {signal.SIGTERM: raise_exit, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == handlers  # put back by whoever took them


@pytest.mark.usefixtures("_signals_end")
@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_ends_a_run_after_its_iteration_with_a_checkpoint(
    uninterrupted: Path, tmp_path: Path, number: signal.Signals, ending: type[BaseException]
) -> None:
    said: list[str] = []

    def interrupt(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            signal.raise_signal(number)

    config = tiny(checkpoint_every=6)
    with pytest.raises(ending) as ended:
        train(config, tmp_path / "run", report=interrupt, say=said.append)
    assert getattr(ended.value, "code", 143) == 143
    run = RunFolder.open(tmp_path / "run")
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [3]
    assert not run.finished
    assert ["with a checkpoint" in line for line in said] == [True]
    train(config, tmp_path / "run", resume=True)
    assert content(tmp_path / "run") == content(uninterrupted)
    assert_same_state(final_state(tmp_path / "run"), final_state(uninterrupted))


@pytest.mark.usefixtures("_signals_end")
def test_a_second_signal_interrupts_at_once(tmp_path: Path) -> None:
    def interrupt(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny(checkpoint_every=6), tmp_path / "run", report=interrupt)
    assert RunFolder.open(tmp_path / "run").checkpoints() == []


@pytest.mark.usefixtures("_signals_end")
def test_a_run_asked_to_stop_in_its_last_iteration_is_complete(tmp_path: Path) -> None:
    def interrupt(step: int, metrics: dict[str, float]) -> None:
        if step == 2 and "return_mean" in metrics:  # not the evaluation's, which follows
            signal.raise_signal(signal.SIGTERM)

    train(tiny(iterations=2), tmp_path / "run", report=interrupt)
    assert RunFolder.open(tmp_path / "run").finished


def test_the_seed_of_the_evaluation_is_no_seed_of_a_training(tmp_path: Path) -> None:
    config = tiny(seed=0x7E7E)
    with EpisodeSampler(config.env_id, 0, config.seed) as sampler:
        assert sampler.reset(2).seeds == evaluation_seeds(2)  # why
    with pytest.raises(ConfigError, match=r"seed 32382 .* very episodes .* another seed"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("update", [UpdateConfig(segment_points=51), UpdateConfig(segment_points=5)])
def test_cuts_that_do_not_fit_the_environment_leave_no_folder_behind(
    tmp_path: Path, update: UpdateConfig
) -> None:
    motion = ProDMPConfig(2, 0.5, delay=0.0 if update.segment_points > 50 else 1.0)
    with pytest.raises(ConfigError, match=r"50 steps is cut at|lets nothing move"):
        train(tiny(update=update, motion=motion), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resuming_a_finished_run_changes_nothing(uninterrupted: Path) -> None:
    before = content(uninterrupted)
    train(tiny(), uninterrupted, resume=True)
    assert content(uninterrupted) == before


def test_a_finished_run_without_checkpoints_keeps_what_it_measured(
    uninterrupted: Path, tmp_path: Path
) -> None:
    """With other workers, too, which change no number: there is nothing left to go on from."""
    kept = tmp_path / "kept"
    shutil.copytree(uninterrupted, kept)
    shutil.rmtree(kept / "checkpoints")
    before = [RunFolder.open(kept).metrics(), RunFolder.open(kept).evals()]
    assert train(tiny(num_workers=1), kept, resume=True).finished
    assert [RunFolder.open(kept).metrics(), RunFolder.open(kept).evals()] == before


def test_the_step_of_a_run_in_training_is_that_of_the_policy_measured(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    latest = max(run.glob("checkpoints/step-*"))
    later = latest.with_name("step-000007")

    def meanwhile(*args: Any, **kwargs: Any) -> Evaluation:
        shutil.copytree(latest, later, dirs_exist_ok=True)
        return evaluate_learner(*args, **kwargs)

    monkeypatch.setattr(commands, "evaluate_learner", meanwhile)
    assert eval_command(EvalConfig(run, episodes=2))["step"] == 6
    assert checkpoint_step(run) == 7


def test_policy_and_critic_take_the_threads_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They learn side by side, each in a thread of Python's with its own idea of PyTorch's."""
    seen: dict[str, int] = {}

    def noting(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen[name] = torch.get_num_threads()
            return inner(*args, **kwargs)

        return noted

    for owner, name in ((Critic, "fit"), (OnPolicyLearner, "_improve_policy")):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    before = torch.get_num_threads()
    try:
        train(tiny(iterations=1, learner_threads=2), tmp_path / "run")
    finally:
        torch.set_num_threads(before)
    assert seen == {"fit": 2, "_improve_policy": 2}


def test_trackers_get_a_robots_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(tiny(iterations=2), tmp_path / "run", trackers=("tensorboard",))
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    for source, rows in (("train", run.metrics()), ("eval", run.evals())):
        for name in rows[0].keys() - {"step", "time_s"}:
            found = [(event.step, event.value) for event in events.Scalars(f"{source}/{name}")]
            assert found == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows], name


def test_a_resumed_run_must_be_the_same_run(uninterrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="episodes: 4 then, 5 now"):
        train(tiny(episodes=5), uninterrupted, resume=True)
    # Before environments are made, which may take long.
    monkeypatch.setattr("tether.episodic.train.EpisodeSampler", None)
    with pytest.raises(CheckpointError, match="already holds a finished run"):
        train(tiny(), uninterrupted)


def test_a_branch_goes_on_as_the_run_does_and_with_other_settings_otherwise(
    uninterrupted: Path, tmp_path: Path
) -> None:
    origin = uninterrupted / "checkpoints" / "step-000004"
    same = tmp_path / "same"
    train(tiny(), same, branch_from=origin)
    assert_same_state(final_state(same), final_state(uninterrupted))
    metrics, evals = content(uninterrupted)
    assert content(same) == (
        [row for row in metrics if row["step"] > 4],
        [row for row in evals if row["step"] >= 4],
    )

    slow = tiny(iterations=8, update=replace(tiny().update, learning_rate=1e-6))
    train(slow, tmp_path / "slow", branch_from=origin)
    branched = RunFolder.open(tmp_path / "slow")
    assert [row["step"] for row in branched.metrics()] == [5, 6, 7, 8]
    assert content(tmp_path / "slow")[0][0] != content(same)[0][0]
    assert load_config(tmp_path / "slow") == slow
    assert branched.config.settings["branch_from"] == str(origin)


def test_a_branch_killed_before_its_first_checkpoint_begins_there_again(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "run")
    origin, branch = tmp_path / "run" / "checkpoints" / "step-000004", tmp_path / "branch"
    with monkeypatch.context() as patched:
        patched.setattr(TCE, "update", lambda self, progress: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tiny(), branch, branch_from=origin)
    with pytest.raises(CheckpointError, match=r"branch_from: '.*step-000004' then, '\(not set\)' now"):
        train(tiny(), branch, resume=True)
    train(tiny(), branch, branch_from=origin, resume=True, until=5)
    shutil.rmtree(tmp_path / "run")  # the branch has a checkpoint of its own by now
    train(tiny(), branch, branch_from=origin, resume=True)
    assert_same_state(final_state(branch), final_state(uninterrupted))
    assert [row["step"] for row in RunFolder.open(branch).evals()] == [4, 5, 6]


def test_a_branch_that_cannot_go_on_leaves_no_folder_behind(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, out = uninterrupted / "checkpoints", tmp_path / "branch"
    shutil.copytree(uninterrupted, tmp_path / "broken")
    broken = tmp_path / "broken" / "checkpoints" / "step-000004"
    (broken / "state.pt").write_bytes(cut((broken / "state.pt").read_bytes()))
    refusals = [
        (tiny(), broken, {}, CheckpointError, r"state\.pt has 100 bytes.*another step \(\[6\] are there\)"),
        (tiny(), uninterrupted, {}, CheckpointError, "is no checkpoint to branch from.*step-000050"),
        (tiny(), checkpoints / "step-000005", {}, CheckpointError, r"it has those of steps \[4, 6\]"),
        (tiny(), tmp_path / "no" / "checkpoints" / "step-000004", {}, CheckpointError, "no such folder"),
        (tiny(seed=4), checkpoints / "step-000004", {}, ConfigError, "its run, seed 3; got 4"),
        (tiny(), checkpoints / "step-000006", {}, ConfigError, "6 iterations behind.* to end after 6"),
        (tiny(), checkpoints / "step-000004", {"until": 2}, ConfigError, "to end after 2.*a later until"),
    ]
    with monkeypatch.context() as patched:  # before environments are made, which may take long
        patched.setattr("tether.episodic.train.EpisodeSampler", None)
        for config, origin, options, error, words in refusals:
            with pytest.raises(error, match=words):
                train(config, out, branch_from=origin, **options)
    with pytest.raises(CheckpointError, match="'policy' does not fit this run"):
        train(tiny(policy=PolicyConfig((9,))), out, branch_from=checkpoints / "step-000004")
    with pytest.raises(CheckpointError, match="checkpoint is of algo 'tce', but this is 'bbrl'"):
        train(tiny(algo="bbrl"), out, branch_from=checkpoints / "step-000004")
    assert not out.exists()


def test_a_trained_learner_is_loaded_and_evaluates_as_recorded(uninterrupted: Path) -> None:
    with EpisodeSampler("tether/PointReach-v0") as sampler:
        learner = load_learner(uninterrupted, sampler.spec)
        result = evaluate_learner(learner, sampler, 3)
        earlier = evaluate_learner(load_learner(uninterrupted, sampler.spec, step=4), sampler, 3)
    recorded = {row["step"]: row["return_greedy"] for row in RunFolder.open(uninterrupted).evals()}
    assert result.returns.mean() == recorded[6]
    assert earlier.returns.mean() == recorded[4]
    assert load_config(uninterrupted) == tiny()


def test_a_checkpoint_of_another_environment_or_step_is_refused(uninterrupted: Path, tmp_path: Path) -> None:
    with EpisodeSampler("tether/PointReach-v0") as sampler:
        spec = sampler.spec
    with pytest.raises(CheckpointError, match=r"was trained in tether/PointReach-v0; .*tether/HopperJump-v0"):
        load_learner(uninterrupted, replace(spec, env_id="tether/HopperJump-v0"))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; it has those of steps \[4, 6\]"):
        load_learner(uninterrupted, spec, step=5)
    with RunFolder.create(tmp_path / "llm", kind="llm", label="troll", seed=0, settings={}):
        pass
    with pytest.raises(CheckpointError, match="kind 'llm', not an episodic one"):
        load_config(tmp_path / "llm")


def cut(content: bytes) -> bytes:
    return content[:100]


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(("damage", "words"), [(cut, "has 100 bytes"), (flip_a_bit, "holds other bytes")])
def test_a_damaged_checkpoint_is_named_and_never_acts(
    damage: Callable[[bytes], bytes], words: str, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    state = run / "checkpoints" / "step-000006" / "state.pt"
    state.write_bytes(damage(state.read_bytes()))
    with EpisodeSampler("tether/PointReach-v0") as sampler:
        with pytest.raises(CheckpointError, match=rf"state\.pt {words}.*another step \(\[4\] are there\)"):
            load_learner(run, sampler.spec)
        load_learner(run, sampler.spec, step=4)
    with pytest.raises(CheckpointError, match="is damaged"):
        export_run(ExportConfig(run, tmp_path / "robot", formats=()))
    assert not (tmp_path / "robot").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", [1]], ids=["empty", "cut", "another"])
def test_a_state_from_before_sums_were_noted_is_named_if_it_cannot_be_read(
    content: bytes | list[int], uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    checkpoint = run / "checkpoints" / "step-000006"
    (checkpoint / "COMPLETE").write_text('{"step": 6}')
    if isinstance(content, bytes):
        (checkpoint / "state.pt").write_bytes(content)
    else:
        torch.save(content, checkpoint / "state.pt")
    with (
        EpisodeSampler("tether/PointReach-v0") as sampler,
        pytest.raises(CheckpointError, match=r"state\.pt (is not|holds no state)"),
    ):
        load_learner(run, sampler.spec)


def test_nan_from_the_simulator_stops_the_run_with_the_step_and_leaves_it_resumable(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, steps = PointReachEnv.step, 0

    def step(self: PointReachEnv, action: Any) -> Any:
        nonlocal steps
        steps += 1
        observation, reward, *rest = plain(self, action)
        return observation, float("nan") if steps == 930 else reward, *rest

    with monkeypatch.context() as patch:
        patch.setattr(PointReachEnv, "step", step)
        with pytest.raises(SimulationError, match=r"^iteration 4: .*not finite at step \d+ of the episode"):
            train(tiny(), tmp_path / "run")
    assert 0 < len(content(tmp_path / "run")[0]) < 6
    train(tiny(), tmp_path / "run", resume=True)
    assert content(tmp_path / "run") == content(uninterrupted)


@pytest.mark.parametrize("name", ["distance", "success", "sampling_seconds"])
def test_a_number_that_would_hide_another_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the environment's own, of every run's, of the loop's."""
    update = TCE.update
    monkeypatch.setattr(TCE, "update", lambda self, progress: update(self, progress) | {name: 42.0})
    with pytest.raises(ConfigError, match=rf"PointReach-v0 and tce both measure {name}.*TCE\.update"):
        train(tiny(), tmp_path / "run")


def test_an_unknown_environment_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Unknown environment 'tether/Nowhere-v0'\..* Known: "):
        train(tiny(env_id="tether/Nowhere-v0"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "episodic" / "episodic.csv"


def test_configurations_of_recorded_runs_are_still_read(tmp_path: Path) -> None:
    """They were written by earlier versions; no setting of theirs is unknown, lost or changed."""
    for run in StudyTable(RECORDED).select():
        recorded = flatten_settings(run.config.settings)
        config = run.config
        folder = tmp_path / run.path.parent.name / run.path.name
        RunFolder.create(
            folder, kind=config.kind, label=config.label, seed=config.seed, settings=config.settings
        )
        read = flatten_settings(load_json(dump_json(load_config(folder).as_dict())))
        assert [n for n in recorded if recorded[n] != read.get(n)] == ["headline", "torch_threads"], run.path


def test_checkpoints_keep_the_form_that_earlier_versions_wrote(uninterrupted: Path) -> None:
    state = final_state(uninterrupted)
    assert state.keys() == {"agent", "sampler", "env_steps"}
    networks = {"policy", "critic", "policy_optimizer", "critic_optimizer"}
    assert state["agent"].keys() == {"env_id", "algo", "generator", *networks}
