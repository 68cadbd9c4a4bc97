from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.errors import CheckpointError, InvalidInputError, TetherWarning
from tether.experiments import RunFolder, find_runs
from tether.experiments.checkpoints import COMPLETE

SETTINGS: dict[str, Any] = {"kl_bound": 0.05, "model": {"width": 64, "layers": (1, 2)}, "steps": 10}


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def begin(path: Path, **changes: Any) -> RunFolder:
    arguments: dict[str, Any] = {"kind": "llm", "label": "troll", "seed": 0, "settings": SETTINGS}
    return RunFolder.create(path, **(arguments | changes))


def save_checkpoint(run: RunFolder, step: int) -> None:
    (run.checkpoint_folder(step) / "state.txt").write_text(str(step))
    run.mark_complete(step)


# ---------------------------------------------------------------------- beginning


def test_the_config_file_holds_everything_to_repeat_the_run(tmp_path: Path) -> None:
    begin(tmp_path / "run").close()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["kind"], config["label"], config["seed"]) == ("llm", "troll", 0)
    assert config["settings"] == {"kl_bound": 0.05, "model": {"width": 64, "layers": [1, 2]}, "steps": 10}
    assert config["versions"]["torch"] == torch.__version__.split("+")[0] or torch.__version__.startswith(
        config["versions"]["torch"]
    )
    assert config["started"].startswith("20")


def test_a_setting_may_be_infinite(tmp_path: Path) -> None:
    begin(tmp_path / "run", settings={"kl_bound": math.inf}).close()
    assert RunFolder.open(tmp_path / "run").config.settings == {"kl_bound": math.inf}


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_is_not_overwritten(tmp_path: Path, finished: bool) -> None:
    with begin(tmp_path / "run") as run:
        run.log(1, reward=0.5)
        if finished:
            run.mark_finished()
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(CheckpointError, match=r"resume=True.*another output folder"):
        begin(tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_things_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds thesis\.txt"):
        begin(tmp_path, resume=resume)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        begin(tmp_path / "run")


def test_what_a_killed_beginning_leaves_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1")
    (tmp_path / ".writing-x1").write_text("{")
    with begin(tmp_path) as run:
        run.log(1, reward=1.0)
    assert len(RunFolder.open(tmp_path).metrics()) == 1


def test_resume_where_nothing_is_begins(tmp_path: Path) -> None:
    with begin(tmp_path / "run", resume=True) as run:
        assert run.metrics() == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "episodic"}, "kind"),
        ({"label": "clip"}, "label"),
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"settings": SETTINGS | {"kl_bound": 0.2}}, "kl_bound: 0.05 then, 0.2 now"),
        ({"settings": SETTINGS | {"model": {"width": 32, "layers": [1, 2]}}}, "model.width: 64 then, 32 now"),
        ({"settings": {**SETTINGS, "extra": 1}}, r"extra: '\(not set\)' then, 1 now"),
        ({"settings": SETTINGS | {"steps": 20}}, "steps: 10 then, 20 now"),
    ],
)
def test_resuming_another_run_is_refused_and_says_what_differs(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    begin(tmp_path / "run").close()
    with pytest.raises(CheckpointError, match=named):
        begin(tmp_path / "run", resume=True, **changes)


def test_more_steps_reopen_a_finished_run_where_that_is_allowed(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.log(10, reward=0.1)
        run.mark_finished()
    free = {"may_change": ["steps", "device"], "length": "steps"}
    with begin(tmp_path / "run", resume=True, settings=SETTINGS | {"device": "cpu"}, **free) as run:
        assert run.finished
        with pytest.raises(CheckpointError, match="finished"):
            run.log(11, reward=0.1)
    longer = SETTINGS | {"steps": 20}
    with begin(tmp_path / "run", resume=True, settings=longer, **free) as run:
        assert not run.finished
        run.log(11, reward=0.1)
    again = RunFolder.open(tmp_path / "run")
    assert again.config.settings["steps"] == 20
    assert [line["step"] for line in again.metrics()] == [10, 11]


def test_resuming_under_other_versions_warns(tmp_path: Path) -> None:
    begin(tmp_path / "run").close()
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text())
    config["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(config))
    with pytest.warns(TetherWarning, match=r"torch 1\.0 -> "):
        begin(tmp_path / "run", resume=True).close()


@pytest.mark.parametrize("changes", [{"kind": ""}, {"label": ""}, {"settings": {"f": print}}])
def test_a_config_that_makes_no_sense_leaves_no_folder(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        begin(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a run folder"),
        ("{", "not a run's configuration"),
        ('{"kind": "llm"}', "not a run's configuration"),
    ],
)
def test_opening_what_is_not_a_run_says_so(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        RunFolder.open(tmp_path)


def test_opening_a_missing_folder_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        RunFolder.open(tmp_path / "nowhere")


# ---------------------------------------------------------------------- numbers


def test_numbers_come_back_as_they_were_even_when_not_finite(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.log(1, a=0.1, b=math.nan, c=-math.inf, d=torch.tensor(0.25), e=True, f=3)
        run.log_eval(1, success=0.5, problems=200)
    line = RunFolder.open(tmp_path / "run").metrics()[0]
    assert (line["a"], line["c"], line["d"], line["e"], line["f"]) == (0.1, -math.inf, 0.25, True, 3)
    assert math.isnan(line["b"])
    assert RunFolder.open(tmp_path / "run").evals()[0]["success"] == 0.5


def test_a_line_is_visible_to_others_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.log(1, a=1.0)
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes().endswith(b"\n")
        assert len(RunFolder.open(tmp_path / "run").metrics()) == 1


@pytest.mark.parametrize(
    ("step", "metrics", "message"),
    [
        (3, {"a": 1.0}, "step 3 is not after step 3"),
        (2, {"a": 1.0}, "truncate_after"),
        (4, {"a": "high"}, "'a' must be a number"),
        (4, {"a": None}, "'a' must be a number"),
        (4, {"a": torch.zeros(2)}, "'a' must be a number"),
        (4, {"time_s": 1.0}, "time_s"),
    ],
)
def test_a_line_that_would_spoil_the_file_is_refused(
    tmp_path: Path, step: int, metrics: dict[str, Any], message: str
) -> None:
    with begin(tmp_path / "run") as run:
        run.log(3, a=1.0)
        with pytest.raises(InvalidInputError, match=message):
            run.log(step, **metrics)
        run.log(4, a=2.0)
        assert [line["a"] for line in run.metrics()] == [1.0, 2.0]


def test_time_counts_training_and_not_the_pause_before_a_resume(tmp_path: Path) -> None:
    clock = FakeClock()
    with begin(tmp_path / "run", clock=clock) as run:
        clock.now += 5.0
        run.log(1, a=1.0)
        clock.now += 7.0
        run.log(2, a=1.0)
    clock.now = 9999.0  # another process, later
    with begin(tmp_path / "run", clock=clock, resume=True) as run:
        run.truncate_after(1)
        clock.now += 2.5
        run.log(2, a=1.0)
    assert [line["time_s"] for line in RunFolder.open(tmp_path / "run").metrics()] == [5.0, 7.5]


def test_reading_refuses_to_write(tmp_path: Path) -> None:
    begin(tmp_path / "run").close()
    run = RunFolder.open(tmp_path / "run")
    for action in (
        lambda: run.log(1, a=1.0),
        lambda: run.log_eval(1, a=1.0),
        lambda: run.save_samples(1, []),
        lambda: run.truncate_after(0),
        lambda: run.checkpoint_folder(1),
        lambda: run.prune_checkpoints(1),
        run.mark_finished,
    ):
        with pytest.raises(CheckpointError, match="not open for writing"):
            action()


def test_samples_are_kept_by_step_and_the_last_is_the_default(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "reference": "2", "reward": 1.0, "tokens": [{"text": "NaN", "kl": math.inf}]}
    with begin(tmp_path / "run") as run:
        assert run.samples() == []
        path = run.save_samples(50, [row])
        run.save_samples(7, [])
    assert path == tmp_path / "run" / "samples" / "step-000050.jsonl"
    reader = RunFolder.open(tmp_path / "run")
    assert reader.sample_steps() == [7, 50]
    assert reader.samples() == [row]
    assert reader.samples(7) == []


# ---------------------------------------------------------------------- one writer, and kill -9

WRITER = """
import sys, time
from tether.experiments import RunFolder
run = RunFolder.create(sys.argv[1], kind="llm", label="troll", seed=0, settings={}, resume=True)
step = 0
while True:
    step += 1
    run.log(step, value=float(step))
    if step % 5 == 0:
        (run.checkpoint_folder(step) / "state").write_text(str(step))
        run.mark_complete(step, keep=2)
    print(step, flush=True)
"""


def test_a_second_writer_is_refused_and_kill_9_frees_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        steps = [int(writer.stdout.readline()) for _ in range(23)]
        assert steps[-1] == 23
        with pytest.raises(CheckpointError, match=f"written by another process .*{writer.pid}"):
            RunFolder.create(path, kind="llm", label="troll", seed=0, settings={}, resume=True)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    with RunFolder.create(path, kind="llm", label="troll", seed=0, settings={}, resume=True) as run:
        checkpoint = run.latest_checkpoint()
        assert checkpoint is not None
        assert (checkpoint.path / "state").read_text() == str(checkpoint.step)
        run.truncate_after(checkpoint.step)
        lines = run.metrics()
        assert [(line["step"], line["value"]) for line in lines] == [
            (step, float(step)) for step in range(1, checkpoint.step + 1)
        ]
        run.log(checkpoint.step + 1, value=0.0)


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_line_cut_by_a_kill_is_dropped_before_the_run_goes_on(tmp_path: Path, cut: int) -> None:
    with begin(tmp_path / "run") as run:
        run.log(1, a=1.0)
    file = tmp_path / "run" / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"step": 2, "a": 2.0, "b": 3}\n'[:cut])
    assert [line["step"] for line in RunFolder.open(tmp_path / "run").metrics()] == [1]
    with begin(tmp_path / "run", resume=True) as run:
        run.log(2, a=2.5)
        assert [line["a"] for line in run.metrics()] == [1.0, 2.5]
    assert file.read_bytes().startswith(whole)


# ---------------------------------------------------------------------- checkpoints and resume


def test_a_resumed_run_has_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def train(run: RunFolder, start: int, stop: int) -> None:
        for step in range(start, stop):
            run.log(step, a=step / 3)
            if step % 2 == 0:
                run.log_eval(step, success=step / 10)
                run.save_samples(step, [{"prompt": str(step)}])
            if step % 4 == 0:
                save_checkpoint(run, step)

    def content(path: Path) -> dict[str, bytes]:
        names = [p for p in sorted(path.rglob("*")) if p.is_file() and p.name not in (".lock", "config.json")]
        return {str(p.relative_to(path)): p.read_bytes() for p in names}

    still = FakeClock()
    with begin(tmp_path / "straight", clock=still) as run:
        train(run, 1, 13)
    with begin(tmp_path / "resumed", clock=still) as run:
        train(run, 1, 8)  # killed after step 7; the last checkpoint is that of step 4
        (run.checkpoint_folder(7) / "half").write_text("")
    with begin(tmp_path / "resumed", clock=still, resume=True) as run:
        checkpoint = run.latest_checkpoint()
        assert checkpoint is not None
        run.truncate_after(checkpoint.step)
        train(run, checkpoint.step + 1, 13)
    assert content(tmp_path / "resumed") == content(tmp_path / "straight")


def test_truncating_to_before_the_start_empties_the_run(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.log_eval(0, success=0.1)
        run.log(1, a=1.0)
        run.truncate_after(-1)
        assert run.metrics() == run.evals() == []
        run.log_eval(0, success=0.1)


def test_a_checkpoint_counts_only_once_marked_complete(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        assert run.latest_checkpoint() is None
        save_checkpoint(run, 1)
        folder = run.checkpoint_folder(2)
        (folder / "half").write_text("half")
        latest = run.latest_checkpoint()
        assert latest is not None
        assert latest.step == 1
        assert run.checkpoint_folder(2) == folder
        assert list(folder.iterdir()) == []


def test_an_empty_or_repeated_checkpoint_is_refused(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.checkpoint_folder(1)
        with pytest.raises(CheckpointError, match="holds no files"):
            run.mark_complete(1)
        with pytest.raises(CheckpointError, match="holds no files"):
            run.mark_complete(9)
        save_checkpoint(run, 2)
        with pytest.raises(CheckpointError, match="complete checkpoint already"):
            run.checkpoint_folder(2)


def test_pruning_keeps_the_newest_complete(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        for step in (1, 2, 3, 4):
            save_checkpoint(run, step)
        (run.checkpoint_folder(5) / "half").write_text("")
        assert run.prune_checkpoints(keep=2) == [1, 2]
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [3, 4]
        assert (run.path / "checkpoints" / "step-000005" / "half").exists()
        with pytest.raises(InvalidInputError, match="keep=0"):
            run.prune_checkpoints(keep=0)
        assert run.prune_checkpoints(keep=5) == []


def test_a_deletion_killed_half_way_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(tmp_path / "run") as run:
        save_checkpoint(run, 1)
        save_checkpoint(run, 2)

        def killed(path: Path) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            run.prune_checkpoints(keep=1)
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [2]
        assert not (run.path / "checkpoints" / "step-000001" / COMPLETE).exists()


@pytest.mark.parametrize("content", ["", "{", "3", "\xff"])
def test_a_damaged_note_of_the_end_is_named_with_what_to_do(tmp_path: Path, content: str) -> None:
    with begin(tmp_path / "run") as run:
        run.log(1, loss=1.0)
        run.mark_finished()
    (tmp_path / "run" / "FINISHED").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"run/FINISHED is damaged \(.*\)\. Restore it, or delete it"):
        RunFolder.open(tmp_path / "run").end()


@pytest.mark.parametrize("line", ['{"loss": 2.0}', '{"step": "two", "loss": 2.0}'])
def test_a_line_without_its_step_is_named(tmp_path: Path, line: str) -> None:
    with begin(tmp_path / "run") as run:
        run.log(1, loss=1.0)
        run.log_eval(1, success=1.0)
    for name in ("metrics.jsonl", "eval.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write(line + "\n")
    run = RunFolder.open(tmp_path / "run")
    for name, read in (("metrics", run.metrics), ("eval", run.evals)):
        with pytest.raises(CheckpointError, match=rf"Line 2 of .*{name}\.jsonl is damaged \(its step is"):
            read()
    with pytest.raises(CheckpointError, match=r"Line 2 of .* Delete that line"):
        begin(tmp_path / "run", resume=True)


# ---------------------------------------------------------------------- finding runs


def test_runs_are_found_below_a_study_but_not_inside_checkpoints(tmp_path: Path) -> None:
    for name in ("study/troll/seed-1", "study/troll/seed-0", "study/clip/seed-0"):
        with begin(tmp_path / name) as run:
            (run.checkpoint_folder(1) / "config.json").write_text("{}")
    study = tmp_path / "study"
    names = ["clip/seed-0", "troll/seed-0", "troll/seed-1"]
    assert find_runs([study]) == [study / name for name in names]
    one = study / "troll" / "seed-0"
    assert find_runs([one, study]) == [one, study / names[0], study / names[2]]


def test_a_path_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        find_runs([tmp_path])


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys; import tether.experiments; "
        "heavy = {'torch', 'matplotlib', 'jinja2', 'rich', 'tensorboard', 'scipy'} & sys.modules.keys(); "
        "print(sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
