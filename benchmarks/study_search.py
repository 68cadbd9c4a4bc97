"""The best setting of each method in the search, written as the studies take it; make study-search first.

    .venv/bin/python benchmarks/study_search.py                        # of all
    .venv/bin/python benchmarks/study_search.py --learning-rate 3e-4   # of those with this learning rate

Settings are judged by the mean over seeds of the last validation success. It refuses to choose while methods
differ in how many settings were tried, or settings in their seeds: that would favour whoever was tried more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.cli import read_grid
from tether.errors import ConfigError
from tether.llm.compare import finished_runs
from tether.llm.compare_config import CompareConfig
from tether.llm.grid import Cell, cells, parse_method

STUDY = Path(__file__).parent / "studies" / "search.yaml"

#: Settings that make another form of a method, searched as a method of its own.
FORMS = {"lag_growth": "growing with the lag", "sampler_weight": "decoupled"}


@dataclass(frozen=True)
class Choice:
    """A method's best setting."""

    spec: str
    """As a study's file takes it."""
    success: float
    """Mean over seeds of the last validation success."""
    tried: int
    """Settings of this method."""


def choose(config: CompareConfig, learning_rate: float | None = None) -> dict[str, Choice]:
    """Method -> its best setting; of those with one learning rate, if that is given.

    Raises:
        ConfigError: runs are missing, methods have unequal numbers of settings, or none has that rate.
    """
    searched = [cell for cell in cells(config) if learning_rate in (None, cell.train.learning_rate)]
    if not searched:
        raise ConfigError(f"The search has no learning rate {learning_rate}; it has {config.learning_rates}.")
    finished = {cell.name: run for cell, run in finished_runs(config).finished}
    scores: dict[str, dict[str, list[float]]] = {}
    for cell in searched:
        if cell.name in finished:
            curve = finished[cell.name].eval_curve("success")
            assert curve is not None  # every run of the search is evaluated
            scores.setdefault(_form(cell), {}).setdefault(_spec(cell), []).append(float(curve.y[-1]))
    missing = [cell.name for cell in searched if cell.name not in finished]
    if missing:
        raise ConfigError(
            f"{len(missing)} runs of the search are not finished, such as {missing[0]}. Go on with make "
            "study-search; a choice among fewer would not be fair."
        )
    counts = {method: len(settings) for method, settings in scores.items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"The search tries unequal numbers of settings: {counts}. Give every method as many."
        )
    return {method: _best(settings) for method, settings in scores.items()}


def _best(settings: dict[str, list[float]]) -> Choice:
    means = {spec: sum(values) / len(values) for spec, values in settings.items()}
    spec = max(means, key=lambda name: means[name])
    return Choice(spec, means[spec], len(settings))


def _form(cell: Cell) -> str:
    method, settings = parse_method(cell.method)
    return ", ".join((method, *(form for setting, form in FORMS.items() if setting in settings)))


def _spec(cell: Cell) -> str:
    separator = "," if ":" in cell.method else ":"
    return cell.method + separator + ",".join(f"{name}={value}" for name, value in cell.point)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--study", type=Path, default=STUDY, help="the search's file")
    parser.add_argument("--learning-rate", type=float, help="choose among the settings with this one")
    options = parser.parse_args(arguments)
    config = read_grid(options.study)
    try:
        choices = choose(config, options.learning_rate)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    for choice in choices.values():
        print(f"{choice.spec}  {choice.success:.1%}  best of {choice.tried}")


if __name__ == "__main__":
    main()
