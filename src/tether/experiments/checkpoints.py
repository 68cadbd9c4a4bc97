"""Checkpoint folders that are complete or do not count."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tether.errors import CheckpointError, InvalidInputError, warn
from tether.experiments.files import atomic_write_json, load_json, sync_folder

Damaged = Literal["refuse", "skip"]
"""What to do with a checkpoint whose files are not those that were written."""

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
    """An empty folder for the checkpoint of ``step``; the rest of an attempt that was killed is removed."""
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
    """Force a checkpoint's files to the disk, then write `COMPLETE`, their sizes and SHA-256, into it."""
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
    listed = {path.relative_to(folder).as_posix(): fingerprint(path) for path in sorted(files)}
    atomic_write_json(folder / COMPLETE, {"step": step, "files": listed})
    return Checkpoint(step, folder)


def find_damage(checkpoint: Checkpoint) -> str | None:
    """What is wrong with a complete checkpoint's files, in words; None if they are as they were written.

    Every file is read and compared with the size and SHA-256 in `COMPLETE`. Checkpoints from before these
    were noted count as whole.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     _ = (start_checkpoint(Path(root), 5) / "state.pt").write_bytes(b"whole")
    ...     checkpoint = complete_checkpoint(Path(root), 5)
    ...     sound = find_damage(checkpoint)
    ...     _ = (checkpoint.path / "state.pt").write_bytes(b"wh")
    ...     sound, find_damage(checkpoint)
    (None, 'state.pt has 2 bytes instead of 5')
    """
    try:
        listed = load_json((checkpoint.path / COMPLETE).read_bytes()).get("files", {})
        sizes = {name: wanted["bytes"] for name, wanted in listed.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        return f"{COMPLETE} is not what was written ({error!r})"
    for name, wanted in listed.items():
        path = checkpoint.path / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != sizes[name]:
            return f"{name} has {path.stat().st_size} bytes instead of {sizes[name]}"
        if fingerprint(path) != wanted:
            return f"{name} holds other bytes than were written (its SHA-256 differs)"
    return None


def newest_intact_checkpoint(root: Path, damaged: Damaged = "refuse") -> Checkpoint | None:
    """The newest complete checkpoint whose files are as they were written; None if there is none."""
    if damaged not in get_args(Damaged):
        raise InvalidInputError(f"damaged={damaged!r}: use 'refuse' or 'skip'.")
    found = complete_checkpoints(root)
    while found:
        newest = found.pop()
        damage = find_damage(newest)
        if damage is None:
            return newest
        before = f"the one before it, of step {found[-1].step}" if found else "nothing: the run begins anew"
        if damaged == "refuse":
            raise CheckpointError(
                f"{newest.path} is damaged: {damage}. Restore the file; or delete the folder, or skip "
                f"damaged checkpoints, to go on from {before}."
            )
        warn(f"{newest.path} is damaged ({damage}) and passed over; going on from {before}.")
    return None


def fingerprint(path: Path) -> dict[str, int | str]:
    """Size and SHA-256 of a file, which tell whether it is the one that was there."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


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


def prune_checkpoints(root: Path, keep: int) -> list[int]:
    """Delete all but the ``keep`` newest complete checkpoints.

    The newest complete checkpoint always stays, and folders not (yet) complete are not touched.
    Returns the steps deleted.
    """
    if keep < 1:
        raise InvalidInputError(f"keep={keep}: at least the newest checkpoint must stay; give 1 or more.")
    old = complete_checkpoints(root)[:-keep]
    for checkpoint in old:
        remove_checkpoint(checkpoint.path)
    return [checkpoint.step for checkpoint in old]
