"""A file of studies, trained in pieces of time, into one table and one page."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tether.episodic.algorithms import config_from_dict
from tether.episodic.commands import check_folders, check_same_run, train_all
from tether.episodic.config import EpisodicConfig
from tether.episodic.curves import task_name, write_overview
from tether.episodic.options import CompareConfig, TrainConfig, train_config
from tether.episodic.presets import choose
from tether.episodic.run_kind import EPISODIC_RUNS
from tether.errors import ConfigError, did_you_mean
from tether.experiments.run_data import RunData
from tether.experiments.settings_file import load_yaml
from tether.experiments.study_table import StudyTable

_KINDS = {EPISODIC_RUNS.name: EPISODIC_RUNS}


@dataclass(frozen=True)
class Study:
    """An entry of a queue: one preset, with some seeds of some algorithms."""

    preset: str
    """Vetted settings; each algorithm takes the preset's variant for it, if there is one."""
    algos: tuple[str, ...] | None = None
    """Algorithms: names, or "package.module:Class"; without them the preset's own."""
    seeds: tuple[int, ...] = (0,)
    """Which seeds."""
    until: int | None = None
    """Iteration to stop after; the schedules still end with the preset's last."""
    label: str = ""
    """What sets it apart from others on the same task: "ours"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the preset, by dotted names: {critic.state_stride: 5}."""

    def __post_init__(self) -> None:
        """Refuse values of other types, which a file may hold; a lone algorithm or seed is a list of one."""
        if self.algos is None and isinstance(self.preset, str):
            object.__setattr__(self, "algos", choose(self.preset)[1].algo)
        for name in ("algos", "seeds"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list | tuple) else (value,))
        until = self.until
        for name, fits, wanted in (
            ("preset", isinstance(self.preset, str), "its name"),
            ("algos", self.algos and all(isinstance(algo, str) for algo in self.algos), "names"),
            ("seeds", self.seeds and all(type(seed) is int for seed in self.seeds), "whole numbers"),
            ("until", until is None or (type(until) is int and until >= 1), "a whole number from 1"),
            ("label", isinstance(self.label, str), "text"),
            ("settings", _by_name(self.settings), "values by names, as in {critic.state_stride: 5}"),
        ):
            if not fits:
                raise ConfigError(f"A study has {name} = {getattr(self, name)!r}; give {wanted}.")
        for name in ("algos", "seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):  # two runs in one folder
                raise ConfigError(f"A study has {name} = {values!r}; give each once.")
        if decided := sorted({"algo", "seed"} & self.settings.keys()):
            raise ConfigError(
                f"A study's settings have {' and '.join(decided)}, which algos and seeds decide. Remove it."
            )

    @property
    def name(self) -> str:
        """Of its folder, and of its grid in the table."""
        parts = filter(None, (self.preset, self.label))
        return "-".join(re.sub("[:/ ]", "-", part) for part in parts)

    def runs(self, output: Path) -> list[TrainConfig]:
        """What it trains."""
        assert self.algos is not None
        found = []
        for algo in self.algos:
            options = train_config(self.preset, None, algo)
            for seed in self.seeds:
                settings = changed(options.settings, {**self.settings, "seed": seed})
                until = None if self.until is None else min(self.until, settings.iterations)
                found.append(replace(
                    options, settings=settings, output=output / self.name / f"{algo}-seed{seed}", resume=True,
                    label=", ".join(filter(None, (algo, self.label))), until=until, film=False,
                ))  # fmt: skip
        return found


def changed(config: EpisodicConfig, settings: Mapping[str, Any]) -> EpisodicConfig:
    """A configuration with other values of settings, by dotted names.

    Raises:
        ConfigError: an unknown setting.

    >>> from tether.episodic.presets import preset
    >>> changed(preset("hopper-jump-paper"), {"critic.state_stride": 5, "seed": 3}).critic.state_stride
    5
    """
    values = config.as_dict()
    for path, value in settings.items():
        place = values
        *outer, name = path.split(".")
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"Unknown setting {path}: {part} is {place!r}, with nothing below it.")
        place[name] = value
    return config_from_dict(values)


def _by_name(settings: object) -> bool:
    return isinstance(settings, Mapping) and all(isinstance(name, str) for name in settings)


def read_queue(path: Path) -> list[Study]:
    """The studies of a YAML file.

    Raises:
        ConfigError: no list of studies, an unknown key, a value of another type, a name twice, or two studies
            that one page could not tell apart.
    """
    known = {one.name for one in fields(Study)}
    entries = load_yaml(path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path} must hold a list of studies, as in '- {{preset: hopper-jump-quick}}'.")
    studies = []
    for entry in entries:
        for key in entry:
            if key not in known:
                raise ConfigError(f"{path}: unknown key {key!r}.{did_you_mean(str(key), known)}")
        if "preset" not in entry:
            raise ConfigError(f"{path}: the study {entry} names no preset.")
        try:
            studies.append(Study(**entry))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    names = [study.name for study in studies]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{path}: {', '.join(sorted(twice))} occurs twice. Give the studies labels.")
    _check_told_apart(path, studies)
    return studies


def _check_told_apart(path: Path, studies: list[Study]) -> None:
    """Refuse different studies of one task with one label, which would count as seeds of one method."""
    found: dict[tuple[str, str], Study] = {}
    for study in studies:
        for run in study.runs(Path()):
            key = task_name(run.settings.as_dict()), run.label or run.settings.algo
            other = found.setdefault(key, study)
            if other is not study:
                raise ConfigError(
                    f"{path}: {other.name} and {study.name} both train {key[1]!r} on {key[0]}, so that "
                    "their runs would be averaged as seeds of one method. Give one of them a label."
                )


def queue_command(config: CompareConfig) -> Path:
    """Train a queue's studies, as far as the minutes go; the page about what there is by now.

    The first seed of each study comes first, in the file's order, then the second of each: a little is known
    of everything early. The same command goes on from there. With `results`, what was measured is kept in a
    table, from which the page is drawn: also of runs whose folders are on another machine or were lost since,
    which are not trained again if they had come to their end.

    Raises:
        ConfigError: a queue or settings that do not fit, or a run in a folder or in the table with other
            settings than the queue gives it, before anything runs; nothing measured yet.
        RunFailedError: a run ended before it was finished; the others are kept.
    """
    assert config.queue is not None
    studies = read_queue(config.queue)
    runs = _by_seed(studies, config.output)
    check_folders(runs)
    if config.results is not None:
        table = StudyTable(config.results, _KINDS)
        check_table(studies, table)
        runs = [run for run in runs if not _complete_elsewhere(run, table)]
    try:
        if runs:
            train_all(runs, config)
    finally:
        found = _collect(studies, config)
    if not found:
        raise ConfigError("No run of the queue has measured anything yet. Give it more minutes.")
    return write_overview(found, config.output / "report" / "index.html", config.queue.stem.capitalize())


def _by_seed(studies: list[Study], output: Path) -> list[TrainConfig]:
    """All runs: the first seeds of all studies, then the second ones."""
    placed = [(study.seeds.index(run.settings.seed), run) for study in studies for run in study.runs(output)]
    return [run for _, run in sorted(placed, key=operator.itemgetter(0))]


def _complete_elsewhere(run: TrainConfig, table: StudyTable) -> bool:
    """Whether the table has a run to its end that has no folder here."""
    kept = table.runs(run.folder().parent.name).get(run.folder().name)
    return kept is not None and kept.steps >= run.end() and not run.folder().exists()


def check_table(studies: list[Study], table: StudyTable) -> None:
    """Refuse a table that holds a run of the queue with other settings.

    Raises:
        ConfigError: as `check_same_run`.
    """
    for study in studies:
        kept = table.runs(study.name)
        for run in study.runs(Path()):
            if same := kept.get(run.folder().name):
                check_same_run(
                    same.config, same.path, run, "another table (results), or delete the rows of that run"
                )


def _collect(studies: list[Study], config: CompareConfig) -> list[RunData]:
    """What the runs have measured, kept in the table if there is one."""
    table = None if config.results is None else StudyTable(config.results, _KINDS)
    found = []
    for study in studies:
        folders = [run.folder() for run in study.runs(config.output)]
        runs = [RunData.read(path, _KINDS) for path in folders if (path / "config.json").is_file()]
        runs = [run for run in runs if run.evals]
        if table is not None:
            kept = table.runs(study.name)
            longer = [run for run in runs if run.name not in kept or _reached(run) > _reached(kept[run.name])]
            table.add(study.name, longer, unfinished=True)
            runs = list(table.runs(study.name).values())
        found += runs
    return found


def _reached(run: RunData) -> tuple[int, int, bool]:
    """How far a run has come: one killed in its last iteration lacks what follows, not that iteration."""
    return run.steps, len(run.evals), run.finished
