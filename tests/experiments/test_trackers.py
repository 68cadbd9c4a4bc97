"""Every tracker gets a run's numbers under the same names, and is read back from what it keeps offline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tether.errors import MissingDependencyError
from tether.experiments import RunFolder
from tether.experiments.trackers import DASHBOARD, check_trackers

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def begin(path: Path, *trackers: str, resume: bool = False) -> RunFolder:
    return RunFolder.create(
        path, kind="llm", label="troll", seed=0, settings={"kl_bound": 0.05}, trackers=trackers, resume=resume
    )


def log_some(path: Path, *trackers: str) -> None:
    with begin(path, *trackers) as run:
        run.log(1, kl_mean=0.5, projected=0.125)
        run.log(2, kl_mean=0.25, projected=0.0)
        run.track("trl", 2, {"clip_ratio/region_mean": 0.0})
        run.log_eval(2, success=1.0)


def events_of(path: Path) -> EventAccumulator:
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return events


def scalars(events: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    log_some(tmp_path / "run", "tensorboard")
    events = events_of(tmp_path / "run")
    assert scalars(events, "train/kl_mean") == [(1, 0.5), (2, 0.25)]
    assert scalars(events, "eval/success") == [(2, 1.0)]
    assert scalars(events, "trl/clip_ratio/region_mean") == [(2, 0.0)]


def test_tensorboard_has_a_dashboard_with_the_share_projected(tmp_path: Path) -> None:
    """The layout is in the event file, and its charts find the numbers of both kinds of run."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    log_some(tmp_path / "run", "tensorboard")
    stored = events_of(tmp_path / "run").Tensors("custom_scalars__config__")[0]
    layout = layout_pb2.Layout.FromString(stored.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(DASHBOARD)
    charts = {chart.title: list(chart.multiline.tag) for c in layout.category for chart in c.chart}
    assert "train/projected" in charts["share on which it acted"]
    assert not any("clip_ratio" in tag for tags in charts.values() for tag in tags)


@pytest.mark.parametrize("kind", ["llm", "episodic"])
def test_the_dashboard_names_what_runs_of_either_kind_are_reported_by(kind: str) -> None:
    from tether.kinds import KINDS

    tags = [tag for charts in DASHBOARD.values() for _, tags in charts.values() for tag in tags]
    shown = {f"{panel.source}/{panel.metric}" for panel in KINDS[kind].panels}
    # Time, smoothness and evaluations' returns are in the report.
    wanted = {name for name in shown if re.search("success$|success_greedy$|projected|kl_|entropy", name)}
    assert {name for name in wanted if not any(re.search(tag, name) for tag in tags)} == set()


def test_a_run_that_goes_on_hides_what_is_repeated(tmp_path: Path) -> None:
    with begin(tmp_path / "run", "tensorboard") as run:
        for step in (1, 2, 3):
            run.log(step, kl_mean=float(step))
    with begin(tmp_path / "run", "tensorboard", resume=True) as run:
        run.truncate_after(1)
        run.log(2, kl_mean=20.0)
    assert scalars(events_of(tmp_path / "run"), "train/kl_mean") == [(1, 1.0), (2, 20.0)]


def test_no_tracker_no_file(tmp_path: Path) -> None:
    log_some(tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_wandb_offline_keeps_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb, which `make test-matrix` installs")
    from wandb.proto import wandb_internal_pb2 as proto

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_some(tmp_path / "run", "wandb")
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    rows, settings = [], {}
    for data in records_of(file.read_bytes()):
        record = proto.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = [(list(item.nested_key) or [item.key], item.value_json) for item in record.history.item]
            rows.append({"/".join(key): json.loads(value) for key, value in items})
        else:  # settings come with the run, since wandb 0.31 in a record of their own
            config = record.run.config if record.HasField("run") else record.config
            settings |= {item.key: json.loads(item.value_json) for item in config.update}
    assert settings["label"] == "troll"
    assert settings["kl_bound"] == 0.05
    _check_rows([{k: v for k, v in row.items() if not k.startswith("_")} for row in rows])


def records_of(data: bytes) -> Iterator[bytes]:
    """A log of LevelDB's format after a header of 7 bytes: what Weights & Biases writes offline."""
    at, parts = 7, []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # a block ends in zeros where no header fits
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


TRACKIO = """
import json, sys
from pathlib import Path
from test_trackers import log_some
log_some(Path(sys.argv[1]), "trackio")
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("tether")
print("FOUND", json.dumps([runs, SQLiteStorage.get_logs("tether", runs[0])], default=str))
"""


def test_trackio_keeps_the_same_names_on_this_machine(tmp_path: Path) -> None:
    """In a process of its own: Trackio settles where it keeps runs when it is imported."""
    pytest.importorskip("trackio", reason="needs trackio, which `make test-matrix` installs")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    places = {"TRACKIO_DIR": str(tmp_path / "kept"), "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path / "run")],
        capture_output=True, text=True, check=True, env={**os.environ, **places}, timeout=300,
    )  # fmt: skip
    found = next(line for line in result.stdout.splitlines() if line.startswith("FOUND "))
    (name,), logs = json.loads(found.removeprefix("FOUND "))
    assert name.startswith("run, troll, seed 0")
    _check_rows([{k: v for k, v in row.items() if k != "timestamp"} for row in logs])


def _check_rows(rows: list[dict[str, Any]]) -> None:
    assert rows == [
        {"step": 1, "train/kl_mean": 0.5, "train/projected": 0.125},
        {"step": 2, "train/kl_mean": 0.25, "train/projected": 0.0},
        {"step": 2, "trl/clip_ratio/region_mean": 0.0},
        {"step": 2, "eval/success": 1.0},
    ]


@pytest.mark.parametrize("names", [("no_such_tracker",), ("tensorboard", "no_such_tracker")])
def test_a_tracker_that_is_not_installed_is_named_with_the_command(
    names: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tether.experiments import trackers

    monkeypatch.setitem(trackers._INSTALLED_BY, "no_such_tracker", "such-a-tracker")
    with pytest.raises(MissingDependencyError, match=r"no_such_tracker.*pip install such-a-tracker"):
        check_trackers(names)
