"""Several processes at a time: skipped, kept going, stopped in time, and nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scripts import REPOSITORY
from tether.cli import main
from tether.errors import ConfigError
from tether.experiments import RunFolder, job_child
from tether.experiments.jobs import Job, RunFailedError, run_jobs
from tether.experiments.progress import SeveralRuns

# A trainer in miniature, without Tether's imports: writes what a run folder holds, stops when asked to, goes
# on where it was.
TRAINER = """
import json, pathlib, signal, sys, time
folder, steps, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
if sys.argv[4] == "broken":
    sys.exit("no such model")
folder.mkdir(parents=True, exist_ok=True)
config = {"kind": "llm", "label": "x", "seed": 0, "settings": {}, "versions": {}, "started": ""}
(folder / "config.json").write_text(json.dumps(config))
metrics = folder / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
for step in range(done + 1, steps + 1):
    time.sleep(pause)
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step, "time_s": 1.0, "loss": 1.0}) + "\\n")
    if stop:
        (folder / "STOPPED").touch()
        sys.exit(0)
(folder / "FINISHED").write_text(json.dumps({"time": "", "training_seconds": 1.0}))
"""


def job(tmp_path: Path, name: str, steps: int = 2, pause: float = 0.0, broken: bool = False) -> Job:
    word = "broken" if broken else "well"
    command = (sys.executable, "-c", TRAINER, str(tmp_path / name), str(steps), str(pause), word)
    return Job(name, command, tmp_path / name, steps)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_failure_does_not_stop_the_others(tmp_path: Path, first: str) -> None:
    jobs = [job(tmp_path, name, broken=name == "b") for name in sorted("abc", key=lambda name: name != first)]
    finished: list[str] = []
    with pytest.raises(RunFailedError, match=r"The run b in .* exit code 1[\s\S]*no such model"):
        run_jobs(jobs, at_once=1, keep_going=True, on_finished=lambda done: finished.append(done.name))
    assert finished == ["a", "c"]


def test_if_the_first_two_fail_nothing_more_is_started(tmp_path: Path) -> None:
    jobs = [*(job(tmp_path, name, broken=True) for name in "ab"), job(tmp_path, "c")]
    with pytest.raises(RunFailedError, match="no such model"):
        run_jobs(jobs, at_once=1, keep_going=True)
    assert [one.log.exists() for one in jobs] == [True, True, False]


def test_time_up_stops_what_runs_and_the_next_call_goes_on(tmp_path: Path) -> None:
    # A loaded machine may take seconds to start one, and must not finish it.
    jobs = [job(tmp_path, "a", steps=20_000, pause=0.01), job(tmp_path, "b")]
    started = time.monotonic()
    left = run_jobs(jobs, at_once=1, seconds=5.0)
    assert time.monotonic() - started < 100  # half of what the steps take
    assert [one.name for one in left] == ["a", "b"]
    done = len(RunFolder.open(jobs[0].folder).metrics())
    assert 0 < done < 20_000
    assert run_jobs([job(tmp_path, "a", steps=done + 1), jobs[1]], at_once=2) == []
    assert [line["step"] for line in RunFolder.open(jobs[0].folder).metrics()] == list(range(1, done + 2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_terminated_leaves_nothing_running(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As schedulers and closed terminals end a command: its runs would go on, and refuse its next call."""
    one = job(tmp_path, "a", steps=4000, pause=0.01)
    metrics = one.folder / "metrics.jsonl"

    def terminate_once_it_runs() -> None:
        wait_for(metrics)
        os.kill(os.getpid(), number)

    monkeypatch.setattr("tether.cli._run", lambda _: run_jobs([one], at_once=1))
    before = signal.signal(number, signal.SIG_DFL)  # under nohup a hang-up would be ignored
    try:
        killer = threading.Thread(target=terminate_once_it_runs, daemon=True)
        killer.start()
        with pytest.raises(SystemExit) as ending:
            main([])
        assert ending.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    done = metrics.read_bytes()
    time.sleep(0.5)
    assert metrics.read_bytes() == done


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere started runs are not told")
@pytest.mark.parametrize("preloaded", [(), ("tether.experiments.runs",)], ids=["started", "forked"])
def test_runs_stop_when_whoever_started_them_is_killed(preloaded: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "trainer_in_miniature.py").write_text(TRAINER)
    run = tmp_path / "a"
    command = (sys.executable, "-m", "trainer_in_miniature", str(run), "4000", "0.01", "well")
    code = (
        "from pathlib import Path; from tether.experiments.jobs import Job, run_jobs; "
        f"run_jobs([Job('a', {command}, Path({str(run)!r}), 4000)], at_once=1, preloaded={preloaded})"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY / 'src'}"}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment) as process:
        wait_for(run / "metrics.jsonl")
        process.kill()
    wait_for(run / "STOPPED")


def test_a_killed_process_is_noticed_by_what_it_was_about_to_start() -> None:
    """Between the start of a process and its question to be told of that end."""
    child = [sys.executable, job_child.__file__, str(os.getppid()), sys.executable, "-c", "print('started')"]
    ended = subprocess.run(child, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, b"")


def test_what_is_finished_already_is_told_and_not_run_again(tmp_path: Path) -> None:
    one = job(tmp_path, "a")
    run_jobs([one], at_once=1)
    broken = Job("a", (sys.executable, "-c", "raise SystemExit(1)"), one.folder, one.steps)
    told: list[str] = []
    assert run_jobs([broken], at_once=1, on_finished=lambda done: told.append(done.name)) == []
    assert told == ["a"]


def test_time_left_follows_the_work_that_is_left(tmp_path: Path) -> None:
    """Each 10 s half of a run of weight 1 is done; then another of weight 3 is to come."""
    now = [0.0]
    with RunFolder.create(tmp_path / "a", kind="llm", label="x", seed=0, settings={}) as run:
        display = SeveralRuns(
            {"a": (tmp_path / "a", 2), "b": (tmp_path / "b", 2)},
            weights={"a": 1.0, "b": 3.0},
            clock=lambda: now[0],
        )
        assert display.time_left() is None
        for step in (1, 2):
            now[0] += 10.0
            run.log(step, loss=0.0)
            display.refresh()
    assert display.time_left() == pytest.approx(60.0)


def test_forked_jobs_are_like_started_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a server with their imports done: finished, failed with last lines, stopped in time, continued."""
    (tmp_path / "trainer_in_miniature.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)  # `python -m` looks there
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY / 'src'}")

    def forked(name: str, steps: int = 2, pause: float = 0.0, word: str = "well") -> Job:
        arguments = (str(tmp_path / name), str(steps), str(pause), word)
        return Job(name, (sys.executable, "-m", "trainer_in_miniature", *arguments), tmp_path / name, steps)

    preloaded = ("tether.experiments.runs",)
    with pytest.raises(RunFailedError, match=r"The run b in .* exit code 1[\s\S]*no such model"):
        run_jobs([forked("a"), forked("b", word="broken")], at_once=2, keep_going=True, preloaded=preloaded)
    assert forked("a").finished()
    slow = forked("c", steps=20_000, pause=0.01)
    assert run_jobs([slow], at_once=1, seconds=5.0, preloaded=preloaded) == [slow]
    done = len(RunFolder.open(slow.folder).metrics())
    assert 0 < done < 20_000
    assert run_jobs([forked("c", steps=done + 1)], at_once=1, preloaded=preloaded) == []
    assert [line["step"] for line in RunFolder.open(slow.folder).metrics()] == list(range(1, done + 2))


def test_only_modules_are_forked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Only python -m MODULE can be forked"):
        run_jobs([job(tmp_path, "a")], at_once=1, preloaded=("tether.experiments.runs",))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        run_jobs([job(tmp_path, "a")], at_once=1, preloaded=("no_such_module",))


def test_cores_that_a_process_may_not_use_do_not_count() -> None:
    counted = "from tether.experiments.jobs import usable_cores; print(usable_cores())"
    one = min(os.sched_getaffinity(0))
    bound = f"import os; os.sched_setaffinity(0, {{{one}}}); {counted}"
    found = subprocess.run([sys.executable, "-c", bound], capture_output=True, text=True, check=True)
    assert found.stdout == "1\n"
