"""A task from outside the package: trained, measured, and refused by name where it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import REPOSITORY
from tether.cli import main
from tether.errors import ConfigError
from tether.experiments import RunFolder
from tether.experiments.files import load_json
from tether.llm.tasks import make_task

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(autouse=True)
def examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def test_its_problems_split_and_its_checks() -> None:
    task = make_task("own_task:Totals", terms=2)
    splits = {name: task.problems(name, 50) for name in ("train", "validation", "test")}
    numbers = {name: {str(sorted(p.prompt[:-1].split("+"))) for p in each} for name, each in splits.items()}
    assert not numbers["train"] & (numbers["validation"] | numbers["test"])
    assert all(sum(map(int, p.prompt[:-1].split("+"))) == int(p.answer) for p in splits["train"])
    assert task.verify("107", "107").correct
    assert task.verify("117", "107").reward == pytest.approx(2 / 3)
    assert task.verify("7", "107").reward == 0


def test_options_and_names_are_refused_as_those_of_the_package_are() -> None:
    with pytest.raises(ConfigError, match="Its options are: terms"):
        make_task("own_task:Totals", digits=2)
    with pytest.raises(ConfigError, match=r"own_task has no 'Total'\. Did you mean 'Totals'"):
        make_task("own_task:Total")
    with pytest.raises(ConfigError, match=r"Your own: 'package\.module:name'"):
        make_task("own_task")


def test_the_script_trains_on_it_and_the_command_line_measures_it(tmp_path: Path) -> None:
    import own_task

    run, evaluation = tmp_path / "run", tmp_path / "eval"
    own_task.main(run)
    assert RunFolder.open(run).config.settings["task"] == "own_task:Totals"
    with pytest.raises(SystemExit) as ended:
        main(["llm", "eval", "--task", "own_task:Totals", "--task-options", "terms", "2", "--threads", "1",
              "--problems", "4", "--samples", "1", "--model", str(run / "model"),
              "--output", str(evaluation)])  # fmt: skip
    assert ended.value.code == 0
    assert load_json((evaluation / "results.json").read_bytes())["own_task:Totals"]["model"]["problems"] == 4
    assert (evaluation / "own_task.Totals-model.jsonl").is_file()
