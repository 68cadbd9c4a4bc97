"""Runs as one table that anything can read: a row for each run and evaluation, in a CSV file.

The columns: ``study``, ``grid``, ``run``, ``label``, ``seed``; the settings that vary in the study, by their
names; ``step``; what training measured since the evaluation before (``train/...``); what the evaluation
measured (``eval/...``). A cell is empty where nothing was measured. Beside ``study.csv``,
``study.settings.yaml`` holds all settings and the versions of each run.

    pandas.read_csv("benchmarks/results/studies/b.csv").groupby(["label", "step"])["eval/success"].mean()
"""

from __future__ import annotations

import copy
import csv
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tether.errors import CheckpointError, ConfigError
from tether.experiments.files import FolderLock, atomic_write_text, csv_text
from tether.experiments.run_config import RunConfig, flatten_settings
from tether.experiments.run_data import Record, RunData
from tether.experiments.run_kind import Kinds, kind_named
from tether.experiments.run_start import find_runs
from tether.experiments.settings_file import load_yaml, yaml_text

TRAIN, EVAL = "train/", "eval/"
_KEYS = ("study", "grid", "run", "label", "seed")
_NOT_COLUMNS = frozenset({"name", "seed"})  # the label, and a column of its own

_Rows = tuple[list[Record], list[Record]]  # of training, of evaluations
Key = tuple[str, str]
"""A grid and the name of a run in it."""
_Settings = dict[Key, dict[str, Any]]


def table_and_part(path: Path) -> tuple[Path, tuple[str, ...]] | None:
    """The table a path leads into and the part of it that is meant; None if it leads into none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = Path(folder, "b.csv"); table.touch()
    ...     table_and_part(table / "b-curve" / "clip-seed0")[1], table_and_part(Path(folder))
    (('b-curve', 'clip-seed0'), None)
    """
    for candidate in (path, *path.parents):
        if candidate.suffix == ".csv" and candidate.is_file():
            return candidate, path.relative_to(candidate).parts
    return None


def check_table_path(path: Path, option: str) -> None:
    """Refuse what is no table, such as a folder that an earlier version kept runs in.

    Raises:
        ConfigError: with the command that makes a table of such a folder.
    """
    if path.suffix == ".csv" and not path.is_dir():
        return
    folder = f" {path} is a folder of runs: tether collect {path} --output {path}.csv makes a table of it."
    raise ConfigError(
        f"{option}={path} must name a table, such as {path.with_suffix('.csv')}."
        + (folder if path.is_dir() else "")
    )


class StudyTable:
    """Keep finished runs as rows of one table, and read them back as if from their folders.

    Args:
        path: the CSV file; it need not exist.
        kinds: what is known of each kind of run.

    Raises:
        ConfigError: a path that does not end in ``.csv``.
    """

    def __init__(self, path: str | Path, kinds: Kinds | None = None) -> None:
        self.path = Path(path)
        self._kinds = kinds or {}
        check_table_path(self.path, "table")

    @property
    def settings_path(self) -> Path:
        """The file with all settings of each run."""
        return self.path.with_suffix(".settings.yaml")

    def runs(self, grid: str) -> dict[str, RunData]:
        """The runs of a grid by name; none if the table does not exist.

        Raises:
            CheckpointError: a damaged table.
        """
        return {name: run for (_, name), run in self._read(grid).items()}

    def select(self, grid: str | None = None, name: str | None = None) -> list[RunData]:
        """All runs, those of a grid, or one.

        Raises:
            CheckpointError: there are none; a damaged table.
        """
        everything = self._read()
        found = [run for (of, own), run in everything.items() if grid in (None, of) and name in (None, own)]
        if not found:
            grids = ", ".join(dict.fromkeys(of for of, _ in everything))
            wanted = "/".join(filter(None, (grid, name)))
            raise CheckpointError(f"{self.path} holds no run {wanted}; its grids are {grids or 'none'}.")
        return found

    def add(
        self, grid: str, runs: Iterable[RunData], *, every_step: bool = False, unfinished: bool = False
    ) -> None:
        """Keep runs under a grid; a run of the same name is replaced.

        Both files are replaced whole, so a reader or a crash sees the old table or the new one.

        Args:
            grid: what the runs belong to.
            runs: finished runs.
            every_step: a row for each step of training instead of each evaluation.
            unfinished: take runs that were stopped early, too.

        Raises:
            CheckpointError: an unfinished run; two runs of one name; a damaged table.
        """
        new: dict[Key, RunData] = {}
        for run in runs:
            if not run.finished and not unfinished:
                raise CheckpointError(f"The run {run.path} is not finished, so it cannot be kept yet.")
            other = new.setdefault((grid, run.name), run if every_step else at_evaluations(run))
            if other.path != run.path:
                raise CheckpointError(
                    f"{other.path} and {run.path} have one name, which the grid {grid} of a table can hold "
                    "once. Rename one of them, or collect the folders they are in as two grids."
                )
        if not new:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FolderLock(self.path.parent, wait=True):
            everything = dict(sorted((self._read() | new).items()))
            # Settings first: rows without settings count as damage, settings without rows are ignored.
            atomic_write_text(self.settings_path, _settings_text(everything))
            atomic_write_text(self.path, _table_text(self.path.stem, everything))

    def _read(self, grid: str | None = None) -> dict[Key, RunData]:
        if not self.path.exists():
            return {}
        try:
            files = (self.settings_path, self.path)
            settings, rows = _read_files(*files, tuple(map(_version, files)))
            return {key: self._run(key, settings[key], rows[key]) for key in rows if grid in (None, key[0])}
        except (KeyError, ValueError, TypeError, AttributeError, csv.Error) as error:
            raise CheckpointError(
                f"{self.path} and {self.settings_path.name} are not what was written ({error!r}). "
                "Restore both."
            ) from error

    def _run(self, key: Key, settings: dict[str, Any], rows: _Rows) -> RunData:
        record = copy.deepcopy(settings)
        end = record.pop("end")
        kind = kind_named(record["kind"], self._kinds)
        config = RunConfig(**record | {"settings": kind.current_settings(record["settings"])})
        return RunData(self.path.joinpath(*key), config, kind, *rows, bool(end), end)


def load_runs(sources: Iterable[str | Path | RunData], kinds: Kinds | None = None) -> list[RunData]:
    """Read runs: run folders, folders of runs, tables of studies; runs that were read already are passed on.

    Args:
        sources: folders, or ``study.csv``, or a part of it as ``study.csv/grid`` or ``study.csv/grid/run``.
        kinds: what is known of each kind of run.

    Raises:
        CheckpointError: no such run, a run without a number yet, or runs of several kinds.
    """
    runs: dict[Path, RunData] = {}
    for source in sources:
        runs |= {run.path: run for run in _runs_of(source, kinds or {})}
    if not runs:
        raise CheckpointError("No runs given. Name the folders that training commands wrote.")
    for run in runs.values():
        if not run.metrics and not run.evals:
            raise CheckpointError(
                f"The run {run.path} is empty: it has measured nothing yet. "
                "Wait for its first step, or leave it out."
            )
    by_kind = {run.config.kind: run.path for run in reversed(runs.values())}
    if len(by_kind) > 1:
        named = ", ".join(f"{path} is {kind}" for kind, path in reversed(by_kind.items()))
        raise CheckpointError(
            f"Runs of different kinds cannot be compared ({named}). Give one kind at a time."
        )
    return list(runs.values())


def _runs_of(source: str | Path | RunData, kinds: Kinds) -> list[RunData]:
    if isinstance(source, RunData):
        return [source]
    found = table_and_part(Path(source))
    if found is not None:
        grid, _, name = "/".join(found[1]).partition("/")
        return StudyTable(found[0], kinds).select(grid or None, name or None)
    return [RunData.read(path, kinds) for path in find_runs([source])]


def at_evaluations(run: RunData) -> RunData:
    """The run with a record of training for each evaluation: of the steps since the one before."""
    ends = sorted({int(record["step"]) for record in (*run.evals, *run.metrics[-1:])})
    metrics = [
        record | {"step": next(end for end in ends if end >= record["step"])}
        for record in thinned(run.metrics, ends)
    ]
    return replace(run, metrics=metrics)


# What is a state or a running total: its last value, not its mean.
_LAST = frozenset({"step", "time_s", "tokens", "env_steps", "learning_rate"})


def thinned(records: Iterable[Mapping[str, Any]], ends: Iterable[int]) -> list[dict[str, Any]]:
    """One record for the steps up to each of `ends`: means, of ``..._max`` the largest, of totals the last.

    Values that are not finite are left out of a mean unless there are no others. Thinning twice changes
    nothing.

    >>> thinned([{"step": 1, "kl_max": 1.0, "loss": 2.0}, {"step": 2, "kl_max": 3.0, "loss": 4.0}], [0, 2])
    [{'step': 2, 'kl_max': 3.0, 'loss': 3.0}]
    """
    rest = sorted(records, key=lambda record: int(record["step"]))
    result = []
    for end in sorted(set(ends)):
        block = [record for record in rest if record["step"] <= end]
        rest = rest[len(block) :]
        if block:
            result.append(_combined(block))
    return result


def _combined(block: list[Mapping[str, Any]]) -> dict[str, Any]:
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


@functools.lru_cache(maxsize=1)
def _read_files(settings: Path, table: Path, versions: object) -> tuple[_Settings, dict[Key, _Rows]]:
    """What both files hold, kept while they are of these versions: who wants every grid asks for each."""
    return _read_settings(settings), _read_rows(table)


def _version(path: Path) -> object:
    stat = path.stat() if path.exists() else None
    return stat and (stat.st_ino, stat.st_mtime_ns, stat.st_size)


# ---------------------------------------------------------------------- rows


def _read_rows(path: Path) -> dict[Key, _Rows]:
    found: dict[Key, _Rows] = {}
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        header = next(lines, None)
        if header is None:
            raise ValueError("the table is empty")
        place = {name: index for index, name in enumerate(header)}
        groups = [
            [(index, name.removeprefix(prefix)) for name, index in place.items() if name.startswith(prefix)]
            for prefix in (TRAIN, EVAL)
        ]
        for line in lines:
            if len(line) != len(header):
                raise ValueError(f"line {lines.line_num} has {len(line)} cells instead of {len(header)}")
            rows = found.setdefault((line[place["grid"]], line[place["run"]]), ([], []))
            step = int(line[place["step"]])
            for group, records in zip(groups, rows, strict=True):
                numbers = {name: _number(line[index]) for index, name in group if line[index]}
                if numbers:
                    records.append({"step": step, **numbers})
    return found


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _table_text(study: str, runs: Mapping[Key, RunData]) -> str:
    settings = _setting_columns(runs.values())
    lines = {key: _lines(run) for key, run in runs.items()}
    everything = [line for group in lines.values() for line in group]
    numbers = ["step", *(name for prefix in (EVAL, TRAIN) for name in _names(everything, prefix))]
    rows = [[*_KEYS, *settings, *numbers]]
    for (grid, name), run in runs.items():
        chosen = flatten_settings(run.config.settings)
        own = [chosen.get(setting) for setting in settings]
        first = [study, grid, name, run.config.label, run.config.seed, *own]
        for line in lines[grid, name]:
            rows.append([_cell(value) for value in (*first, *(line.get(number) for number in numbers))])
    return csv_text(rows)


def _setting_columns(runs: Collection[RunData]) -> list[str]:
    """The settings that differ, and those that runs of this kind always show."""
    flat = [flatten_settings(run.config.settings) for run in runs]
    shown = {name for run in runs for name in run.kind.columns}
    return [
        name
        for name in _names(flat)
        if name not in _NOT_COLUMNS and (name in shown or len({_cell(one.get(name)) for one in flat}) > 1)
    ]


def _names(records: Iterable[Record], prefix: str = "") -> list[str]:
    """The names in records that begin so, in the order of first appearance."""
    return list(dict.fromkeys(name for record in records for name in record if name.startswith(prefix)))


def _lines(run: RunData) -> list[Record]:
    """A run's numbers by step."""
    lines: dict[int, dict[str, Any]] = {}
    for prefix, records in ((EVAL, run.evals), (TRAIN, run.metrics)):
        for record in records:
            line = lines.setdefault(int(record["step"]), {"step": int(record["step"])})
            # A truth is written as the number it counts as, which is what is read back.
            numbers = {name: int(v) if isinstance(v, bool) else v for name, v in record.items()}
            line |= {prefix + name: value for name, value in numbers.items() if name != "step"}
    return [lines[step] for step in sorted(lines)]


def _cell(value: object) -> str:
    """A value as pandas reads it back; no text where there is none."""
    if value is None or value == {} or value == []:
        return ""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------- settings

_NESTED = ("settings", "versions", "end")


def _settings_text(runs: Mapping[Key, RunData]) -> str:
    """Of each grid what its runs share, and what is each run's own."""
    grids: dict[str, dict[str, dict[str, Any]]] = {}
    for (grid, name), run in runs.items():
        # The peak of memory that a run's end notes is in the table.
        end = {word: run.end[word] for word in ("time", "training_seconds") if word in run.end}
        record: dict[str, Any] = {**run.config.as_dict(), "end": end}
        plain = {name: value for name, value in record.items() if name not in _NESTED}
        inner = {f"{name}.{key}": value for name in _NESTED for key, value in record[name].items()}
        grids.setdefault(grid, {})[name] = plain | inner
    return yaml_text({grid: _shared_and_own(records) for grid, records in grids.items()})


def _shared_and_own(records: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    first, *others = records.values()
    # By their text: 1, 1.0 and True are equal, and different settings.
    shared = {
        name: value
        for name, value in first.items()
        if all(name in other and repr(other[name]) == repr(value) for other in others)
    }
    own = {
        run: {name: value for name, value in record.items() if name not in shared}
        for run, record in records.items()
    }
    return {"shared": shared, "runs": own}


def _read_settings(path: Path) -> _Settings:
    found: _Settings = {}
    for grid, content in load_yaml(path).items():
        for run, own in content["runs"].items():
            record = found[grid, run] = {name: {} for name in _NESTED}
            for name, value in (content["shared"] | own).items():
                outer, _, inner = name.partition(".")
                if inner:
                    record[outer][inner] = value
                else:
                    record[outer] = value
    return found
