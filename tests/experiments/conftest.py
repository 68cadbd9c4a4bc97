"""Small runs to report on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tether.experiments import RunFolder

MakeRun = Callable[..., Path]


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write(
    path: Path,
    metrics: list[dict[str, Any]],
    evals: list[dict[str, Any]] | None = None,
    *,
    samples: list[dict[str, Any]] | None = None,
    figures: dict[str, bytes] | None = None,
    finished: bool = True,
    kind: str = "llm",
    label: str = "TROLL",
    seed: int = 0,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A run with given numbers: ``metrics`` holds steps 1, 2, ...; two seconds a step."""
    clock = FakeClock()
    settings = {"kl_bound": 0.05} if settings is None else settings
    with RunFolder.create(path, kind=kind, label=label, seed=seed, settings=settings, clock=clock) as run:
        at = {record["step"]: record for record in evals or []}
        for step in range(max([len(metrics), *at]) + 1):
            if 0 < step <= len(metrics):
                clock.now += 2.0
                run.log(step, **metrics[step - 1])
            if step in at:
                run.log_eval(step, **{name: value for name, value in at[step].items() if name != "step"})
        if samples is not None:
            run.save_samples(len(metrics), samples)
        for name, data in (figures or {}).items():
            (path / "figures").mkdir(exist_ok=True)
            (path / "figures" / name).write_bytes(data)
        if finished:
            run.mark_finished()
    return path


@pytest.fixture(scope="session")
def write_run() -> MakeRun:
    """Write a run into a folder."""
    return write


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run into a folder of that name."""

    def make(name: str, *arguments: Any, **options: Any) -> Path:
        return write(tmp_path / "runs" / name, *arguments, **options)

    return make
