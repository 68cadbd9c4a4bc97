"""Train a grid of methods on the same work, and say what came of it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tether.errors import ConfigError
from tether.experiments.compact import is_finished, keep_compact
from tether.experiments.comparison import Entry, Row, compare_methods, comparison_tables, write_comparison
from tether.experiments.jobs import Job, run_jobs
from tether.experiments.settings_file import write_settings
from tether.experiments.summary import load_runs
from tether.llm.compare_config import CompareConfig
from tether.llm.config import TrainConfig
from tether.llm.grid import Cell, cells

# What a run of the embedded model costs on one core, in seconds, of which only the relations matter: starting
# a process, a response written and learned from, an optimizer step.
_COST_OF_A_START = 2.0
_COST_OF_A_RESPONSE = 0.0015
_COST_OF_A_STEP = 0.015

# Importing these takes as long as many a run of the embedded model.
_IMPORTED_BY_A_RUN = ("tether.llm.train", "tether.integrations.trl", "trl.trainer.grpo_trainer")


@dataclass(frozen=True)
class Comparison:
    """What a comparison has so far."""

    cells: list[Cell]
    """All of the grid, methods together, seeds within."""
    runs: list[Path]
    """Where the finished runs of those are."""
    unfinished: int
    """How many are not finished because the time was up."""


def compare(config: CompareConfig) -> Comparison:
    """Run every cell of the grid, several at a time, each with its share of the cores.

    Finished runs are skipped and interrupted ones continued, so the same command goes on after a crash;
    with `results` also on another machine or after the runs were deleted.

    Raises:
        ConfigError: a cell whose settings do not go together, before anything runs.
        RunFailedError: runs that ended before they were finished; all others are kept.
    """
    grid = cells(config)
    missing = [cell for cell in grid if not _is_kept(config, cell)]
    unfinished: list[Job] = []
    if missing:
        unfinished = _run(config, missing)
    in_order = _by_method(config, grid)
    folders = [_folder(config, cell) for cell in in_order]
    return Comparison(in_order, [folder for folder in folders if is_finished(folder)], len(unfinished))


def _run(config: CompareConfig, missing: Sequence[Cell]) -> list[Job]:
    cores = os.cpu_count() or 1
    at_once = min(config.jobs or cores, len(missing))
    threads = max(1, cores // at_once)
    config.output.mkdir(parents=True, exist_ok=True)
    jobs = [_job(cell, threads) for cell in missing]
    return run_jobs(
        jobs,
        at_once=at_once,
        environment={"OMP_NUM_THREADS": str(threads)},
        keep_going=True,
        seconds=None if config.minutes is None else 60 * config.minutes,
        on_finished=lambda job: _keep(config, job.folder),
        preloaded=() if _uses_accelerator(config) else _IMPORTED_BY_A_RUN,
    )


def _uses_accelerator(config: CompareConfig) -> bool:
    import torch

    return config.train.device != "cpu" and torch.accelerator.is_available()


def _job(cell: Cell, threads: int) -> Job:
    run = replace(cell.train, threads=threads)
    settings = write_settings(run.output.with_name(run.output.name + ".yaml"), run)
    command = (sys.executable, "-m", "tether", "llm", "train", "--config", str(settings))
    return Job(f"{run.label}, seed {run.seed}", command, run.output, run.steps, weight=_weight(run))


def _weight(run: TrainConfig) -> float:
    responses = run.steps * run.responses_per_update
    return _COST_OF_A_START + _COST_OF_A_RESPONSE * responses + _COST_OF_A_STEP * run.steps


def _keep(config: CompareConfig, folder: Path) -> None:
    """Keep a small copy of a finished run, and give back the disk that only going on with it needed."""
    if config.results is None:
        return
    keep_compact(folder, config.results / folder.name)
    for name in ("checkpoints", "model", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _is_kept(config: CompareConfig, cell: Cell) -> bool:
    """Whether a copy of the finished run is there, and is of this very run."""
    if config.results is None:
        return False
    folder = config.results / cell.train.output.name
    if not is_finished(folder):
        return False
    [run] = load_runs([folder])
    changed = _changed(run.config.settings, cell.train)
    if changed:
        raise ConfigError(
            f"{folder} holds a run with other settings ({changed}). Give the comparison another "
            "results folder, or delete that run."
        )
    return True


def _changed(kept: dict[str, object], train: TrainConfig) -> str:
    """The settings that differ. One that a kept run does not know came later; such a run had its default."""
    from tether.experiments.files import dump_json, load_json

    asked, defaults = (load_json(dump_json(config.settings())) for config in (train, TrainConfig()))
    kept = {name: kept.get(name, default) for name, default in defaults.items()}
    ignored = {"device", "save_every", "keep_checkpoints", "name"}
    return "; ".join(
        f"{name}: {value!r} there, {asked[name]!r} here"
        for name, value in kept.items()
        if name not in ignored and asked[name] != value
    )


def _folder(config: CompareConfig, cell: Cell) -> Path:
    return cell.train.output if config.results is None else config.results / cell.train.output.name


def _by_method(config: CompareConfig, grid: Sequence[Cell]) -> list[Cell]:
    """Point by point, methods as given within, seeds within those."""
    points = {cell.point: place for place, cell in reversed(list(enumerate(grid)))}

    def place(cell: Cell) -> tuple[int, int, int]:
        return (
            points[cell.point],
            config.trust_regions.index(cell.method),
            config.seeds.index(cell.seed),
        )

    return sorted(grid, key=place)


def baseline_of(config: CompareConfig) -> str | None:
    """The method all others are tested against; None if there is but one."""
    if len(config.trust_regions) < 2:
        return None
    if config.baseline is not None:
        return config.baseline
    return "clip" if "clip" in config.trust_regions else config.trust_regions[-1]


def _baseline_label(config: CompareConfig, comparison: Comparison) -> str | None:
    baseline = baseline_of(config)
    return next((cell.method_label for cell in comparison.cells if cell.method == baseline), None)


def rows_of(config: CompareConfig, comparison: Comparison) -> tuple[str, list[Row]]:
    """The metric and the rows of the comparison's finished runs.

    Raises:
        ConfigError: nothing is finished yet.
    """
    if not comparison.runs:
        raise ConfigError("No run of the comparison is finished yet. Give it more minutes.")
    by_folder = {_folder(config, cell): cell for cell in comparison.cells}
    entries = []
    for run in load_runs(comparison.runs):
        cell = by_folder[run.folder.path]
        samples = cell.train.steps * cell.train.responses_per_update
        entries.append(Entry(cell.method_label, cell.point_label, run, samples))
    return compare_methods(entries, _baseline_label(config, comparison))


def report_comparison(config: CompareConfig, comparison: Comparison) -> Path:
    """Print the table, write the JSON and the page; returns the page."""
    from rich.console import Console

    from tether.experiments.report import write_report
    from tether.experiments.summary import print_results

    folder = config.output / "report"
    metric, rows = rows_of(config, comparison)
    baseline = _baseline_label(config, comparison)
    for place in filter(None, (folder, config.results)):
        write_comparison(place / "comparison.json", metric, rows, baseline)
    if len(config.seeds) > 1 or any(cell.point for cell in comparison.cells):
        for table in comparison_tables(metric, rows, baseline):
            Console().print(table)
    else:  # one run a method: intervals over problems are all there is
        print_results(comparison.runs)
    return write_report(comparison.runs, folder, comparison=(metric, rows, baseline))
