"""Run folders, seeds, statistics, plots and reports: what both sides of Tether share around training."""

from __future__ import annotations

from tether.experiments.checkpoints import Checkpoint
from tether.experiments.files import atomic_write_bytes, atomic_write_json, atomic_write_text
from tether.experiments.progress import TrainingProgress
from tether.experiments.run_config import RunConfig
from tether.experiments.runs import RunFolder, find_runs
from tether.experiments.seeds import RandomState, seed_everything

__all__ = [
    "Checkpoint",
    "RandomState",
    "RunConfig",
    "RunFolder",
    "TrainingProgress",
    "atomic_write_bytes",
    "atomic_write_json",
    "atomic_write_text",
    "find_runs",
    "seed_everything",
]
