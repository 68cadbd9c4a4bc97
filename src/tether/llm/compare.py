"""Train several trust regions on the same work, side by side."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from tether.experiments.jobs import Job, run_jobs
from tether.experiments.settings_file import write_settings
from tether.llm.config import CompareConfig, TrainConfig


def compare(config: CompareConfig) -> list[Path]:
    """Run every trust region with every seed, several at a time, each with its share of the cores.

    Finished runs are skipped and interrupted ones continued, so the same command goes on after a crash.

    Returns:
        The run folders: trust regions in the order of the config, seeds within them.

    Raises:
        RunFailedError: a run ended before it was finished; the others are kept.
    """
    runs = _runs(config)
    cores = os.cpu_count() or 1
    at_once = min(config.jobs or cores, len(runs))
    threads = max(1, cores // at_once)
    config.output.mkdir(parents=True, exist_ok=True)
    jobs = [_job(replace(run, threads=threads)) for run in runs]
    run_jobs(jobs, at_once=at_once, environment={"OMP_NUM_THREADS": str(threads)})
    return [run.output for run in runs]


def _runs(config: CompareConfig) -> list[TrainConfig]:
    return [
        replace(
            config.train,
            output=config.output / f"{trust_region}-seed{seed}",
            trust_region=trust_region,
            seed=seed,
            resume=True,
        )
        for trust_region in config.trust_regions
        for seed in config.seeds
    ]


def _job(run: TrainConfig) -> Job:
    settings = write_settings(run.output.with_name(run.output.name + ".yaml"), run)
    command = (sys.executable, "-m", "tether", "llm", "train", "--config", str(settings))
    return Job(f"{run.label}, seed {run.seed}", command, run.output, run.steps)
