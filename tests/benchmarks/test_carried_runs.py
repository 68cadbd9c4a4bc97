"""Long robot runs carried from machine to machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.episodic.point_runs import content

from benchmarks import carried_runs
from tether.episodic.commands import train_command
from tether.episodic.config import OnPolicyConfig
from tether.episodic.options import TrainConfig
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.queue import read_queue
from tether.experiments import RunFolder

SETTINGS = OnPolicyConfig(
    "tether/PointReach-v0",
    iterations=3,
    num_workers=0,
    episodes=4,
    evaluation_episodes=2,
    evaluate_every=1,
    checkpoint_every=1,
    motion=ProDMPConfig(num_basis=2),
)


def run_in(output: Path, until: int | None = None) -> TrainConfig:
    folder = output / "point" / "tce-seed0"
    return TrainConfig(SETTINGS, output=folder, resume=True, until=until, film=False)


@pytest.fixture
def half_way(tmp_path: Path) -> Path:
    train_command(run_in(tmp_path / "here", until=2))
    return tmp_path / "here"


def test_a_carried_run_goes_on_as_if_it_had_never_moved(
    half_way: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried, there = tmp_path / "carried", tmp_path / "there"
    monkeypatch.setattr(carried_runs, "WORTH_CARRYING_S", 0.0)
    (archive,) = carried_runs.pack([run_in(half_way)], half_way, carried)
    assert archive == carried / "point" / "tce-seed0.tar.xz"
    (folder,) = carried_runs.unpack([run_in(there)], there, carried)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert carried_runs.unpack([run_in(there)], there, carried) == []  # what stands there stays

    moved, stayed = train_command(run_in(there)), train_command(run_in(half_way))
    assert moved.finished
    assert content(moved.path) == content(stayed.path)
    assert carried_runs.pack([run_in(there)], there, carried) == []
    assert not archive.exists()


def test_only_long_runs_on_their_way_are_carried(half_way: Path, tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    absent = replace(run_in(half_way), output=half_way / "point" / "tce-seed1")
    assert carried_runs.pack([run_in(half_way), absent], half_way, carried) == []
    assert not carried.exists()


def test_what_comes_with_the_repository_goes_on(tmp_path: Path) -> None:
    """Also a run that was begun before today's settings."""
    queue, carried = carried_runs.ROOT / "benchmarks/robots/long.yaml", carried_runs.CARRIED / "long"
    runs = [run for study in read_queue(queue) for run in study.runs(tmp_path)]
    if not (archives := list(carried.rglob("*.tar.xz"))):
        pytest.skip("no run is on its way")
    restored = carried_runs.unpack(runs, tmp_path, carried)
    assert len(restored) == len(archives)
    for run in runs:
        if run.folder() in restored:
            checkpoint = RunFolder.open(run.folder()).latest_checkpoint()
            assert checkpoint is not None
            alone = replace(run.settings, num_workers=0)
            resumed = train_command(replace(run, settings=alone, until=checkpoint.step, film=False))
            assert (resumed.finished, resumed.latest_checkpoint()) == (False, checkpoint)
