"""Runs that earlier versions saved: taken up where they are what is asked for, refused where they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import short_run

from tether.errors import CheckpointError, ConfigError
from tether.experiments import RunFolder, StudyTable
from tether.experiments.files import atomic_write_json, load_json
from tether.experiments.run_config import CONFIG_FILE
from tether.experiments.run_data import RunData
from tether.llm.compare import finished_runs
from tether.llm.compare_config import CompareConfig
from tether.llm.config import TrainConfig
from tether.llm.grid import cells
from tether.llm.run_kind import LLM_RUNS
from tether.llm.saved_settings import RETIRED
from tether.llm.train import _run_folder

KINDS = {"llm": LLM_RUNS}


def finished_before(config: TrainConfig, **saved: Any) -> Path:
    """A finished run as a former version left it, with what it says of its settings changed."""
    with _run_folder(config) as run:
        assert run is not None
        run.log(config.steps, loss=0.5)
        run.log_eval(config.steps, success=0.5)
        run.mark_finished()
    file = config.output / CONFIG_FILE
    content = load_json(file.read_text())
    content["settings"] |= saved
    atomic_write_json(file, content)
    return config.output


def test_a_run_with_retired_settings_at_their_defaults_goes_on(tmp_path: Path) -> None:
    config = short_run.config(tmp_path / "run")
    finished_before(config, **RETIRED)
    with _run_folder(replace(config, resume=True, steps=2 * config.steps)) as run:
        assert run is not None
        assert not RETIRED.keys() & run.config.settings.keys()
        assert not run.finished


@pytest.mark.parametrize(("name", "value"), [("alpha_tolerance", 0.05), ("regression_updates", 2)])
def test_a_run_that_used_a_retired_setting_is_not_taken_for_another(
    tmp_path: Path, name: str, value: float
) -> None:
    config = short_run.config(tmp_path / "run")
    finished_before(config, **{**RETIRED, name: value})
    with (
        pytest.raises(CheckpointError, match=rf"{name}: {value} then.*no setting {name} any more; Tether \d"),
        _run_folder(replace(config, resume=True)),
    ):
        pass
    assert RunData.read(config.output, KINDS).config.settings[name] == value  # and a report shows it


@pytest.mark.parametrize(("changes", "kept"), [({}, True), ({"alpha_tolerance": 0.05}, False)])
def test_a_comparison_takes_a_kept_run_of_before_or_says_what_is_different(
    tmp_path: Path, changes: dict[str, Any], kept: bool
) -> None:
    table = tmp_path / "kept.csv"
    config = CompareConfig(output=tmp_path / "runs", results=table, train=short_run.config(Path("unused")))
    folders = [finished_before(cell.train, **RETIRED | changes) for cell in cells(config)]
    StudyTable(table).add("runs", [RunData.read(folder, {}) for folder in folders])
    assert RunFolder.open(folders[0]).finished
    if kept:
        assert finished_runs(config).unfinished == 0
        return
    with pytest.raises(ConfigError, match=r"alpha_tolerance: 0\.05 there, 'no such setting' here"):
        finished_runs(config)
