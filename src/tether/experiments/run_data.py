"""Runs as they were read, from run folders or from the table of a study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from tether.experiments.peak_memory import largest_peak
from tether.experiments.run_config import RunConfig
from tether.experiments.run_kind import Kinds, RunKind, kind_named
from tether.experiments.runs import RunFolder
from tether.experiments.statistics import Curve

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunData:
    """A run's configuration and all its numbers."""

    path: Path
    """The run folder; of a run in a study's table that table, the grid and the run's name."""
    config: RunConfig
    kind: RunKind
    metrics: Sequence[Record]
    """Of training, by step."""
    evals: Sequence[Record]
    """Of evaluations, by step."""
    finished: bool
    """Whether training came to its end."""
    end: Record = field(default_factory=dict)
    """What was noted at the end: when, and after how many seconds."""
    folder: RunFolder | None = None
    """Where sampled responses and pictures are; None of a run in a study's table."""

    @classmethod
    def read(cls, path: str | Path, kinds: Kinds) -> RunData:
        """The run in a folder.

        Raises:
            CheckpointError: not a run folder.
        """
        folder = RunFolder.open(path)
        kind = kind_named(folder.config.kind, kinds)
        return cls(
            path=folder.path,
            config=replace(folder.config, settings=kind.current_settings(folder.config.settings)),
            kind=kind,
            metrics=folder.metrics(),
            evals=folder.evals(),
            finished=folder.finished,
            end=folder.end(),
            folder=folder,
        )

    @property
    def name(self) -> str:
        """That of its folder, also where the folder was given as a dot."""
        return self.path.resolve().name

    @cached_property
    def names(self) -> set[str]:
        """The names of what training measured."""
        return {name for record in self.metrics for name in record}

    @cached_property
    def eval_names(self) -> set[str]:
        """The names of what was evaluated."""
        return {name for record in self.evals for name in record}

    def curve(self, name: str) -> Curve | None:
        """A training metric over the run; None where it was not measured."""
        return self._curve(self.metrics, name)

    def eval_curve(self, name: str) -> Curve | None:
        """An evaluated number over the run; None where it was not measured."""
        return self._curve(self.evals, name)

    def values(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The finite values of a training metric, in order."""
        found = np.array(
            [record[name] for record in self.metrics if is_number(record.get(name))], dtype=float
        )
        return found[np.isfinite(found)]

    @property
    def seconds(self) -> float:
        """Training time."""
        return max((float(record.get("time_s", 0.0)) for record in (*self.metrics, *self.evals)), default=0.0)

    @cached_property
    def peak_memory(self) -> tuple[str, int] | None:
        """The most a step took beyond the start of training: one of `MEMORY_METRICS`, and bytes."""
        return largest_peak(self.metrics)

    @property
    def steps(self) -> int:
        """The last step with a number."""
        return max((int(record["step"]) for record in (*self.metrics, *self.evals)), default=0)

    def _curve(self, records: Sequence[Record], name: str) -> Curve | None:
        points = {self._x(record): float(record[name]) for record in records if is_number(record.get(name))}
        if not points:
            return None
        x = sorted(points)
        return Curve(np.array(x), np.array([points[place] for place in x]))

    def _x(self, record: Record) -> float:
        """Where a record stands: at its step, or at what the kind of run counts instead."""
        step = int(record["step"])
        counted = self.kind.x_metric
        if not counted:
            return step
        if is_number(record.get(counted)):
            return float(record[counted])
        return self._counts.get(step, max((n for at, n in self._counts.items() if at <= step), default=0.0))

    @cached_property
    def _counts(self) -> dict[int, float]:
        counted = self.kind.x_metric
        return {
            int(record["step"]): float(record[counted])
            for record in self.metrics
            if is_number(record.get(counted))
        }


def by_label(runs: Iterable[RunData]) -> dict[str, list[RunData]]:
    """Runs of each label, in the order of first appearance."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(run.config.label, []).append(run)
    return groups


def shared_ending(labels: Sequence[str]) -> str:
    """The parts at the end of labels that all of them bear: in a grid of one point, the point.

    >>> shared_ending(["TROLL, 8 updates, lr 1e-05", "clip, 8 updates, lr 1e-05"])
    ', 8 updates, lr 1e-05'
    >>> shared_ending(["TROLL, 8 updates"])
    ''
    """
    backwards = [label.split(", ")[:0:-1] for label in dict.fromkeys(labels)]  # but for the first part
    if len(backwards) < 2:
        return ""
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*backwards, strict=False))
    return "".join(f", {parts[0]}" for parts in reversed(list(shared)))


def is_number(value: object) -> bool:
    """Whether a metric was measured."""
    return isinstance(value, int | float)
