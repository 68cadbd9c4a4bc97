"""Every command of the pages exists and takes the options it is given; those of `tether` run, cut short."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pages
from scripts import REPOSITORY
from tether import cli

COMMANDS = [command for page in pages.PAGES for command in pages.commands(page)]
#: Pages a newcomer reads; those of the results say under which settings a result was made.
GUIDES = [page for page in pages.PAGES if not page.startswith("benchmarks/")]
INLINE = sorted({(page, text) for page in pages.PAGES for text in pages.inline_commands(page)})


class ParsedError(Exception):
    """Raised in the place of what a command would do."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`tether` ends where its options are known to be right; files that pages write are there."""

    def parsed(parse: Callable[..., Any]) -> Callable[..., Any]:
        def end(*arguments: Any, **keywords: Any) -> None:
            parse(*arguments, **keywords)
            raise ParsedError

        return end

    monkeypatch.setattr(cli, "_parse", parsed(cli._parse))
    for command in ("report", "collect", "verl"):  # which read their options themselves
        own = cli._COMMANDS[command]
        monkeypatch.setitem(cli._COMMANDS, command, with_parser(own, parsed, monkeypatch))
    for page in GUIDES:
        for code in pages.codes(page):
            if code.file:
                (tmp_path / code.file).write_text(code.text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


def with_parser(
    command: Callable[[list[str]], None],
    parsed: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[list[str]], None]:
    """A command whose `argparse` parser ends it."""

    def run(arguments: list[str]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", parsed(argparse.ArgumentParser.parse_args))
            command(arguments)

    return run


def tether(words: list[str]) -> None:
    """Parse it; a page's `--help` is shown."""
    try:
        cli._run(words)
    except ParsedError:
        return
    except SystemExit as ending:
        if not ending.code and words[-1] == "--help":
            return
        raise AssertionError(f"tether {' '.join(words)} ends with {ending.code}") from ending
    assert words[-1] == "--show", "nothing was parsed"


def make(words: list[str]) -> None:
    """A target, reached without running it."""
    tried = subprocess.run(
        ["make", "--dry-run", "--silent", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert tried.returncode == 0, tried.stderr


def python(words: list[str]) -> None:
    """A script or module of the repository, in which the options stand."""
    if words[:2] in (["-m", "venv"], ["-m", "verl.trainer.main_ppo"]):
        return
    name = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
    places = [REPOSITORY / name, REPOSITORY / name.removesuffix(".py") / "__main__.py"]
    found = [place for place in places if place.is_file()]
    assert found, f"no {name}"
    beside = found[0].parent.glob("*.py")  # where a script's options may be made, too
    texts = [found[0].read_text("utf-8"), *(path.read_text("utf-8") for path in beside)]
    for option in re.findall(r" (--[a-z0-9-]+)", " ".join(words)):
        assert any(f'"{option}"' in text for text in texts), f"{name} has no {option}"


def pip(words: list[str]) -> None:
    """Extras of ours exist; packages are given by name."""
    assert words[0] == "install"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in re.findall(r"tether-rl\[(\w+)\]", " ".join(words)):
        assert extra in project["optional-dependencies"]


def bash(words: list[str]) -> None:
    """A script of the repository."""
    assert (REPOSITORY / words[0]).is_file()


def others(words: list[str]) -> None:
    """A program that comes with a package: its own tests are its authors'."""
    assert words


CHECKS = {"tether": tether, "make": make, "python": python, "pip": pip, "bash": bash}


def program_of(text: str) -> tuple[str, list[str]]:
    """The program without folder, version and environment, and its words; capitals stand for a name."""
    words = shlex.split(re.sub(r"<[^>]*>", "x", text))
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return re.sub(r"[0-9.]+$", "", Path(words[0]).name), words[1:]


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_commands_exist_and_take_the_options_they_are_given(page: str) -> None:
    for command in COMMANDS:
        if command.page == page:
            program, words = program_of(command.text)
            if "NAME.yaml" in command.text or (command.needs or "").startswith("your my_"):
                continue  # a name to be filled in
            try:
                CHECKS.get(program, others)(words)
            except Exception as error:
                raise AssertionError(f"{command}: {command.text}") from error


@pytest.mark.parametrize(("page", "text"), INLINE, ids=str)
def test_commands_in_sentences_exist(page: str, text: str) -> None:
    if "…" in text:  # stands for several
        return
    program, words = program_of(text)
    if program == "make":
        make(words)
    else:
        assert any(" ".join(words).startswith(name) for name in (*cli._COMMANDS, *cli._GROUPS)), page


def test_what_a_command_needs_is_read_from_its_line_or_its_blocks_first() -> None:
    found = {command.text: command.needs for command in COMMANDS if command.page == "docs/verl.md"}
    strategy = "actor_rollout_ref.actor.strategy=fsdp2"
    assert found[f"python -m verl.trainer.main_ppo +tether=troll {strategy} ..."] == "GPUs"
    python = "PYTHON=.venv-verl/bin/python"
    assert found[f"{python} METHOD=troll GPUS=8 bash recipes/verl/qwen3_gsm8k.sh"].endswith("and GPUs")
    assert found['.venv-verl/bin/pip install "tether-rl[verl]" "verl[vllm]==0.9.1"'] is None


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("tether", "llm train --method.no-such 3"),
        ("tether", "report"),
        ("make", "no-such-target"),
        ("python", "benchmarks/no_such.py"),
        ("python", "benchmarks/projection.py --no-such-option"),
        ("pip", "install tether-rl[nothing]"),
    ],
)
def test_a_command_that_is_wrong_would_be_found(
    program: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        CHECKS[program](words.split())


#: Commands that this machine cannot carry out say so: a model by its name on a hub, a cluster.
ELSEWHERE = re.compile(
    r"Qwen/|HuggingFaceTB/|gsm8k|main_ppo|^ray |GPUS=|accelerate launch|vllm-|gpu-check|wandb"
)


@pytest.mark.parametrize("page", GUIDES)
def test_what_cannot_run_anywhere_says_what_it_needs(page: str) -> None:
    unmarked = [
        str(command)
        for command in pages.commands(page)
        if ELSEWHERE.search(command.text) and command.needs is None and " report " not in command.text
    ]
    assert not unmarked


SHORT_LLM = (
    "--task arithmetic --steps 2 --updates-per-rollout 2 --prompts-per-rollout 4 --eval-problems 4 "
    "--eval-every 2 --save-every 2 --threads 1"
)
#: What is typed after a command so that it ends in seconds.
SHORT = {
    "llm train": SHORT_LLM,
    "llm compare": "--batches 1 --evaluations 1 --seeds 0 --jobs 1 --train.task arithmetic "
    "--train.prompts-per-rollout 8 --train.eval-problems 4 --train.threads 1",
    "episodic train": "--iterations 1 --episodes 4 --evaluation-episodes 2 --no-film",
    "episodic eval": "--episodes 2",
    "episodic render": "",
    "episodic export": "",
    "episodic compare": "--seeds 0 --iterations 1 --episodes 4 --jobs 1",
    "report": "",
}
#: A run that a page talks of and another page makes.
MADE_ELSEWHERE = {"docs/report.md": "runs/quickstart"}


def runnable(page: str) -> list[list[str]]:
    """The words of a page's `tether` commands that need nothing."""
    found = [program_of(command.text) for command in pages.commands(page) if command.needs is None]
    return [words for program, words in found if program == "tether" and words[-1] != "--help"]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if runnable(page)])
def test_tethers_commands_run_in_the_order_of_the_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY / 'src'}")
    monkeypatch.syspath_prepend(tmp_path)
    for code in pages.codes(page):
        if code.file:
            (tmp_path / code.file).write_text(code.text, encoding="utf-8")
    if page in MADE_ELSEWHERE:
        run(["llm", "train", "--output", MADE_ELSEWHERE[page], *SHORT_LLM.split()])
    for words in runnable(page):
        name = next(name for name in SHORT if " ".join(words).startswith(name))
        run([*words, *SHORT[name].split()])


def run(words: list[str]) -> None:
    """To its end, which is good."""
    with pytest.raises(SystemExit) as ending:
        cli.main(words)
    assert not ending.value.code, " ".join(words)
