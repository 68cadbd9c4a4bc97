"""A slice of the quick studies: trained, kept, not trained again, and never mixed with other settings."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tether.cli import main, read_grid
from tether.errors import ConfigError
from tether.experiments import RunFolder, StudyTable
from tether.experiments.jobs import Job
from tether.llm.compare import compare, finished_runs
from tether.llm.compare_config import CompareConfig
from tether.llm.config import TrainConfig
from tether.llm.grid import cells
from tether.llm.methods import find_method

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"
QUICK = STUDIES / "quick" / "b.yaml"


def arguments(folder: Path, *more: str) -> list[str]:
    small = {
        "output": folder / "runs", "results": folder / "kept.csv", "updates-per-rollout": 4, "batches": 1,
        "evaluations": 1, "seeds": 0, "train.prompts-per-rollout": 4, "train.responses-per-prompt": 4,
        "train.eval-problems": 10, "train.device": "cpu",
    }  # fmt: skip
    options = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    methods = ["--methods", "troll", "dppo:divergence=top-k-kl", "--baseline", "troll"]
    return ["llm", "compare", "--config", str(QUICK), *options, *methods, *more]


def run(folder: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as ending:
        main(arguments(folder, *more))
    assert isinstance(ending.value.code, int)
    return ending.value.code


def compare_again(folder: Path) -> None:
    """What the command does, but for the report it draws at the end."""
    assert compare(read_grid(QUICK, *arguments(folder)[4:])).unfinished == 0


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The slice, trained, and what that showed."""
    folder, shown = tmp_path_factory.mktemp("trained"), io.StringIO()
    with redirect_stdout(shown):
        assert run(folder) == 0
    return folder, shown.getvalue()


@pytest.fixture
def trained(trained_once: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of the trained slice, as if it had been trained here."""
    shutil.copytree(trained_once[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_slice_of_a_study_is_kept_and_grows(
    trained_once: tuple[Path, str], trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["dppo-divergencetop-k-kl-u4-lr0.0003-seed0", "troll-u4-lr0.0003-seed0"]
    table = trained / "kept.csv"
    assert list(StudyTable(table).runs("runs")) == names
    assert not (trained / "runs" / names[0] / "checkpoints").exists()  # the disk is given back
    shown = trained_once[1]
    assert "Success, 4 updates, lr 0.0003" in shown
    assert "TROLL" in shown
    page = json.loads((trained / "runs" / "report" / "comparison.json").read_text())
    assert [(row["method"], row["samples"]) for row in page["rows"]] == [
        ("TROLL", 16), ("dppo divergence=top-k-kl", 16),
    ]  # fmt: skip
    assert all(row["tokens"] > 16 for row in page["rows"])

    shutil.rmtree(trained / "runs")  # another machine, say
    before = table.stat().st_mtime_ns
    assert run(trained) == 0
    assert table.stat().st_mtime_ns == before
    assert not (trained / "runs" / names[0]).exists()
    assert capfd.readouterr().out.split("Report:")[0] == shown.split("Report:")[0]

    assert run(trained, "--train.temperature", "0.5") == 1
    assert "temperature: 1.0 there, 0.5 here" in capfd.readouterr().err


def test_a_run_that_finished_before_a_crash_is_kept_by_the_next_call(trained: Path) -> None:
    """The numbers of its folder are enough, whether or not anything is left to train."""
    whole = (trained / "kept.csv").read_bytes()
    for file in trained.glob("kept.*"):
        file.unlink()
    logs = {log: log.read_bytes() for log in (trained / "runs").glob("*.log")}
    compare_again(trained)
    assert (trained / "kept.csv").read_bytes() == whole
    assert {log: log.read_bytes() for log in logs} == logs  # nothing was trained


def test_a_model_that_an_earlier_command_trained_stays(trained: Path) -> None:
    """Without a table it keeps everything; only what this call trains gives the disk back."""
    for file in trained.glob("kept.*"):
        file.unlink()
    folder = trained / "runs" / "troll-u4-lr0.0003-seed0"
    kept = [folder / name / "file" for name in ("checkpoints", "model", "tensorboard")]
    for file in kept:
        assert not file.parent.exists()
        file.parent.mkdir()
        file.touch()
    compare_again(trained)
    assert len(StudyTable(trained / "kept.csv").runs("runs")) == 2
    assert all(file.exists() for file in kept)


def test_a_run_of_which_the_rows_are_deleted_is_missing_again(trained: Path) -> None:
    table = trained / "kept.csv"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if ",dppo-" not in line))
    config = read_grid(QUICK, *arguments(trained)[4:])
    assert [cell.method for cell, _ in finished_runs(config).finished] == ["troll"]


def test_a_kept_run_from_before_a_setting_existed_had_its_default(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = trained / "kept.settings.yaml"
    kept = yaml.safe_load(path.read_text())
    del kept["runs"]["shared"]["settings.optimizer"]
    path.write_text(yaml.safe_dump(kept))
    compare_again(trained)
    assert run(trained, "--train.optimizer", "sgd") == 1
    assert "optimizer: 'adamw' there, 'sgd' here" in capfd.readouterr().err


def finish(train: TrainConfig) -> None:
    """A run's folder as its training leaves it, in short."""
    arguments = {"kind": "llm", "label": train.label, "seed": train.seed, "settings": train.settings()}
    with RunFolder.create(train.output, **arguments) as run:
        run.log_eval(train.steps, success=0.5)
        run.mark_finished()


def test_without_a_table_finished_runs_are_those_of_the_very_settings_asked_for(tmp_path: Path) -> None:
    config = CompareConfig(output=tmp_path, methods=("clip",))
    [cell] = cells(config)
    finish(cell.train)
    assert finished_runs(config).unfinished == 0
    # What a run may go on with at any time.
    memory = replace(config.train, micro_batch_size=8, share_prefixes=True, keep_checkpoints=1)
    assert finished_runs(replace(config, train=memory)).unfinished == 0
    assert "micro_batch_size" in config.train.may_change()
    assert "micro_batch_size" not in replace(config.train, method=find_method("kl_cov")()).may_change()
    for changes, said in (
        ({"task": "arithmetic"}, "task: 'chained' there, 'arithmetic' here"),
        ({"steps": 320}, "steps: 160 there, 320 here"),
        ({"task_options": {"terms": 3}}, "task_options.terms: 'not set' there, 3 here"),
    ):
        other = replace(config, train=replace(config.train, **changes))
        with pytest.raises(ConfigError, match=rf"clip-seed0 was run.*{said}.*another output folder"):
            finished_runs(other)


def test_a_table_never_takes_finished_runs_of_other_settings(tmp_path: Path) -> None:
    """They are refused before the others are trained, not once the table holds them."""
    config = CompareConfig(output=tmp_path / "runs", methods=("clip", "none"), results=tmp_path / "kept.csv")
    finish(replace(cells(config)[0].train, task="arithmetic"))
    said = "clip-seed0 was run.*task: 'arithmetic' there, 'chained' here.*another output folder, or delete"
    with pytest.raises(ConfigError, match=said):
        compare(config)
    assert not (tmp_path / "kept.csv").exists()
    assert not (tmp_path / "runs" / "none-seed0.log").exists()


@pytest.mark.parametrize(("minutes_a_run", "in_the_table"), [(0.1, [0, 0, 2]), (2, [1, 2, 2])])
def test_the_table_need_not_wait_for_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes_a_run: float, in_the_table: list[int]
) -> None:
    """Runs of minutes are in it as they end; those of seconds together, at the end at the latest."""
    config = CompareConfig(output=tmp_path / "runs", methods=("clip", "none"), results=tmp_path / "kept.csv")
    table, found = StudyTable(tmp_path / "kept.csv"), []
    clock = iter(60 * minutes_a_run * count for count in range(99))
    monkeypatch.setattr("tether.llm.compare.time", SimpleNamespace(monotonic=lambda: next(clock)))

    def run_jobs(jobs: list[Job], *, on_finished: Callable[[Job], None], **_: object) -> list[Job]:
        for job, cell in zip(jobs, cells(config), strict=True):
            finish(cell.train)
            on_finished(job)
            found.append(len(table.runs("runs")))
        return []

    monkeypatch.setattr("tether.llm.compare.run_jobs", run_jobs)
    compare(config)
    assert [*found, len(table.runs("runs"))] == in_the_table


def test_the_runs_of_one_call_share_the_evaluation_of_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one call alone: a task's own code may be another at the next."""
    folders: list[Path] = []

    def run_jobs(jobs: list[Job], **_: object) -> list[Job]:
        folders.extend(Path(job.command[job.command.index("--start-evaluations") + 1]) for job in jobs)
        assert all(folder.is_dir() for folder in folders)
        return jobs

    monkeypatch.setattr("tether.llm.compare.run_jobs", run_jobs)
    compare(read_grid(QUICK, *arguments(tmp_path)[4:]))
    assert len(folders) == 2
    assert folders[0] == folders[1]
    assert not folders[0].exists()

    folders.clear()
    compare(read_grid(QUICK, *arguments(tmp_path, "--train.start-evaluations", str(tmp_path))[4:]))
    assert folders == [tmp_path] * 2


def test_a_folder_of_kept_runs_is_refused_before_anything_is_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    assert run(tmp_path, "--results", str(tmp_path / "old")) != 0
    shown = " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert "tether collect" in shown
    assert not (tmp_path / "runs").exists()


def test_a_grid_of_which_nothing_is_finished_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--minutes", "1e-9") == 1
    assert "Give it more minutes" in capfd.readouterr().err


def test_a_cell_that_cannot_be_trained_is_refused_before_any_is(tmp_path: Path) -> None:
    config = CompareConfig(output=tmp_path / "runs", methods=("troll", "sapo:tau_pos=0"))
    with pytest.raises(ConfigError, match="tau_pos"):
        compare(config)
    assert not (tmp_path / "runs").exists()


#: Studies of which docs/studies.md says that they have begun; their targets go on with them.
BEGUN = ("j-", "k-", "l-", "vllm-")
#: Of which a run takes minutes, not seconds.
REAL_MODELS = ("k-", "vllm-")


@pytest.mark.parametrize("study", sorted(STUDIES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_study_is_a_grid_whose_cells_all_go_together(study: Path) -> None:
    config = read_grid(study)
    made = cells(config)
    assert len({cell.train.output.name for cell in made}) == len(made)
    assert config.results is not None
    searched = "search" in study.stem or study.stem.startswith("g-")
    if searched or study.stem in ("l-step-back", "k-rates", "k-gemma-rates"):  # what wins is used elsewhere
        assert {cell.train.eval_split for cell in made} == {"validation"}
        assert min(config.seeds) >= 100
    elif "cost" not in study.stem:
        assert {cell.train.eval_split for cell in made} == {"test"}
        assert len(config.seeds) >= (4 if study.stem.startswith(REAL_MODELS) else 5)


def test_every_run_of_every_study_is_kept_with_the_settings_its_grid_gives_it() -> None:
    for study in sorted(STUDIES.rglob("*.yaml")):
        config = read_grid(study)
        assert config.results is not None
        config = replace(config, results=STUDIES.parents[1] / config.results)
        kept = finished_runs(config)
        if not study.stem.startswith(BEGUN):
            assert kept.finished, study
            assert kept.unfinished == 0, study
