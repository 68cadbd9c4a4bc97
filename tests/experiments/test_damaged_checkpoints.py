"""Checkpoints that are not what was written: found, named, and refused or passed over by choice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tether.errors import CheckpointError, InvalidInputError, TetherWarning
from tether.experiments import RunFolder
from tether.experiments.checkpoints import COMPLETE, Checkpoint, find_damage


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run", kind="llm", label="troll", seed=0, settings={})
    for step in (4, 8):
        folder = run.checkpoint_folder(step)
        (folder / "weights").write_bytes(bytes(range(200)))
        (folder / "deeper").mkdir()
        (folder / "deeper" / "state").write_text("momentum")
        run.mark_complete(step)
    return run


def truncate(checkpoint: Path) -> None:
    (checkpoint / "weights").write_bytes(bytes(range(100)))


def flip_a_bit(checkpoint: Path) -> None:
    (checkpoint / "weights").write_bytes(bytes([1, *range(1, 200)]))


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "deeper" / "state").unlink()


def cut_the_list(checkpoint: Path) -> None:
    (checkpoint / COMPLETE).write_bytes((checkpoint / COMPLETE).read_bytes()[:30])


def replace_the_list(checkpoint: Path) -> None:
    (checkpoint / COMPLETE).write_text("[]")


def list_names_alone(checkpoint: Path) -> None:
    (checkpoint / COMPLETE).write_text('{"files": ["weights"]}')


def list_no_sizes(checkpoint: Path) -> None:
    (checkpoint / COMPLETE).write_text('{"files": {"weights": {}}}')


DAMAGES = [
    (truncate, "weights has 100 bytes instead of 200"),
    (flip_a_bit, "weights holds other bytes"),
    (lose_a_file, "deeper/state is missing"),
    (cut_the_list, "COMPLETE is not what was written"),
    (replace_the_list, "COMPLETE is not what was written"),
    (list_names_alone, "COMPLETE is not what was written"),
    (list_no_sizes, "COMPLETE is not what was written"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(
    run: RunFolder, damage: Callable[[Path], None], words: str
) -> None:
    damage(run.checkpoints()[-1].path)
    with pytest.raises(CheckpointError, match=words) as refusal:
        run.latest_checkpoint()
    assert "step-000008" in str(refusal.value)
    assert "the one before it, of step 4" in str(refusal.value)


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_by_choice(
    run: RunFolder, damage: Callable[[Path], None], words: str
) -> None:
    damage(run.checkpoints()[-1].path)
    with pytest.warns(TetherWarning, match=words):
        found = run.latest_checkpoint(damaged="skip")
    assert found is not None
    assert found.step == 4


def test_without_a_sound_checkpoint_the_run_begins_anew_and_says_so(run: RunFolder) -> None:
    for checkpoint in run.checkpoints():
        truncate(checkpoint.path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TetherWarning)
        assert run.latest_checkpoint(damaged="skip") is None
    assert ["step-000008" in str(caught[0].message), "begins anew" in str(caught[1].message)] == [True, True]


def test_a_sound_checkpoint_of_before_sizes_were_noted_counts(run: RunFolder) -> None:
    newest = run.checkpoints()[-1]
    (newest.path / COMPLETE).write_text('{"step": 8}')
    assert find_damage(newest) is None
    assert run.latest_checkpoint() == Checkpoint(8, newest.path)


def test_an_unknown_choice_is_refused(run: RunFolder) -> None:
    with pytest.raises(InvalidInputError, match="'ignore'"):
        run.latest_checkpoint(damaged="ignore")  # type: ignore[arg-type]
