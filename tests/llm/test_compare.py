"""A slice of the quick studies: trained, kept, not trained again, and never mixed with other settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tether.cli import main
from tether.errors import ConfigError
from tether.experiments import RunFolder
from tether.experiments.compact import is_finished
from tether.experiments.settings_file import options_from_file
from tether.llm.compare import compare
from tether.llm.compare_config import CompareConfig
from tether.llm.grid import cells

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


def arguments(folder: Path, *more: str) -> list[str]:
    small = {
        "output": folder / "runs", "results": folder / "kept", "updates-per-rollout": 4, "batches": 1,
        "evaluations": 1, "seeds": 0, "train.prompts-per-rollout": 4, "train.responses-per-prompt": 4,
        "train.eval-problems": 10, "train.device": "cpu",
    }  # fmt: skip
    options = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    methods = ["--trust-regions", "troll", "dppo:divergence=top-k-kl", "--baseline", "troll"]
    return ["llm", "compare", "--config", str(STUDIES / "quick" / "b.yaml"), *options, *methods, *more]


def run(folder: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as ending:
        main(arguments(folder, *more))
    assert isinstance(ending.value.code, int)
    return ending.value.code


def test_a_slice_of_a_study_is_kept_and_grows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = [tmp_path / "kept" / f"{name}-u4-lr0.0003-seed0" for name in ("troll", "dppo-divergencetop-k-kl")]
    assert run(tmp_path) == 0
    assert all(is_finished(folder) for folder in kept)
    assert sum(file.stat().st_size for folder in kept for file in folder.iterdir()) < 2 * 30_000
    shown = capfd.readouterr().out
    assert "Success, 4 updates, lr 0.0003" in shown
    assert "TROLL" in shown
    table = json.loads((tmp_path / "kept" / "comparison.json").read_text())
    assert [(row["method"], row["samples"]) for row in table["rows"]] == [
        ("TROLL", 16), ("dppo divergence=top-k-kl", 16),
    ]  # fmt: skip
    assert all(row["tokens"] > 16 for row in table["rows"])

    shutil.rmtree(tmp_path / "runs")  # another machine, say
    before = (kept[0] / "FINISHED").stat().st_mtime_ns
    assert run(tmp_path) == 0
    assert (kept[0] / "FINISHED").stat().st_mtime_ns == before
    assert not (tmp_path / "runs" / kept[0].name).exists()

    capfd.readouterr()
    assert run(tmp_path, "--train.temperature", "0.5") == 1
    assert "temperature: 1.0 there, 0.5 here" in capfd.readouterr().err


def test_a_kept_run_from_before_a_setting_existed_had_its_default(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    for path in (tmp_path / "kept").glob("*/config.json"):
        record = json.loads(path.read_text())
        del record["settings"]["optimizer"]
        path.write_text(json.dumps(record))
    assert run(tmp_path) == 0
    capfd.readouterr()
    assert run(tmp_path, "--train.optimizer", "sgd") == 1
    assert "optimizer: 'adamw' there, 'sgd' here" in capfd.readouterr().err


def test_a_grid_of_which_nothing_is_finished_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--minutes", "1e-9") == 1
    assert "Give it more minutes" in capfd.readouterr().err


def test_a_cell_that_cannot_be_trained_is_refused_before_any_is(tmp_path: Path) -> None:
    config = CompareConfig(output=tmp_path / "runs", trust_regions=("troll", "sapo:tau_pos=0"))
    with pytest.raises(ConfigError, match="tau_pos"):
        compare(config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("study", sorted(STUDIES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_study_is_a_grid_whose_cells_all_go_together(study: Path) -> None:
    import tyro

    config = tyro.cli(CompareConfig, args=options_from_file(study))
    made = cells(config)
    assert len({cell.train.output.name for cell in made}) == len(made)
    assert config.results is not None
    if study.stem.startswith(("search", "g-")):  # what wins there is used elsewhere
        assert {cell.train.eval_split for cell in made} == {"validation"}
        assert min(config.seeds) >= 100
    elif "cost" not in study.stem:
        assert {cell.train.eval_split for cell in made} == {"test"}
        assert len(config.seeds) >= 5


def test_kept_runs_of_studies_are_small_and_finished() -> None:
    results = STUDIES.parent / "results" / "studies"
    for config in results.glob("*/*/config.json"):
        folder = config.parent
        assert is_finished(folder), folder
        assert RunFolder.open(folder).evals()
        assert sum(file.stat().st_size for file in folder.iterdir()) < 30_000, folder
