"""Training from the command line: what it writes, what it refuses, and that nothing is ever lost."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from short_run import SETTINGS, assert_same_run, config, record, start, steps_logged, wait_until

from tether.errors import CheckpointError, ConfigError, TetherError
from tether.experiments import RunFolder, TrainingProgress
from tether.experiments.peak_memory import StepMeter, peak_memory
from tether.llm.callbacks import MetricsCallback
from tether.llm.compare_config import CompareConfig
from tether.llm.models import embedded_model_path
from tether.llm.train import train


def test_a_run_records_every_step_and_evaluation(uninterrupted):
    run = RunFolder.open(uninterrupted)
    assert run.finished
    assert [line["step"] for line in run.metrics()] == list(range(1, 17))
    assert [line["step"] for line in run.evals()] == [0, 8, 16]
    wanted = {"reward", "entropy", "kl_mean", "kl_max", "projected", "step_seconds", "completion_length"}
    assert wanted <= set().union(*run.metrics())
    assert max(line["kl_max"] for line in run.metrics()) > 0
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [12, 16]


def test_an_evaluation_notes_how_many_problems_the_split_really_has(tmp_path):
    """Or intervals would be those of problems nobody asked."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    for name, own in (("train", rows[5:]), ("test", rows[:5])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, own)))
    changes = {
        "task": "custom", "task_options": {"path": str(tmp_path), "verifier": "number", "chat": False},
        "eval_split": "test", "eval_problems": 12, "steps": 4, "eval_every": 0, "preflight": "off",
    }  # fmt: skip
    run = train(config(tmp_path / "run", **changes))
    assert [line["problems"] for line in run.evals()] == [5, 5]
    assert "| 5 |" in (run.path / "model" / "README.md").read_text()


def test_the_second_embedded_model_trains(tmp_path):
    run = train(config(tmp_path / "run", model="embedded-llama", steps=4, eval_problems=4, eval_every=0))
    assert run.finished
    assert max(line["kl_max"] for line in run.metrics()) > 0
    started, trained = (
        load_file(folder / "model.safetensors")
        for folder in (embedded_model_path("embedded-llama"), run.path / "model")
    )
    assert started.keys() == trained.keys()
    assert all(not started[name].equal(trained[name]) for name in started)


@pytest.mark.filterwarnings("ignore:Every batch of rollouts serves a single update")
def test_a_step_of_sgd_is_as_large_as_its_gradient(tmp_path):
    """Where every weight with a gradient would move by the learning rate under AdamW."""
    changes = {"optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 1e-3}
    once = {"steps": 1, "updates_per_rollout": 1, "save_every": 1, "eval_every": 0, "eval_problems": 4}
    run = train(config(tmp_path / "run", **changes, **once))
    started, trained = (
        load_file(folder / "model.safetensors") for folder in (embedded_model_path(), run.path / "model")
    )
    moved = sum((trained[name] - started[name]).square().sum().item() for name in started) ** 0.5
    assert moved == pytest.approx(0.5 * 1e-3, rel=0.01)


def test_a_run_measures_what_its_steps_take(uninterrupted):
    if peak_memory("cpu") is None:
        pytest.skip("this system keeps no resettable mark of the largest resident set")
    lines = RunFolder.open(uninterrupted).metrics()
    peaks = [line["resident_bytes_max"] for line in lines]
    assert len(peaks) == 16
    assert all(0 < line["processor_seconds"] < 60 for line in lines)
    # Zero where every step fits into memory that earlier tests of this process took and freed.
    assert 0 <= max(peaks) < 1e9
    end = json.loads((uninterrupted / "FINISHED").read_text())
    assert end["peak_memory_bytes"] == max(peaks)


def test_what_a_step_takes_is_read_before_the_evaluation_that_follows(tmp_path):
    class Scripted(StepMeter):
        highest = 100

        def begin(self):
            self.highest = 0

        def end(self):
            return {"device_bytes_max": self.highest}

    meter, settings = Scripted("cpu"), config(tmp_path / "run")
    with RunFolder.create(tmp_path / "run", kind="llm", label="x", seed=0, settings={}) as run:
        callback = MetricsCallback(run, TrainingProgress(1, "x"), settings, meter)
        callback.on_step_begin(None, None, None)
        meter.highest = 7
        callback.on_step_end(None, None, None)
        meter.highest = 900  # an evaluation
        callback.on_log(None, SimpleNamespace(global_step=1), None, logs={"loss": 0.5})
        assert run.metrics()[0]["device_bytes_max"] == 7


def test_the_first_update_of_each_batch_starts_at_the_old_policy(uninterrupted):
    for line in RunFolder.open(uninterrupted).metrics():
        if (line["step"] - 1) % 4 == 0:
            assert line["kl_max"] < 1e-5


def test_samples_carry_every_token_with_its_divergence(uninterrupted):
    rows = RunFolder.open(uninterrupted).samples()
    assert rows
    for row in rows:
        assert row["reward"] in (0.0, 1.0)
        assert all(token["kl"] >= 0 for token in row["tokens"])
        text = "".join(token["text"] for token in row["tokens"])
        assert (text.removesuffix("<eos>") == row["reference"]) == (row["reward"] == 1.0)


def test_two_kills_and_resumes_give_the_uninterrupted_run(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    for more, steps in (((), 6), (("--resume",), 11)):
        process = start(folder, *more)
        wait_until(lambda steps=steps: steps_logged(folder) >= steps, process)
        process.kill()
        process.wait()
        assert not (folder / "FINISHED").exists()
    train(config(folder, resume=True))
    assert_same_run(folder, uninterrupted)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_and_resumes_give_the_uninterrupted_run(tmp_path, uninterrupted):
    """From before the folder exists to after the last checkpoint: whatever a kill hits, nothing is lost.

    A run that comes to its end between two kills is compared, and another begins.
    """
    chance = random.Random(0)
    began = time.monotonic()
    assert start(tmp_path / "measured").wait() == 0
    duration = time.monotonic() - began
    kills, runs = 0, 1
    while kills < 20:
        folder = tmp_path / f"run-{runs}"
        process = start(folder, "--resume")
        try:
            assert process.wait(timeout=chance.uniform(0.2, 1.05) * duration) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        else:
            assert_same_run(folder, uninterrupted)
            runs += 1
    train(config(tmp_path / f"run-{runs}", resume=True))
    assert_same_run(tmp_path / f"run-{runs}", uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_checkpoint_and_resume_gives_the_uninterrupted_run(tmp_path, uninterrupted, number):
    folder = tmp_path / "run"
    # Too rare to be there by themselves: the checkpoint found afterwards is the interrupt's.
    process = start(folder, "--save-every", "16")
    wait_until(lambda: steps_logged(folder) >= 5, process)
    process.send_signal(number)
    assert process.wait(timeout=300) == 128 + number  # or what comes next would take it for finished
    run = RunFolder.open(folder)
    latest = run.latest_checkpoint()
    assert latest is not None
    assert latest.step in (8, 12)
    assert not run.finished
    train(config(folder, resume=True, save_every=16))
    assert_same_run(folder, uninterrupted)


def test_measuring_more_often_changes_nothing_else(tmp_path, uninterrupted):
    train(config(tmp_path / "run", eval_every=4))
    assert record(tmp_path / "run")["metrics"] == record(uninterrupted)["metrics"]


def test_checks_before_training_change_no_number(tmp_path, uninterrupted):
    train(config(tmp_path / "run", preflight="off"))
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_finished_run_is_left_alone_on_resume(tmp_path, uninterrupted):
    before = record(uninterrupted)
    train(config(uninterrupted, resume=True))
    assert record(uninterrupted) == before


def test_a_folder_with_a_run_is_not_overwritten(uninterrupted):
    with pytest.raises(CheckpointError, match="resume"):
        train(config(uninterrupted))


def test_fewer_steps_than_a_run_has_done_are_refused_and_its_folder_stays(tmp_path):
    longer, fewer = config(tmp_path), config(tmp_path, steps=4, resume=True)
    arguments = {"kind": "llm", "label": longer.label, "seed": 0, "settings": longer.settings()}
    with RunFolder.create(tmp_path, **arguments) as run:
        (run.checkpoint_folder(8) / "weights").write_text("those of step 8")
        run.mark_complete(8)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="a run of 8 steps, and steps=4 asks for fewer"):
        train(fewer)
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("method", ["clip", "none"])
def test_rivals_are_measured_like_troll(tmp_path, method):
    run = train(config(tmp_path / "run", method=method, steps=4, eval_every=0))
    lines = RunFolder.open(run.path).metrics()
    assert lines[-1]["kl_max"] > 0
    assert all(line["projected"] == 0 for line in lines)


def test_lora_trains_and_leaves_a_whole_model(tmp_path):
    train(config(tmp_path / "run", lora_rank=4, steps=4, eval_every=0))
    names = load_file(tmp_path / "run" / "model" / "model.safetensors").keys()
    assert not any("lora" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "/no/such/folder"}, "no model folder"),
        ({"task": "chess"}, "Unknown task"),
        ({"task": "gsm8k", "task_options": {"path": "/no/such/file.jsonl"}}, "no/such/file"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(TetherError, match=message):
        train(config(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"responses_per_prompt": 1}, "at least 2"),
        ({"save_every": 3}, "multiple of updates_per_rollout"),
        ({"prompts_per_rollout": 3, "responses_per_prompt": 3}, "equal updates"),
        ({"micro_batch_size": 3}, "does not divide"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"learning_rate": math.inf}, "learning_rate must be positive and finite, got inf"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be positive and finite, got -1.0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be positive and finite, got nan"),
        ({"warmup_steps": -3}, "warmup_steps must be 0 or more, and finite; got -3"),
        ({"reference_penalty": -3.0}, "reference_penalty must be 0 or more, and finite; got -3.0"),
    ],
)
def test_settings_out_of_range_name_themselves(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **changes)


def test_a_comparison_needs_distinct_methods_and_seeds():
    with pytest.raises(ConfigError, match="repeat"):
        CompareConfig(seeds=(0, 0))


def test_a_comparison_skips_what_is_finished_and_reports(tmp_path, capfd):
    from tether.cli import main

    options = [part for name, value in SETTINGS.items() for part in (f"--train.{name}", str(value))]
    arguments = ["llm", "compare", "--output", str(tmp_path), *options, "--train.steps", "4"]
    for _ in range(2):
        with pytest.raises(SystemExit) as ending:
            main(arguments)
        assert ending.value.code == 0
    shown = capfd.readouterr().out
    assert shown.count("Report: file:") == 2
    for method in ("troll", "clip"):
        run = RunFolder.open(tmp_path / f"{method}-seed0")
        assert run.finished
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
        assert run.config.settings["method"]["name"] == method
    assert (tmp_path / "report" / "report.html").is_file()


def test_a_failing_run_of_a_comparison_says_what_it_printed(tmp_path):
    from tether.experiments.jobs import RunFailedError
    from tether.llm.compare import compare

    broken = config(tmp_path, model="/no/such/folder")
    with pytest.raises(RunFailedError, match="no model folder"):
        compare(CompareConfig(output=tmp_path, methods=("troll",), train=broken))
