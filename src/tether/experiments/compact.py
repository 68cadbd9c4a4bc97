"""A small copy of a finished run, to keep and to commit: everything a table or a plot over training needs."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tether.errors import CheckpointError
from tether.experiments.files import (
    TEMPORARY_PREFIX,
    atomic_write_json,
    atomic_write_text,
    dump_json_lines,
    load_json,
)
from tether.experiments.run_config import CONFIG_FILE
from tether.experiments.run_start import FINISHED_FILE
from tether.experiments.runs import EVAL_FILE, METRICS_FILE, RunFolder

# What is a state or a running total: its last value, not its mean.
_LAST = frozenset({"step", "time_s", "tokens", "env_steps", "learning_rate"})


def keep_compact(source: str | Path, target: str | Path) -> Path:
    """Copy a finished run without checkpoints, model and samples, its metrics thinned to its evaluations.

    The copy is a run folder like any other and is read by the same tools. Each line of its ``metrics.jsonl``
    stands for all steps since the evaluation before: means, of ``..._max`` the largest, of totals the last.
    A copy that is there already is left alone.

    Returns:
        The folder of the copy, whole or not there.

    Raises:
        CheckpointError: the run is not finished.
    """
    source, target = Path(source), Path(target)
    if is_finished(target):
        return target
    run = RunFolder.open(source)
    if not run.finished:
        raise CheckpointError(f"The run {source} is not finished, so there is nothing to keep of it yet.")
    evals = run.evals()
    lines = thinned(run.metrics(), [int(record["step"]) for record in evals])
    unfinished = target.with_name(TEMPORARY_PREFIX + target.name)
    shutil.rmtree(unfinished, ignore_errors=True)
    atomic_write_json(unfinished / CONFIG_FILE, run.config.as_dict())
    atomic_write_text(unfinished / EVAL_FILE, dump_json_lines(evals))
    atomic_write_text(unfinished / METRICS_FILE, dump_json_lines(lines))
    end = load_json((source / FINISHED_FILE).read_text(encoding="utf-8"))
    atomic_write_json(unfinished / FINISHED_FILE, {**end, "metrics": "means between evaluations"})
    os.replace(unfinished, target)
    return target


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a run that came to its end."""
    return (folder / CONFIG_FILE).is_file() and (folder / FINISHED_FILE).is_file()


def thinned(records: Iterable[Mapping[str, Any]], ends: Iterable[int]) -> list[dict[str, Any]]:
    """One record for the steps up to each of `ends`, without those not finite unless nothing else is there.

    >>> thinned([{"step": 1, "kl_max": 1.0, "loss": 2.0}, {"step": 2, "kl_max": 3.0, "loss": 4.0}], [0, 2])
    [{'step': 2, 'kl_max': 3.0, 'loss': 3.0}]
    """
    rest = sorted(records, key=lambda record: int(record["step"]))
    result = []
    for end in sorted(set(ends)):
        block = [record for record in rest if record["step"] <= end]
        rest = rest[len(block) :]
        if block:
            result.append(_together(block))
    return result


def _together(block: list[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for record in block for name in record)
    return {name: _one(name, [record[name] for record in block if name in record]) for name in names}


def _one(name: str, values: list[Any]) -> Any:
    if name in _LAST:
        return values[-1]
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    if name.endswith("_max"):
        return max(known)
    finite = [value for value in known if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else known[-1]
