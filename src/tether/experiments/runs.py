"""A run is a folder: what was asked, what was measured, what it said, where to go on.

The layout is described in ``benchmarks/results/README.md``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Self

from tether.errors import CheckpointError, InvalidInputError
from tether.experiments import checkpoints as _checkpoints
from tether.experiments.checkpoints import Checkpoint, Damaged, step_name, step_of
from tether.experiments.files import (
    TEMPORARY_PREFIX,
    FolderLock,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    dump_json,
    dump_json_lines,
    iterate_json_lines,
    load_json,
    read_json_lines,
    read_measurements,
    write_all,
)
from tether.experiments.peak_memory import peak_at_end
from tether.experiments.run_config import CONFIG_FILE, RunConfig, installed_versions, now, read_config
from tether.experiments.run_start import (
    FINISHED_FILE,
    as_number,
    check_target,
    read_end,
    resumed_config,
)
from tether.experiments.trackers import Trackers

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"


class RunFolder:
    """Keep what a training run measures so that nothing is lost to a crash and a resumed run is the same run.

    `create` begins or resumes a run and may write; `open` reads, also while another process writes.
    Measurements are lines appended and flushed at once, so ``kill -9`` costs at most the line in the making.
    Use it as a context manager, or call `close`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RunFolder.create(f"{folder}/a", kind="llm", label="troll", seed=0, settings={}) as run:
    ...         run.log(1, kl_mean=0.02, kl_max=float("inf"))
    ...         run.log_eval(1, success=0.5)
    ...     line = RunFolder.open(f"{folder}/a").metrics()[0]
    >>> line["step"], line["kl_max"]
    (1, inf)
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        lock: FolderLock | None,
        *,
        trackers: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._checkpoint_root = path / "checkpoints"
        self.config = config
        self._lock = lock
        self._clock = clock
        self._files: dict[str, FileIO] = {}
        self._last_step: dict[str, int] = {}
        self._clock_start = clock()
        self._trackers = Trackers(trackers, path, config)
        if lock is not None:
            self._drop_partial_lines()
            self._restore_position()

    # ------------------------------------------------------------------ beginning

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        kind: str,
        label: str,
        seed: int,
        settings: Mapping[str, Any],
        resume: bool = False,
        may_change: Collection[str] = (),
        length: str | None = None,
        current_settings: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
        trackers: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> RunFolder:
        """Begin a run in a new or empty folder or, with ``resume``, go on with the run that is there.

        Args:
            path: the run's folder; parents are made.
            kind: what decides how its report looks (`tether.experiments.run_kind.RunKind.name`).
            label: the method's name in legends and tables.
            seed: the run's seed.
            settings: the options of the training command, JSON-able.
            resume: continue a run of the same kind, label, seed and settings; where there is none, begin it.
            may_change: settings (dotted names) that may differ on resume, such as the number of steps; the
                new values replace the old ones in ``config.json``.
            length: which of them says how long the run is; one of another length is not finished yet.
            current_settings: from the settings in the folder to how they are called now
                (`RunKind.current_settings`).
            trackers: what else gets every number: names of `tether.experiments.trackers`.
            clock: seconds from any origin; ``time_s`` of each line is measured with it.

        A resumed trainer calls `latest_checkpoint` and then `truncate_after` before it logs.

        Raises:
            CheckpointError: the folder holds a run and ``resume`` is off; it holds another run or something
                else than a run; another process writes it.
            InvalidInputError: an empty kind or label, settings JSON cannot hold.
        """
        if not kind or not label:
            raise InvalidInputError(
                f"kind={kind!r}, label={label!r}: a run needs a kind, which decides how its report looks, "
                "and a label, the method's name in legends and tables."
            )
        path = Path(path)
        # Through JSON and back, so that tuples and lists, paths and strings compare equal on resume.
        plain: dict[str, Any] = load_json(dump_json(dict(settings)))
        config = RunConfig(kind, label, int(seed), plain, installed_versions(), now())
        holds_run = check_target(path, resume)
        path.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(path)
        try:
            if holds_run:
                config = resumed_config(path, config, may_change, length, current_settings)
            atomic_write_json(path / CONFIG_FILE, config.as_dict())
            return cls(path, config, lock, trackers=trackers, clock=clock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Read a run, finished or in progress; writing through the result is refused.

        Raises:
            CheckpointError: no such folder, or not a run.
        """
        path = Path(path)
        return cls(path, read_config(path), lock=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and let other processes write; doing it twice is harmless."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        try:
            self._trackers.close()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    # ------------------------------------------------------------------ writing

    def log(self, step: int, **metrics: float) -> None:
        """Append the numbers of one optimiser iteration to ``metrics.jsonl`` and flush them.

        Numbers, booleans and zero-dimensional tensors are taken, NaN and infinity included. ``time_s``, the
        training time since the run began (over resumes), is added. The file is seen by other processes at
        once.

        Raises:
            InvalidInputError: a step not after the last one, a value that is not a number.
            CheckpointError: the run was opened for reading, or is finished.
        """
        self._append(METRICS_FILE, step, metrics)

    def track(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        """Send numbers to the trackers alone, as ``group/name``."""
        self._trackers.log(group, step, numbers)

    def log_eval(self, step: int, **metrics: float) -> None:
        """Append the numbers of one evaluation to ``eval.jsonl``, as `log` does.

        With ``success`` give ``problems``, the number of held-out problems it is a mean over, and reports can
        show how certain a single run is.
        """
        self._append(EVAL_FILE, step, metrics)

    def save_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write the sampled responses of a step to ``samples/step-000050.jsonl``, whole or not at all.

        A row is ``{"prompt": str, "reference": str, "reward": float, "correct": bool, "tokens": [{"text":
        str, "kl": float, "projected": bool, "log_prob": float, "old_log_prob": float}, ...]}``; more keys
        are kept.
        """
        self._check_writable()
        target = self.path / "samples" / f"{step_name(step)}.jsonl"
        return atomic_write_text(target, dump_json_lines(dict(row) for row in rows))

    def mark_finished(self) -> None:
        """Note the end of training, its time and its peak of memory; call it last, no numbers can follow."""
        self._check_writable()
        self._sync()
        end = {"time": now(), "training_seconds": self.elapsed, **peak_at_end(self.metrics())}
        atomic_write_json(self.path / FINISHED_FILE, end)

    # ------------------------------------------------------------------ reading

    @property
    def finished(self) -> bool:
        """Whether training came to its end (`mark_finished`)."""
        return (self.path / FINISHED_FILE).exists()

    def end(self) -> dict[str, Any]:
        """What `mark_finished` noted: the time, seconds of training, the peak of memory; nothing before."""
        return read_end(self.path) if self.finished else {}

    @property
    def elapsed(self) -> float:
        """Training time in seconds since the run began, without the pauses between resumes."""
        return self._clock() - self._clock_start

    def add_seconds(self, seconds: float) -> None:
        """Count as this run's what another took to measure for both."""
        self._clock_start -= seconds

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``; a line still being written is left out."""
        return read_measurements(self.path / METRICS_FILE)

    def evals(self) -> list[dict[str, Any]]:
        """The lines of ``eval.jsonl``."""
        return read_measurements(self.path / EVAL_FILE)

    def sample_steps(self) -> list[int]:
        """The steps with sampled responses, in order."""
        steps = (step_of(path) for path in (self.path / "samples").glob("step-*.jsonl"))
        return sorted(step for step in steps if step is not None)

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """The sampled responses of a step, by default of the last that has any; none gives an empty list."""
        if step is None:
            steps = self.sample_steps()
            if not steps:
                return []
            step = steps[-1]
        return read_json_lines(self.path / "samples" / f"{step_name(step)}.jsonl")

    def figures(self) -> list[Path]:
        """Pictures and videos the run made, by name."""
        hidden = (".", TEMPORARY_PREFIX)
        return sorted(path for path in (self.path / "figures").glob("*") if not path.name.startswith(hidden))

    # ------------------------------------------------------------------ checkpoints

    def checkpoint_folder(self, step: int) -> Path:
        """An empty folder to save the state of ``step`` in; it counts after `mark_complete`."""
        self._check_writable()
        return _checkpoints.start_checkpoint(self._checkpoint_root, step)

    def mark_complete(self, step: int, keep: int | None = None) -> Checkpoint:
        """Force the checkpoint and the numbers logged so far to the disk, then declare it complete.

        Log and evaluate a step before its checkpoint: a resumed run goes on with the step after.
        ``keep`` prunes to that many newest checkpoints afterwards.
        """
        self._check_writable()
        self._sync()
        checkpoint = _checkpoints.complete_checkpoint(self._checkpoint_root, step)
        if keep is not None:
            self.prune_checkpoints(keep)
        return checkpoint

    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first."""
        return _checkpoints.complete_checkpoints(self._checkpoint_root)

    def latest_checkpoint(self, damaged: Damaged = "refuse") -> Checkpoint | None:
        """The newest complete checkpoint; None when there is none. Cut-off attempts are passed over.

        Its files are compared with what was written; a damaged one is refused, or skipped with a warning.
        """
        return _checkpoints.newest_intact_checkpoint(self._checkpoint_root, damaged)

    def prune_checkpoints(self, keep: int) -> list[int]:
        """Delete all but the ``keep`` newest complete checkpoints."""
        self._check_writable()
        return _checkpoints.prune_checkpoints(self._checkpoint_root, keep)

    def truncate_after(self, step: int) -> None:
        """Go back to how the run stood after ``step``: drop later lines, samples and checkpoints.

        Call it on resume with the checkpoint's step (-1 to begin again): the files of the resumed run then
        equal those of an uninterrupted one, times aside. Each file is replaced whole, so a crash in between
        only means doing it again.
        """
        self._check_writable()
        for file in self._files.values():
            file.close()
        self._files.clear()
        for folder in self._checkpoint_root.glob("step-*"):
            at = step_of(folder)
            if at is not None and (at > step or not (folder / _checkpoints.COMPLETE).exists()):
                _checkpoints.remove_checkpoint(folder)
        for sample in (self.path / "samples").glob("step-*.jsonl"):
            at = step_of(sample)
            if at is not None and at > step:
                sample.unlink()
        for name in (METRICS_FILE, EVAL_FILE):
            self._rewrite(name, lambda record: record.get("step", 0) <= step)
        (self.path / FINISHED_FILE).unlink(missing_ok=True)
        self._restore_position()

    # ------------------------------------------------------------------ inside

    def _append(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        self._check_writable()
        if self.finished:
            raise CheckpointError(
                f"{self.path} is finished; its numbers are closed. "
                "Resume it with more steps (may_change), or choose another folder."
            )
        last = self._last_step.get(name, -1)
        if step <= last:
            raise InvalidInputError(
                f"{name}: step {step} is not after step {last}, the last one written. "
                "After a resume, call truncate_after(checkpoint.step) first."
            )
        taken = {"step", "time_s"} & metrics.keys()
        if taken:
            raise InvalidInputError(
                f"The name {taken.pop()!r} is RunFolder's own; name the metric otherwise."
            )
        numbers = {key: as_number(key, value) for key, value in metrics.items()}
        record = {"step": int(step), "time_s": round(self.elapsed, 4), **numbers}
        write_all(self._file(name), (dump_json(record) + "\n").encode("utf-8"))
        self._last_step[name] = int(step)
        self._trackers.log("eval" if name == EVAL_FILE else "train", step, numbers)

    def _file(self, name: str) -> FileIO:
        if name not in self._files:
            # Unbuffered, so that what a full disk refused is not tried again when the file is closed.
            self._files[name] = (self.path / name).open("ab", buffering=0)
        return self._files[name]

    def _sync(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())
        self._trackers.flush()

    def _check_writable(self) -> None:
        if self._lock is None:
            raise CheckpointError(
                f"{self.path} is not open for writing. Go on with it by RunFolder.create(..., resume=True)."
            )

    def _drop_partial_lines(self) -> None:
        for name in (METRICS_FILE, EVAL_FILE):
            file = self.path / name
            if file.exists() and not file.read_bytes().endswith(b"\n"):
                self._rewrite(name, lambda record: True)

    def _rewrite(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        file = self.path / name
        if not file.exists():
            return
        kept = b"".join(line for line, record in iterate_json_lines(file) if wanted(record))
        atomic_write_bytes(file, kept)

    def _restore_position(self) -> None:
        """Take the last steps and the training time from the files."""
        seconds = 0.0
        self._last_step.clear()
        for name in (METRICS_FILE, EVAL_FILE):
            records = read_measurements(self.path / name)
            if records:
                self._last_step[name] = int(records[-1]["step"])
                seconds = max(seconds, float(records[-1].get("time_s", 0.0)))
        self._clock_start = self._clock() - seconds
