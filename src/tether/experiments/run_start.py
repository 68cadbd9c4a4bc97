"""Starting or resuming a run in a folder: its seed, what prevents it, its numbers; and finding runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tether.errors import CheckpointError, InvalidInputError, warn
from tether.experiments.files import TEMPORARY_PREFIX, FolderLock, load_json
from tether.experiments.run_config import (
    CONFIG_FILE,
    NOT_SET,
    RunConfig,
    differences,
    holds_run,
    read_config,
)
from tether.experiments.run_kind import Settings

FINISHED_FILE = "FINISHED"


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a run that came to its end."""
    return (folder / CONFIG_FILE).is_file() and (folder / FINISHED_FILE).is_file()


def check_target(path: Path, resume: bool) -> bool:
    """Whether ``path`` holds a run to resume; refuses what must not be overwritten."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; a run needs a folder. Choose another output folder.")
    if (path / CONFIG_FILE).is_file():
        if resume:
            return True
        old = read_config(path)
        state = "a finished run" if (path / FINISHED_FILE).exists() else "an unfinished run"
        raise CheckpointError(
            f"{path} already holds {state} ({old.label}, seed {old.seed}, started {old.started}). "
            "Pass resume=True (--resume) to go on with it, choose another output folder, or delete it."
        )
    check_empty(path, "run")
    return False


def check_empty(path: Path, meant: str) -> None:
    """Refuse a folder with other things in it than a lock and writes that were cut off.

    Raises:
        CheckpointError: naming some of them, and what was meant to be there.
    """
    own = (FolderLock.NAME, TEMPORARY_PREFIX)
    others = [item.name for item in path.iterdir() if not item.name.startswith(own)] if path.exists() else []
    if others:
        raise CheckpointError(
            f"{path} is not empty and holds no {meant}: it holds {', '.join(sorted(others)[:3])}. "
            "Choose another output folder; nothing was touched."
        )


def resumed_config(
    path: Path,
    asked: RunConfig,
    may_change: Collection[str],
    length: str | None,
    current: Callable[[Settings], dict[str, Any]],
) -> RunConfig:
    old = read_config(path)
    old = replace(old, settings=current(old.settings))
    changed = differences(old, asked, may_change)
    if changed:
        listed = "; ".join(
            f"{name}: {before!r} then, {after!r} now" for name, (before, after) in changed.items()
        )
        raise CheckpointError(
            f"{path} holds another run, which cannot be resumed with these settings ({listed}). "
            f"Use the same settings, or another output folder.{_on_retired(old, changed)}"
        )
    if old.versions != asked.versions:
        names = sorted(old.versions.keys() | asked.versions.keys())
        moved = [
            f"{name} {old.versions.get(name)} -> {asked.versions.get(name)}"
            for name in names
            if old.versions.get(name) != asked.versions.get(name)
        ]
        warn(
            f"{path} was started with other versions ({', '.join(moved)}); the resumed run may differ in its "
            "numbers. Install the old versions for an exact continuation."
        )
    if length in differences(old, asked):
        (path / FINISHED_FILE).unlink(missing_ok=True)
    return RunConfig(old.kind, old.label, old.seed, asked.settings, old.versions, old.started)


def _on_retired(old: RunConfig, changed: Mapping[str, tuple[Any, Any]]) -> str:
    gone = [name for name, (_, now) in changed.items() if now is NOT_SET]
    if not gone:
        return ""
    version = old.versions.get("tether-rl", "of then")
    # Or it is an option that was not given this time: options of a task or environment are known to it alone.
    return f" If there is no setting {', '.join(gone)} any more, Tether {version} goes on with such a run."


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders among and one or more levels below ``paths``, each once, in a stable order."""
    found: dict[Path, None] = {}
    for given in map(Path, paths):
        runs = [given] if (given / CONFIG_FILE).is_file() else _runs_below(given)
        if not runs:
            read_config(given)  # raises, with what is wrong
        found |= dict.fromkeys(runs)
    return list(found)


def _runs_below(path: Path) -> list[Path]:
    """Run folders under ``path``, not what is inside them."""
    runs: list[Path] = []
    for folder in sorted(config.parent for config in path.rglob(CONFIG_FILE)):  # a run before its inside
        if not any(run in folder.parents for run in runs) and holds_run(folder):
            runs.append(folder)
    return runs


def seed_everything(seed: int) -> None:
    """Make a run repeatable: seed Python's, numpy's and torch's generators (all devices).

    Operations that are not deterministic themselves (some CUDA kernels) stay so; see
    ``torch.use_deterministic_algorithms``.

    >>> seed_everything(3); first = np.random.rand()
    >>> seed_everything(3); bool(np.random.rand() == first)
    True
    """
    import torch

    if not 0 <= seed < 2**32:
        raise InvalidInputError(f"A seed lies in [0, 2^32); got {seed}.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def read_end(folder: Path) -> dict[str, Any]:
    """What a finished run noted at its end.

    Raises:
        CheckpointError: damaged.
    """
    file = folder / FINISHED_FILE
    try:
        return dict(load_json(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error}). Restore it, or delete it and let --resume finish the run again."
        ) from error


def as_number(name: str, value: object) -> float | int | bool:
    """A metric as a plain number.

    >>> as_number("loss", 0.5)
    0.5
    """
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        value = item()
    if not isinstance(value, int | float):
        raise InvalidInputError(
            f"Metric {name!r} must be a number; got a {type(value).__name__}: {value!r:.80}"
        )
    return value
