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
from tether.llm.estimators import find_estimator
from tether.llm.grid import cells
from tether.llm.methods import TROLL, Clip, find_method
from tether.llm.run_kind import LLM_RUNS
from tether.llm.saved_settings import RETIRED, current_settings
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
        pytest.raises(
            CheckpointError, match=rf"{name}: {value} then.*If there is no setting {name} any more, Tether \d"
        ),
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


FLAT = {
    "trust_region": "troll", "loss_options": {}, "kl_bound": 0.2, "alpha": 5, "top_k": 32, "mass": 0.99,
    "support": "bucket", "region": "sequence", "clip_low": 0.1, "clip_high": None, "estimator": "grpo",
    "gamma": 0.9, "gae_lambda": 0.8, "critic_learning_rate": 1e-3, "value_clip": float("inf"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "method"),
    [
        ({}, TROLL(0.2, 5, 32, 0.99, "bucket", "sequence")),
        ({"trust_region": "clip"}, Clip(32, 0.99, clip_low=0.1)),
        ({"trust_region": "none"}, find_method("none")(top_k=32, mass=0.99)),  # type: ignore[call-arg]
        (
            {"trust_region": "trm", "loss_options": {"kl_bound": 1.0}},
            find_method("trm")(top_k=32, mass=0.99, kl_bound=1.0),  # type: ignore[call-arg]
        ),
        ({"trust_region": "trm"}, find_method("trm")(top_k=32, mass=0.99)),  # type: ignore[call-arg]
    ],
)
def test_settings_side_by_side_become_those_of_the_method(saved: dict[str, Any], method: Any) -> None:
    found = current_settings(FLAT | saved)
    assert found.keys() == {"method", "estimator"}
    assert TrainConfig(**found).method == method


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"gamma": 0.9, "gae_lambda": 0.8, "learning_rate": 1e-3, "clip_range": None}),
        ("reinforce_plus_plus", {"gamma": 0.9}),
        ("rloo", {}),
    ],
)
def test_and_those_of_the_estimator(name: str, options: dict[str, Any]) -> None:
    found = current_settings(FLAT | {"estimator": name})
    assert TrainConfig(estimator=found["estimator"]).estimator == find_estimator(name)(**options)


def test_a_loss_that_is_not_at_hand_is_reported_as_it_was_saved() -> None:
    found = current_settings(FLAT | {"trust_region": "gone_module:loss", "loss_options": {"cap": 3}})
    assert found["method"] == {"name": "gone_module:loss", "top_k": 32, "mass": 0.99, "cap": 3}


def test_todays_settings_stay_as_they_are() -> None:
    settings = TrainConfig(method="dppo", estimator="ppo").settings()  # type: ignore[arg-type]
    assert current_settings(settings) == settings


@pytest.mark.parametrize(("method", "estimator"), [("troll", "grpo"), ("dppo", "ppo"), ("clip", "gspo")])
def test_a_run_saved_in_the_flat_form_goes_on(tmp_path: Path, method: str, estimator: str) -> None:
    config = short_run.config(tmp_path / "run", method=method, estimator=estimator)
    finished_before(config)
    file = config.output / CONFIG_FILE
    content = load_json(file.read_text())
    flat = {"trust_region": method, "loss_options": {}, "estimator": estimator, "kl_bound": 0.05, **RETIRED}
    content["settings"] = {**{k: v for k, v in content["settings"].items() if k != "method"}, **flat}
    atomic_write_json(file, content)
    with _run_folder(replace(config, resume=True)) as run:
        assert run is not None
        assert run.finished  # nothing but the spelling has changed
    with (
        pytest.raises(CheckpointError, match=r"method\.name: '\w+' then, 'none' now"),
        _run_folder(replace(config, resume=True, method=find_method("none")(), name=config.label)),
    ):
        pass


def test_a_run_older_than_a_setting_goes_on_with_its_default(tmp_path: Path) -> None:
    config = short_run.config(tmp_path / "run")
    finished_before(config)
    file = config.output / CONFIG_FILE
    content = load_json(file.read_text())
    del content["settings"]["sampling_top_k"]
    atomic_write_json(file, content)
    with _run_folder(replace(config, resume=True)) as run:
        assert run is not None
        assert run.finished
    with (
        pytest.raises(CheckpointError, match="sampling_top_k: None then, 8 now"),
        _run_folder(replace(config, resume=True, sampling_top_k=8)),
    ):
        pass
