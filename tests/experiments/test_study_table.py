"""Runs in a table: the same numbers and the same verdicts as their folders, for us and for pandas."""

from __future__ import annotations

import dataclasses
import io
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml
from rich.console import Console

from tether.cli import main
from tether.errors import CheckpointError, ConfigError
from tether.experiments import RunData, StudyTable, load_runs, print_results, write_report
from tether.experiments.comparison import Entry, compare_methods, comparison_data, comparison_tables

MakeRun = Callable[..., Path]


def numbers(steps: int, seed: int) -> list[dict[str, float]]:
    return [
        {
            "kl_mean": 0.1 / 3 * step,
            "kl_max": float(step + seed),
            "tokens": 10.0 * step,
            "step_seconds": 1 / 7,
        }
        for step in range(1, steps + 1)
    ]


def evaluations(final: float) -> list[dict[str, Any]]:
    return [
        {"step": 0, "success": 0.3, "problems": 50},
        {"step": 2, "success": 0.5, "problems": 50},
        {"step": 5, "success": final, "problems": 50},
    ]


@pytest.fixture
def folder(make_run: MakeRun) -> Path:
    """Two methods with five seeds, whose numbers are thinned to their evaluations as kept runs' are."""
    for method, gap in (("TROLL", 0.2), ("clip", 0.0)):
        for seed in range(5):
            path = make_run(
                f"grid/{method}-seed{seed}", numbers(5, seed), evaluations(0.6 + gap + 0.01 * seed),
                label=method, seed=seed,
                settings={
                    "task": "sums", "method": method, "options": {"low": gap} if gap else {}, "rate": 1e-5,
                },
            )  # fmt: skip
    return path.parent


@pytest.fixture
def table(folder: Path, tmp_path: Path) -> StudyTable:
    kept = StudyTable(tmp_path / "study.csv")
    kept.add("grid", load_runs([folder]))
    return kept


def thinned_once(run: RunData) -> RunData:
    from tether.experiments.study_table import thinned

    return dataclasses.replace(run, metrics=thinned(run.metrics, [record["step"] for record in run.evals]))


def shown(runs: list[RunData]) -> tuple[str, object]:
    """What `tether llm compare` prints of runs, and what it writes."""
    entries = [Entry(run.config.label, "", run, samples=64) for run in runs]
    metric, rows = compare_methods(entries, "clip")
    out = io.StringIO()
    for printed in comparison_tables(metric, rows, "clip"):
        Console(file=out, width=80).print(printed)
    print_results(runs, Console(file=out, width=80))
    return out.getvalue(), comparison_data(metric, rows, "clip")


def test_tables_verdicts_and_reports_are_those_of_the_folders(
    folder: Path, table: StudyTable, tmp_path: Path
) -> None:
    """To the last digit, so far as thinning is not what makes the difference."""
    from_folders = [thinned_once(run) for run in load_runs([folder])]
    from_table = load_runs([table.path])
    assert shown(from_table) == shown(from_folders)
    assert "wins" in shown(from_table)[0]
    before = write_report(from_folders, tmp_path / "before").read_text()
    after = write_report(from_table, tmp_path / "after").read_text()
    aside = ("data:image", "<footer>Written by")  # a picture's own noise, and the minute
    assert [line for line in after.splitlines() if not any(part in line for part in aside)] == [
        line for line in before.splitlines() if not any(part in line for part in aside)
    ]


def test_every_number_and_setting_comes_back_with_its_type(folder: Path, table: StudyTable) -> None:
    kept = table.runs("grid")
    for run in load_runs([folder]):
        back, whole = kept[run.path.name], thinned_once(run)
        assert back.config == run.config
        assert repr(sorted(back.config.settings.items())) == repr(sorted(run.config.settings.items()))
        assert list(map(dict, back.evals)) == list(map(dict, whole.evals))
        assert [dict(sorted(record.items())) for record in back.metrics] == [
            dict(sorted(record.items())) for record in whole.metrics
        ]
        assert back.path == table.path / "grid" / run.path.name
        assert (back.finished, back.end["training_seconds"]) == (True, run.end["training_seconds"])


def test_pandas_reads_it_without_us(table: StudyTable) -> None:
    frame = pandas.read_csv(table.path)
    assert list(frame.columns[:7]) == ["study", "grid", "run", "label", "seed", "method", "options.low"]
    assert "task" not in frame  # the same for all: it is among the shared settings
    assert yaml.safe_load(table.settings_path.read_text())["grid"]["shared"]["settings.task"] == "sums"
    last = frame[frame.step == 5].groupby("label")["eval/success"].mean()
    assert last["TROLL"] == pytest.approx(0.82)
    assert last["clip"] == pytest.approx(0.62)
    middle = frame[(frame.run == "clip-seed0") & (frame.step == 2)].iloc[0]
    assert middle["train/kl_mean"] == pytest.approx(0.05)  # the mean since the evaluation before
    assert middle["train/kl_max"] == 2.0
    assert middle["train/tokens"] == 20.0
    assert frame[frame.step == 0]["train/kl_mean"].isna().all()


def test_what_is_not_finite_survives(make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run("a", [{"kl_max": math.inf, "loss": math.nan}], [{"step": 1, "success": 0.5}],
                    settings={"bound": math.inf})  # fmt: skip
    table = StudyTable(tmp_path / "t.csv")
    table.add("grid", load_runs([path]))
    [run] = table.select()
    assert run.metrics[0]["kl_max"] == math.inf
    assert math.isnan(run.metrics[0]["loss"])
    assert run.config.settings == {"bound": math.inf}
    frame = pandas.read_csv(table.path, keep_default_na=False, na_values=["nan"])
    assert frame["train/kl_max"].tolist() == [math.inf]
    assert "$float" not in table.path.read_text() + table.settings_path.read_text()


def test_a_metric_that_is_true_or_false_is_kept_as_the_number_it_counts_as(
    make_run: MakeRun, tmp_path: Path
) -> None:
    path = make_run("a", [{"stopped": True}], [{"step": 1, "solved": False}], settings={"resume": True})
    table = StudyTable(tmp_path / "t.csv")
    table.add("grid", load_runs([path]))
    [run] = table.select()
    assert (run.metrics[0]["stopped"], run.evals[0]["solved"]) == (1, 0)
    assert run.config.settings == {"resume": True}


def test_runs_of_another_machine_are_added_and_the_rest_stays(table: StudyTable, make_run: MakeRun) -> None:
    before = table.runs("grid")
    more = make_run("x/dppo-seed0", numbers(5, 0), evaluations(0.9), label="dppo",
                    settings={"task": "chains", "new": 3})  # fmt: skip
    table.add("other", load_runs([more]))
    assert {name: repr(run.config) for name, run in table.runs("grid").items()} == {
        name: repr(run.config) for name, run in before.items()
    }
    assert [run.metrics for run in table.runs("grid").values()] == [run.metrics for run in before.values()]
    assert list(table.runs("other")) == ["dppo-seed0"]
    assert set(pandas.read_csv(table.path)["task"]) == {"sums", "chains"}  # it varies now
    [one] = load_runs([table.path / "other" / "dppo-seed0"])
    assert one.config.settings == {"task": "chains", "new": 3}


def test_the_same_runs_make_the_same_files_in_whatever_order_they_came(folder: Path, tmp_path: Path) -> None:
    runs = load_runs([folder])
    one, other = StudyTable(tmp_path / "1" / "s.csv"), StudyTable(tmp_path / "2" / "s.csv")
    one.add("grid", runs)
    for run in reversed(runs):
        other.add("grid", [run])
    assert one.path.read_bytes() == other.path.read_bytes()
    assert one.settings_path.read_bytes() == other.settings_path.read_bytes()


def _add(path: Path, folder: Path, start: int) -> None:
    for run in load_runs([folder])[start::2]:
        StudyTable(path).add("grid", [run])


def test_two_processes_adding_at_once_lose_nothing(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add, args=(tmp_path / "t.csv", folder, start)) for start in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(StudyTable(tmp_path / "t.csv").select()) == 10


def test_a_run_without_evaluations_keeps_its_last_numbers(make_run: MakeRun, tmp_path: Path) -> None:
    table = StudyTable(tmp_path / "t.csv")
    table.add("grid", load_runs([make_run("a", numbers(4, 0))]))
    [run] = table.select()
    assert [record["step"] for record in run.metrics] == [4]
    assert run.metrics[0]["kl_max"] == 4.0


# ---------------------------------------------------------------------- what is refused


def test_an_unfinished_run_is_not_kept(make_run: MakeRun, tmp_path: Path) -> None:
    table = StudyTable(tmp_path / "t.csv")
    path = make_run("half", numbers(2, 0), finished=False)
    with pytest.raises(CheckpointError, match="half is not finished"):
        table.add("grid", load_runs([path]))
    assert not table.path.exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0.3,50", "0.3;50"),
        ("run,", ""),
        ("TROLL,", '"TROLL,'),  # a quote that is never closed
        ("TROLL,", f"{'x' * 200_000},"),
    ],
    ids=["cell", "column", "quote", "length"],
)
def test_a_damaged_table_is_named(table: StudyTable, before: str, after: str) -> None:
    text = table.path.read_text()
    assert before in text
    table.path.write_text(text.replace(before, after, 1) + "\n" * 200_000 * after.startswith('"'))
    with pytest.raises(CheckpointError, match=r"study.csv and study.settings.yaml are not what was written"):
        table.select()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("study.csv", ""),
        ("study.settings.yaml", ""),
        ("study.settings.yaml", "- grid"),
        ("study.settings.yaml", "grid: {runs: }"),
        ("study.settings.yaml", "grid: {shared: {kind: llm}, runs: {}}"),
    ],
)
def test_a_table_of_which_a_file_was_replaced_is_named(table: StudyTable, file: str, content: str) -> None:
    table.path.with_name(file).write_text(content)
    with pytest.raises(CheckpointError, match=r"study.csv and study.settings.yaml are not what was written"):
        table.select()


def test_a_grid_that_is_not_there_is_named_with_those_that_are(table: StudyTable) -> None:
    with pytest.raises(CheckpointError, match=r"holds no run gird; its grids are grid"):
        load_runs([table.path / "gird"])


def test_a_path_that_leads_past_a_run_of_a_table_is_no_run(table: StudyTable) -> None:
    with pytest.raises(CheckpointError, match=r"holds no run grid/run/more; its grids are grid"):
        load_runs([table.path / "grid" / "run" / "more"])


def test_a_folder_in_place_of_a_table_is_refused_with_the_command_that_converts_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=rf"tether collect {folder} --output {folder}.csv") as refused:
        StudyTable(folder)
    command = str(refused.value).split("tether ")[1].split(" makes")[0].split()
    with pytest.raises(SystemExit) as ending:
        main(command)
    assert ending.value.code == 0
    assert "10 runs are in" in capsys.readouterr().out
    assert len(load_runs([folder.with_name("grid.csv") / "grid"])) == 10


def test_a_run_given_as_a_dot_is_kept_under_its_folders_name(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_run("g/seed0", numbers(2, 0)))
    table = StudyTable(tmp_path / "t.csv")
    table.add("g", load_runs(["."]))
    assert list(table.runs("g")) == ["seed0"]


def test_two_runs_of_one_name_are_refused_instead_of_one_replacing_the_other(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(f"g/{method}/seed0", numbers(2, 0), label=method) for method in ("TROLL", "clip")]
    table = StudyTable(tmp_path / "t.csv")
    with pytest.raises(CheckpointError, match=rf"{runs[0]} and {runs[1]} have one name.*as two grids"):
        table.add("g", load_runs([tmp_path / "runs" / "g"]))
    assert not table.path.exists()
    table.add("g", load_runs([runs[0]]))
    table.add("g", load_runs([runs[1]]))  # afterwards it replaces, as a longer run does its former self
    assert [run.config.label for run in table.select()] == ["clip"]

    def collect(*folders: Path) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ending:
            main(["collect", *map(str, folders), "--output", str(tmp_path / "collected.csv")])
        shown = capsys.readouterr()
        return ending.value.code, shown.out + shown.err

    assert collect(tmp_path / "runs" / "g")[0] == 1
    assert collect(runs[0], runs[1])[0] == 1  # two folders of one name are one grid
    assert not (tmp_path / "collected.csv").exists()
    code, shown = collect(runs[0].parent, runs[1].parent)
    assert (code, shown.count("1 runs are in")) == (0, 2)
    assert len(load_runs([tmp_path / "collected.csv"])) == 2
