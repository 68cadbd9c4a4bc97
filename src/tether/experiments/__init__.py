"""Run folders, seeds, statistics, plots and reports: what both sides of Tether share around training."""

from __future__ import annotations

from tether.experiments.checkpoints import Checkpoint
from tether.experiments.files import atomic_write_bytes, atomic_write_json, atomic_write_text
from tether.experiments.progress import TrainingProgress
from tether.experiments.report import write_report
from tether.experiments.run_config import RunConfig
from tether.experiments.run_data import RunData
from tether.experiments.run_kind import RunKind
from tether.experiments.run_start import find_runs, seed_everything
from tether.experiments.runs import RunFolder
from tether.experiments.study_table import StudyTable, load_runs
from tether.experiments.summary import print_results, results_table, summarise

__all__ = [
    "Checkpoint",
    "RunConfig",
    "RunData",
    "RunFolder",
    "RunKind",
    "StudyTable",
    "TrainingProgress",
    "atomic_write_bytes",
    "atomic_write_json",
    "atomic_write_text",
    "find_runs",
    "load_runs",
    "print_results",
    "results_table",
    "seed_everything",
    "summarise",
    "write_report",
]
