"""Checkpoint folders that are complete or do not count."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tether.errors import CheckpointError, InvalidInputError
from tether.experiments.files import atomic_write_json, sync_folder

COMPLETE = "COMPLETE"
"""The file written last into a checkpoint folder; without it the checkpoint does not count."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its step and its folder."""

    step: int
    path: Path


def step_name(step: int) -> str:
    """``step-000050``: names that sort as the steps do.

    >>> step_name(50)
    'step-000050'
    """
    if step < 0:
        raise InvalidInputError(f"A step counts from 0; got {step}.")
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step of a file or folder named by `step_name`; None for any other name.

    >>> step_of(Path("samples/step-000050.jsonl")), step_of(Path("best"))
    (50, None)
    """
    prefix, _, digits = path.stem.partition("-")
    return int(digits) if prefix == "step" and digits.isascii() and digits.isdigit() else None


def start_checkpoint(root: Path, step: int) -> Path:
    """An empty folder for the checkpoint of ``step``; the rest of an attempt that was killed is removed.

    Raises:
        CheckpointError: that step has a complete checkpoint already.
    """
    folder = root / step_name(step)
    if (folder / COMPLETE).exists():
        raise CheckpointError(
            f"{folder} is a complete checkpoint already. Save at a later step, or delete it first."
        )
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def complete_checkpoint(root: Path, step: int) -> Checkpoint:
    """Force the files of a checkpoint to the disk, then write `COMPLETE` into it.

    Raises:
        CheckpointError: there is no such folder, or it is empty.
    """
    folder = root / step_name(step)
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    if not files:
        raise CheckpointError(
            f"{folder} holds no files, so it cannot be a complete checkpoint. "
            "Save the state into checkpoint_folder(step) before mark_complete(step)."
        )
    for path in files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    for inner in {path.parent for path in files} | {folder.parent}:
        sync_folder(inner)
    atomic_write_json(folder / COMPLETE, {"step": step})
    return Checkpoint(step, folder)


def complete_checkpoints(root: Path) -> list[Checkpoint]:
    """The complete checkpoints under ``root``, oldest first."""
    found = []
    for folder in root.glob("step-*"):
        step = step_of(folder)
        if step is not None and (folder / COMPLETE).is_file():
            found.append(Checkpoint(step, folder))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint so that, if killed half-way, what is left does not count as complete."""
    (checkpoint / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def prune_checkpoints(root: Path, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Delete all but the ``keep`` newest complete checkpoints and those of the steps in ``protect``.

    The newest complete checkpoint always stays, and folders not (yet) complete are not touched.
    Returns the steps deleted.

    Raises:
        InvalidInputError: ``keep`` below 1.
    """
    if keep < 1:
        raise InvalidInputError(f"keep={keep}: at least the newest checkpoint must stay; give 1 or more.")
    deleted = []
    for checkpoint in complete_checkpoints(root)[:-keep]:
        if checkpoint.step not in protect:
            remove_checkpoint(checkpoint.path)
            deleted.append(checkpoint.step)
    return deleted
