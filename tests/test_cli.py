"""The command a person types: help, options, files, errors."""

from __future__ import annotations

import errno
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import REPOSITORY
from tether.cli import _parse, main
from tether.experiments.settings_file import write_settings
from tether.llm.config import TrainConfig
from tether.llm.eval_config import EvalConfig


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def test_without_arguments_it_lists_the_commands(capsys):
    assert run() == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("llm train", "llm eval", "llm compare", "report"))


def test_an_unknown_command_is_named_and_the_known_ones_listed(capsys):
    assert run("llm", "fly") == 2
    shown = capsys.readouterr().err
    assert "no command 'llm fly'" in shown
    assert "llm train" in shown
    assert "Did you mean" not in shown
    assert run("llm", "trian") == 2
    assert "no command 'llm trian'. Did you mean 'llm train'?" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_the_command_without_a_traceback():
    command = [sys.executable, "-u", "-m", "tether"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_pipe_that_breaks_elsewhere_is_no_reader(monkeypatch):
    def broken(arguments):
        raise BrokenPipeError("a worker died")

    monkeypatch.setattr("tether.cli._run", broken)
    with pytest.raises(BrokenPipeError, match="a worker died"):
        main([])


# On a terminal of its own: says that it stops when asked to, as a run does, and saves.
COMMAND = """
import fcntl, pathlib, signal, sys, termios, time, tether.cli
saved = pathlib.Path(sys.argv[1])

def save(*_):
    print("stopping", flush=True)
    saved.touch()

def work(_):
    signal.signal(signal.SIGTERM, save)
    print("begun", flush=True)
    while not saved.exists():
        time.sleep(0.05)
    return 0

fcntl.ioctl(1, termios.TIOCSCTTY, 0)
tether.cli._run = work
tether.cli.main([])
"""


def test_a_closed_terminal_asks_a_command_to_save_and_stop(tmp_path):
    terminal, inside = pty.openpty()
    command = [sys.executable, "-c", COMMAND, str(tmp_path / "saved")]
    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup it would be ignored
    ) as process:  # fmt: skip
        os.close(inside)
        assert os.read(terminal, 7).startswith(b"begun")
        os.close(terminal)
        assert process.wait(60) == 0
    assert (tmp_path / "saved").exists()


def test_a_hang_up_that_is_ignored_stays_ignored(monkeypatch):
    """Studies are started under nohup, to outlive their terminal."""
    monkeypatch.setattr("tether.cli._run", lambda _: int(signal.getsignal(signal.SIGHUP) != signal.SIG_IGN))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("words", [("llm",), ("llm", "--help"), ("episodic", "-h")])
def test_a_group_of_commands_explains_itself(words, capsys):
    assert run(*words) == 0
    assert f"tether {words[0]} train" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("llm", "train"),
        ("llm", "eval"),
        ("llm", "compare"),
        ("episodic", "train"),
        ("episodic", "eval"),
        ("episodic", "render"),
        ("episodic", "compare"),
        ("report",),
    ],
)
def test_each_command_explains_its_options(words, capsys):
    assert run(*words, "--help") == 0
    assert "--output" in capsys.readouterr().out


def test_a_tether_error_is_one_message_and_exit_code_1(capsys, tmp_path):
    assert run("llm", "train", "--model", "/no/such/folder", "--output", str(tmp_path / "run")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("tether: ")
    assert "/no/such/folder" in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()


def test_options_typed_besides_a_file_override_it(tmp_path, capsys):
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"model: /from/file\noutput: {tmp_path / 'run'}\n")
    assert run("llm", "train", "--config", str(settings)) == 1
    assert "/from/file" in capsys.readouterr().err
    assert run("llm", "train", "--config", str(settings), "--model", "/typed") == 1
    assert "/typed" in capsys.readouterr().err


def test_a_tasks_option_typed_besides_a_file_leaves_the_files_others(tmp_path):
    recipe = "recipes/llm/qwen3_0_6b_dapo_math.yaml"
    typed = ["--config", str(REPOSITORY / recipe), "--task-options", "path", "mine", "--task_options"]
    kept = _parse(TrainConfig, "tether llm train", [*typed[:-1], "--rollouts", "transformers"])
    assert kept.task_options == {"path": "mine", "verifier": "math", "bad_rows": "skip"}
    later = _parse(TrainConfig, "tether llm train", [*typed, "path", "later"])
    assert later.task_options == {**kept.task_options, "path": "later"}
    none = _parse(TrainConfig, "tether llm train", [*typed, "--task-options", "digits", "2"])
    assert none.task_options == {"digits": 2}, "without a value the option takes back those before"
    with pytest.raises(SystemExit):
        _parse(TrainConfig, "tether llm train", [*typed, "path"])


@pytest.mark.parametrize("config", [TrainConfig, EvalConfig])
@pytest.mark.parametrize("word", ["false", "False", "FALSE"])
def test_a_truth_for_the_chat_template_may_be_typed_in_any_case(config, word):
    """As a text it would be true to the template, whatever it says."""
    parsed = _parse(config, "tether llm", ["--chat-template-options", "enable_thinking", word, "depth", "2"])
    assert parsed.chat_template_options == {"enable_thinking": False, "depth": 2}


def test_a_tasks_options_are_numbers_only_where_those_are_written_so(tmp_path):
    words = ("2024_01_15", "1e5", "007", "7", "0.5", "True", "-1", "x")
    typed = [word for key, value in zip("abcdefgh", words, strict=True) for word in (key, value)]
    parsed = _parse(TrainConfig, "tether llm train", ["--task-options", *typed])
    assert list(parsed.task_options.values()) == ["2024_01_15", "1e5", "007", 7, 0.5, True, -1, "x"]
    file = write_settings(tmp_path / "run.yaml", parsed)
    assert _parse(TrainConfig, "tether llm train", ["--config", str(file)]) == parsed


def test_an_option_that_is_null_in_a_file_is_left_out(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("task_options: {seconds: null, digits: 2}\nchat_template_options:\n")
    parsed = _parse(TrainConfig, "tether llm train", ["--config", str(file)])
    assert (parsed.task_options, parsed.chat_template_options) == ({"digits": 2}, {})


def test_a_value_of_a_file_may_begin_as_an_option_does(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("name: --steps\ntask_options: {instruction: '- be brief'}\n")
    parsed = _parse(TrainConfig, "tether llm train", ["--config", str(file)])
    assert (parsed.name, parsed.task_options) == ("--steps", {"instruction": "- be brief"})


def test_a_command_that_is_printed_can_be_copied(monkeypatch, capsys):
    monkeypatch.setattr("tether.llm.train.train", lambda config: SimpleNamespace(path=config.output))
    assert run("llm", "train", "--output", "my runs/it's") == 0
    command = capsys.readouterr().out.split("See it with: ")[1]
    assert shlex.split(command) == ["tether", "report", "my runs/it's"]


def test_a_settings_file_may_be_written_with_an_equals_sign(tmp_path, capsys):
    settings = tmp_path / "a=b.yaml"
    settings.write_text(f"model: /from/file\noutput: {tmp_path / 'run'}\n")
    assert run("llm", "train", f"--config={settings}") == 1
    assert "/from/file" in capsys.readouterr().err
    settings.write_text("steps: many\n")
    assert run("llm", "train", f"--config={settings}") == 2
    assert f"also read from {settings}" in capsys.readouterr().err
    for typed in (("--config=",), ("--config",)):
        assert run("llm", "train", *typed) == 1
        assert "--config needs a file name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a list", "must map option names"),
        ("a: [", "not valid YAML"),
        ("model: Käse", "not valid YAML in UTF-8: 'utf-8' codec can't decode byte 0xe4"),
        ("name: 2026-02-31", "not valid YAML in UTF-8: day is out of range"),
        ("steps: 8\nmodel: /nowhere\nsteps: 16", "'steps' is there twice"),
        ("model: /nowhere\nmethod: {name: clip, clip_low: 0.1, clip_low: 0.2}", "'clip_low' is there twice"),
        (None, "cannot be read"),
    ],
)
def test_a_settings_file_that_cannot_be_used_is_named(tmp_path, capsys, content, message):
    path = tmp_path / "settings.yaml"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    assert run("llm", "train", "--config", str(path)) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert str(path) in shown


@pytest.mark.parametrize(
    ("command", "content", "option", "meant"),
    [
        ("train", "stepz: 3", "--stepz", "--steps"),
        ("compare", "train: {kl-stob: 3}", "--train.kl-stob", "--train.kl-stop"),
        ("train", "1: {steps: 3}", "--1.steps", ""),
    ],
)
def test_a_misspelt_key_in_a_file_is_named_with_the_file_and_the_nearest(
    tmp_path, capsys, command, content, option, meant
):
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    assert run("llm", command, "--config", str(path)) == 2
    shown = capsys.readouterr().err
    assert option in shown
    assert meant in shown
    assert str(path) in shown


def test_a_wrong_value_in_a_file_names_the_file(tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text("steps: many\n")
    assert run("llm", "train", "--config", str(path)) == 2
    shown = capsys.readouterr().err
    assert "--steps" in shown
    assert str(path) in shown


@pytest.mark.parametrize(
    "command",
    [
        ("llm", "train", "--steps", "8"),
        ("llm", "compare"),
        ("llm", "eval", "--model", "embedded", "--task", "chained"),
        ("episodic", "train"),
        ("episodic", "compare"),
    ],
)
def test_a_folder_that_cannot_be_written_ends_in_a_message(command, monkeypatch, capsys):
    # Tests may run as root, whom permissions do not stop: the system's refusal is made here.
    def mkdir(path, *mode, made=os.mkdir, **where):
        if str(path).startswith("/nowhere"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        made(path, *mode, **where)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert run(*command, "--output", "/nowhere/run") == 1
    shown = capsys.readouterr().err
    assert "tether: /nowhere" in shown
    assert "Read-only file system. Choose a folder you may write to." in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that takes nothing")
def test_a_disk_that_fills_up_ends_in_a_message(monkeypatch, capsys):
    """The system does not say which file it was that took no more."""

    def write(arguments):
        with open("/dev/full", "ab", buffering=0) as file:
            file.write(b"answers")

    monkeypatch.setattr("tether.cli._run", write)
    assert run("llm", "eval") == 1
    assert "tether: No space left on device. Free space" in capsys.readouterr().err


def test_an_error_of_the_system_that_is_no_folders_is_not_hidden(monkeypatch):
    def broken(arguments):
        raise OSError(errno.EIO, "a disk that fails", "/somewhere")

    monkeypatch.setattr("tether.cli._run", broken)
    with pytest.raises(OSError, match="a disk that fails"):
        main([])


def test_version(capsys):
    import tether

    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == tether.__version__


@pytest.mark.skipif(sys.platform != "linux", reason="asks GNU OpenMP, which torch brings on Linux")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "0"), ({"OMP_WAIT_POLICY": "active"}, "30000000000"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_threads_that_wait_sleep_unless_the_user_chose_otherwise(
    chosen: dict[str, str], expected: str
) -> None:
    """How often they look before they sleep, as OpenMP itself says once a command has loaded torch."""
    code = "import tether.cli as c; c._run = lambda _: (__import__('torch'), 0)[1]; c.main([])"
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **chosen, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True, text=True, check=False,
    ).stderr  # fmt: skip
    assert f"GOMP_SPINCOUNT = '{expected}'" in said
