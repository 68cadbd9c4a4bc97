"""Choosing settings fairly: the best mean over seeds, and no choice among unequal numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import study_search

from tether.errors import ConfigError
from tether.experiments import RunFolder, StudyTable, load_runs
from tether.llm.compare_config import CompareConfig
from tether.llm.grid import cells


def write_runs(config: CompareConfig, scores: dict[str, float]) -> None:
    assert config.results is not None
    for cell in cells(config):
        with RunFolder.create(
            cell.train.output, kind="llm", label="x", seed=cell.seed, settings=cell.train.settings()
        ) as run:
            run.log_eval(0, success=0.9)
            run.log_eval(1, success=scores[cell.name.rsplit("-", 1)[0]] + 0.1 * cell.seed)
            run.mark_finished()
    StudyTable(config.results).add(config.output.name, load_runs([config.output]))


@pytest.fixture
def config(tmp_path: Path) -> CompareConfig:
    return CompareConfig(
        output=tmp_path / "runs",
        results=tmp_path / "kept.csv",
        methods=("troll:kl_bound=0.1", "troll:kl_bound=0.2", "clip", "clip:clip_low=0.4"),
        learning_rates=(1e-4, 3e-4),
        seeds=(0, 1),
    )


SCORES = {
    "troll-kl_bound0.1-lr0.0001": 0.2, "troll-kl_bound0.1-lr0.0003": 0.5,
    "troll-kl_bound0.2-lr0.0001": 0.4, "troll-kl_bound0.2-lr0.0003": 0.1,
    "clip-lr0.0001": 0.3, "clip-lr0.0003": 0.2,
    "clip-clip_low0.4-lr0.0001": 0.1, "clip-clip_low0.4-lr0.0003": 0.0,
}  # fmt: skip


def test_the_best_setting_of_each_method_is_written_as_a_study_takes_it(config: CompareConfig) -> None:
    write_runs(config, SCORES)
    chosen = study_search.choose(config)
    assert chosen["troll"].spec == "troll:kl_bound=0.1,learning_rate=0.0003"
    assert chosen["troll"].success == pytest.approx(0.55)
    assert chosen["clip"].spec == "clip:learning_rate=0.0001"
    assert {choice.tried for choice in chosen.values()} == {4}
    specs = tuple(choice.spec for choice in chosen.values())
    trained = [cell.train for cell in cells(replace(config, methods=specs, learning_rates=(), seeds=(0,)))]
    assert [(run.method.name, run.learning_rate) for run in trained] == [("troll", 3e-4), ("clip", 1e-4)]


def test_a_choice_among_the_settings_with_one_learning_rate(config: CompareConfig) -> None:
    write_runs(config, SCORES)
    chosen = study_search.choose(config, 1e-4)
    assert chosen["troll"].spec == "troll:kl_bound=0.2,learning_rate=0.0001"
    assert chosen["clip"].spec == "clip:learning_rate=0.0001"
    assert {choice.tried for choice in chosen.values()} == {2}
    with pytest.raises(ConfigError, match=r"no learning rate 0.1; it has \(0.0001, 0.0003\)"):
        study_search.choose(config, 0.1)


def test_unequal_numbers_of_settings_are_refused(config: CompareConfig) -> None:
    uneven = replace(config, methods=config.methods[:3])
    write_runs(uneven, SCORES)
    with pytest.raises(ConfigError, match=r"unequal numbers of settings: \{'troll': 4, 'clip': 2\}"):
        study_search.choose(uneven)


def test_forms_of_a_method_are_searched_as_methods_of_their_own(config: CompareConfig) -> None:
    forms = ("troll", "troll:lag_growth=linear,lag_rate=0.5", "troll:anchor=trainer,sampler_weight=2")
    several = replace(config, methods=forms, learning_rates=(1e-4,))
    write_runs(several, {cell.name.rsplit("-", 1)[0]: 0.5 for cell in cells(several)})
    chosen = study_search.choose(several)
    assert list(chosen) == ["troll", "troll, growing with the lag", "troll, decoupled"]
    assert {choice.tried for choice in chosen.values()} == {1}


def test_every_method_of_the_searches_on_stale_data_has_three_settings_at_two_rates() -> None:
    from tether.cli import read_grid

    for name in ("j-3-search", "j-4-search-others"):
        grid = read_grid(study_search.STUDY.with_name(f"{name}.yaml"))
        tried: dict[str, set[str]] = {}
        for cell in cells(grid):
            tried.setdefault(study_search._form(cell), set()).add(cell.name.rsplit("-", 1)[0])
        assert {len(settings) for settings in tried.values()} == {6}, name


def test_a_search_that_is_not_finished_is_no_choice(config: CompareConfig) -> None:
    with pytest.raises(ConfigError, match="16 runs of the search are not finished"):
        study_search.choose(config)


def test_the_search_gives_every_method_as_many_settings() -> None:

    from tether.cli import read_grid
    from tether.llm.grid import parse_method

    search = read_grid(study_search.STUDY)
    methods = [parse_method(method)[0] for method in search.methods]
    assert len({methods.count(method) for method in methods}) == 1
