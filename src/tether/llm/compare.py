"""Train a grid of methods on the same work, and say what came of it."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tether.errors import ConfigError
from tether.experiments.comparison import Entry, Row, compare_methods, comparison_tables, write_comparison
from tether.experiments.files import dump_json, load_json
from tether.experiments.jobs import Job, run_jobs, usable_cores
from tether.experiments.run_config import flatten_settings, refuse_other_settings
from tether.experiments.run_data import RunData
from tether.experiments.run_start import is_finished
from tether.experiments.settings_file import write_settings
from tether.experiments.study_table import StudyTable
from tether.llm.compare_config import CompareConfig
from tether.llm.config import MAY_CHANGE, TrainConfig
from tether.llm.grid import Cell, cells
from tether.llm.run_kind import LLM_RUNS

KINDS = {LLM_RUNS.name: LLM_RUNS}

# What a run of the embedded model costs on one core, in seconds, of which only the relations matter: starting
# a process, a response written and learned from, an optimizer step.
_COST_OF_A_START = 2.0
_COST_OF_A_RESPONSE = 0.0015
_COST_OF_A_STEP = 0.015

# What does not tell a finished run from one that is asked for.
_IGNORED = frozenset({"device", "save_every", "keep_checkpoints", "name"})

# A table is written whole each time, for runs that may take seconds.
_SECONDS_BETWEEN_TABLES = 60.0

# Importing these takes as long as many a run of the embedded model.
_IMPORTED_BY_A_RUN = ("tether.llm.train", "tether.integrations.trl", "trl.trainer.grpo_trainer")


@dataclass(frozen=True)
class Comparison:
    """What a comparison has so far."""

    finished: list[tuple[Cell, RunData]]
    """The finished runs with their cells: methods together, seeds within."""
    unfinished: int
    """How many are not finished because the time was up."""


def compare(config: CompareConfig) -> Comparison:
    """Run every cell of the grid, several at a time, each with its share of the cores.

    Finished runs are skipped and interrupted ones continued, so the same command goes on after a crash;
    with `results` also on another machine or after the runs were deleted.

    Raises:
        ConfigError: a cell whose settings do not go together, or a finished run of other settings, before
            anything runs.
        RunFailedError: runs that ended before they were finished; all others are kept.
    """
    comparison = finished_runs(config)
    finished = {cell.name for cell, _ in comparison.finished}
    missing = [cell for cell in cells(config) if cell.name not in finished]
    if not missing:
        return comparison
    # The table takes those that are finished in the output folder as they are.
    there = {cell.name: cell for cell in missing if is_finished(cell.train.output)}
    for run in _read(cell.train.output for cell in there.values()):
        _refuse_others(run, there[run.name], _IGNORED, "another output folder, or delete that run")
    unfinished = _run(config, missing)
    return replace(finished_runs(config), unfinished=len(unfinished))


def finished_runs(config: CompareConfig) -> Comparison:
    """What there is of the comparison, without training anything.

    Raises:
        ConfigError: a finished run has other settings than the grid gives it.
    """
    grid = _by_method(config, cells(config))
    kept = _kept(config, grid)
    in_order = [(cell, kept[cell.name]) for cell in grid if cell.name in kept]
    return Comparison(in_order, len(grid) - len(in_order))


def _run(config: CompareConfig, missing: Sequence[Cell]) -> list[Job]:
    import torch

    cores = usable_cores()
    on_cpu = config.train.device == "cpu" or not torch.accelerator.is_available()
    at_once = min(config.jobs or cores, len(missing))
    threads = max(1, cores // at_once)
    config.output.mkdir(parents=True, exist_ok=True)
    finished = _Finished(config)
    earlier = {cell.train.output for cell in missing if is_finished(cell.train.output)}

    def finish(job: Job) -> None:
        finished.add(job.folder)
        # Who trained a run without a table may want its model.
        if config.results is not None and job.folder not in earlier:
            _give_back_disk(job.folder)

    try:
        # Of this call alone: by the next one a task's own code may be another.
        with tempfile.TemporaryDirectory() as starts:
            return run_jobs(
                [_job(cell, threads, Path(starts)) for cell in missing],
                at_once=at_once,
                environment={"OMP_NUM_THREADS": str(threads)},
                keep_going=True,
                seconds=None if config.minutes is None else 60 * config.minutes,
                on_finished=finish,
                preloaded=_IMPORTED_BY_A_RUN if on_cpu else (),
                displayed=LLM_RUNS.displayed,
            )
    finally:
        # After a crash of this process instead, the same command finds these runs finished and keeps them.
        finished.keep()


class _Finished:
    """Finished runs on their way into the table, if there is one: together where many end in a short time."""

    def __init__(self, config: CompareConfig) -> None:
        self._config = config
        self._waiting: list[Path] = []
        self._kept_at = time.monotonic()

    def add(self, folder: Path) -> None:
        self._waiting.append(folder)
        if time.monotonic() - self._kept_at > _SECONDS_BETWEEN_TABLES:
            self.keep()

    def keep(self) -> None:
        if self._config.results is not None:
            StudyTable(self._config.results, KINDS).add(grid_name(self._config), _read(self._waiting))
        self._waiting, self._kept_at = [], time.monotonic()


def _job(cell: Cell, threads: int, starts: Path) -> Job:
    run = replace(cell.train, threads=threads)
    settings = write_settings(run.output.with_name(run.output.name + ".yaml"), run)
    command = (
        *(sys.executable, "-m", "tether", "llm", "train", "--config", str(settings)),
        *("--start-evaluations", str(run.start_evaluations or starts)),
    )
    cost_of_a_step = _COST_OF_A_RESPONSE * run.responses_per_update + _COST_OF_A_STEP
    weight = _COST_OF_A_START + run.steps * cost_of_a_step
    return Job(f"{run.label}, seed {run.seed}", command, run.output, run.steps, weight)


def _give_back_disk(folder: Path) -> None:
    """Delete what only going on with a run needs."""
    for name in ("checkpoints", "model", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)


def grid_name(config: CompareConfig) -> str:
    """Under which name the comparison's runs stand in its table."""
    return config.output.name


def _read(folders: Iterable[Path]) -> list[RunData]:
    return [RunData.read(folder, KINDS) for folder in folders]


def _kept(config: CompareConfig, grid: Sequence[Cell]) -> dict[str, RunData]:
    """The finished runs of the grid by name, all of these very settings."""
    ignored = _IGNORED
    if config.results is None:
        finished = _read(cell.train.output for cell in grid if is_finished(cell.train.output))
        remedy = "another output folder, or delete that run"
        # A run that was killed may go on with these; a finished one of other steps is another run.
        ignored |= set(MAY_CHANGE) - {"steps"}
    else:
        table = StudyTable(config.results, KINDS).runs(grid_name(config))
        finished = [run for run in table.values() if run.finished]
        remedy = "another table (results) or another output folder, or delete the rows of that run"
    runs = {run.name: run for run in finished}
    for cell in grid:
        if (run := runs.get(cell.name)) is not None:
            _refuse_others(run, cell, ignored, remedy)
    return runs


def _refuse_others(run: RunData, cell: Cell, ignored: Collection[str], remedy: str) -> None:
    refuse_other_settings(run.path, _changed(run.config.settings, cell.train, ignored), remedy)


def _changed(
    kept: dict[str, object], train: TrainConfig, ignored: Collection[str]
) -> dict[str, tuple[object, object]]:
    """The settings that differ. One that a kept run does not know came later; such a run had its default."""
    asked, defaults = (load_json(dump_json(config.settings())) for config in (train, TrainConfig()))
    asked, kept = flatten_settings(asked), flatten_settings({**defaults, **kept})
    return {
        name: (kept.get(name, "not set"), asked.get(name, "no such setting"))
        for name in {**kept, **asked}
        if name not in ignored and (name not in asked or name not in kept or asked[name] != kept[name])
    }


def _by_method(config: CompareConfig, grid: Sequence[Cell]) -> list[Cell]:
    """Point by point, methods as given within, seeds within those."""
    points = {cell.point: place for place, cell in reversed(list(enumerate(grid)))}

    def place(cell: Cell) -> tuple[int, int, int]:
        return (
            points[cell.point],
            config.methods.index(cell.method),
            config.seeds.index(cell.seed),
        )

    return sorted(grid, key=place)


def baseline_of(config: CompareConfig) -> str | None:
    """The method all others are tested against; None if there is but one."""
    if len(config.methods) < 2:
        return None
    if config.baseline is not None:
        return config.baseline
    return "clip" if "clip" in config.methods else config.methods[-1]


def baseline_label(config: CompareConfig, comparison: Comparison) -> str | None:
    """The baseline in words; None if there is none, or none of its runs is finished."""
    baseline = baseline_of(config)
    return next((cell.method_label for cell, _ in comparison.finished if cell.method == baseline), None)


def rows_of(config: CompareConfig, comparison: Comparison) -> tuple[str, list[Row]]:
    """The metric and the rows of the comparison's finished runs.

    Raises:
        ConfigError: nothing is finished yet.
    """
    if not comparison.finished:
        raise ConfigError("No run of the comparison is finished yet. Give it more minutes.")
    entries = [
        Entry(cell.method_label, cell.point_label, run, cell.train.steps * cell.train.responses_per_update)
        for cell, run in comparison.finished
    ]
    return compare_methods(entries, baseline_label(config, comparison))


def report_comparison(config: CompareConfig, comparison: Comparison) -> Path:
    """Print the table, write the JSON and the page; returns the page."""
    from rich.console import Console

    from tether.experiments.report import write_report
    from tether.experiments.summary import print_results

    folder = config.output / "report"
    metric, rows = rows_of(config, comparison)
    baseline = baseline_label(config, comparison)
    runs = [run for _, run in comparison.finished]
    write_comparison(folder / "comparison.json", metric, rows, baseline)
    if len(config.seeds) > 1 or any(cell.point for cell, _ in comparison.finished):
        for table in comparison_tables(metric, rows, baseline):
            Console().print(table)
    else:  # one run a method: intervals over problems are all there is
        print_results(runs)
    return write_report(runs, folder, comparison=(metric, rows, baseline))
