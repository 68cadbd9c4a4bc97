"""Figures of the studies' kept runs, with intervals over seeds: success by the data's age, or over training.

    .venv/bin/python benchmarks/study_figure.py benchmarks/results/studies/b.csv/{b,b-curve,b-tuned} \\
        --learning-rates 3e-4 1e-4 --methods TROLL clip vespo
    .venv/bin/python benchmarks/study_figure.py --by-lag --learning-rates 1e-4 3e-5 \\
        benchmarks/results/studies/j.csv/{j-7-lag,j-8-second-lag}-{64,16,04,01}
    .venv/bin/python benchmarks/study_figure.py benchmarks/results/studies/f.csv --over-training

The first writes success-by-updates.png, a panel for each learning rate, task and model family; the second
success-by-lag.png; the third over-training.png, with success, entropy and KL of each. All with a dark
sibling, beside the runs or where --output says.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.experiments.plots import Panel, small_multiples
from tether.experiments.run_data import RunData
from tether.experiments.statistics import Curve
from tether.experiments.study_table import load_runs, table_and_part
from tether.kinds import KINDS
from tether.llm.config import TrainConfig
from tether.llm.methods import find_method

_LABELS = {"troll": "TROLL", "none": "no trust region"}
_FAMILIES = {"embedded": "first family", "embedded-llama": "second family"}
_BESIDE_THE_METHOD = ("kl_stop", "step_back", "max_grad_norm", "sampler_weight")


def parts(runs: Sequence[RunData], learning_rates: Sequence[float] | None) -> dict[str, list[RunData]]:
    """What is drawn apart: title -> runs of a learning rate, if any are named, a task and a model family.

    Raises:
        ConfigError: a learning rate that no run has.
    """
    known = sorted({run.config.settings["learning_rate"] for run in runs})
    missing = [rate for rate in learning_rates or () if rate not in known]
    if missing:
        raise ConfigError(f"No run has the learning rate {missing[0]:g}; there are {known}.")
    found: dict[str, list[RunData]] = {}
    differing = [of for of in (_task, _family) if len({of(run) for run in runs}) > 1]
    for rate in learning_rates or [None]:
        for run in runs:
            if rate in (None, run.config.settings["learning_rate"]):
                words = [of(run) for of in differing] + ([] if rate is None else [f"learning rate {rate:g}"])
                found.setdefault(", ".join(words), []).append(run)
    return found


def _task(run: RunData) -> str:
    return str(run.config.settings.get("task", "?"))


def _family(run: RunData) -> str:
    model = str(run.config.settings.get("model", "?"))
    return _FAMILIES.get(model, model)


@dataclass(frozen=True)
class Age:
    """How a figure measures how old data are."""

    name: str
    """Of its file."""
    axis: str
    of: Callable[[dict[str, Any]], int]
    """From a run's settings; data are fresh at 1."""


UPDATES = Age(
    "updates", "updates on each batch of responses", lambda settings: settings["updates_per_rollout"]
)
LAG = Age(
    "lag",
    "updates since the responses were sampled",
    lambda settings: settings["lag"] or settings["updates_per_rollout"] - 1,
)


def final_by(age: Age, runs: Sequence[RunData]) -> dict[str, list[Curve]]:
    """Method -> a curve for each seed: the last sampled success over the age of the data.

    Only seeds that a method has at every age are drawn, so that a mean is one of the same seeds.

    Raises:
        ConfigError: two runs of a method, staleness and seed, which differ in something else.
    """
    labels = _labels(runs)
    found: dict[str, dict[int, dict[int, float]]] = {}
    for run in runs:
        curve = run.eval_curve("success")
        if curve is not None:
            method, place = labels[run.path], age.of(run.config.settings)
            values = found.setdefault(method, {}).setdefault(run.config.seed, {})
            if place in values:
                raise ConfigError(
                    f"There are two runs of {method} with {place} {age.axis} and seed "
                    f"{run.config.seed}, such as {run.path}. Name --learning-rates, or fewer folders."
                )
            values[place] = float(curve.y[-1])
    curves: dict[str, list[Curve]] = {}
    for method, seeds in found.items():
        places = sorted(set().union(*seeds.values()))
        whole = [values for values in seeds.values() if len(values) == len(places)]
        if whole:
            curves[method] = [Curve(places, [values[place] for place in places]) for values in whole]
    return curves


def over_training(runs: Sequence[RunData], name: str, *, evaluated: bool) -> dict[str, list[Curve]]:
    """Method -> a curve for each seed: a number over batches of responses.

    Raises:
        ConfigError: two runs of a method and seed, which differ in something else.
    """
    labels = _labels(runs)
    found: dict[str, dict[int, Curve]] = {}
    for run in runs:
        curve = run.eval_curve(name) if evaluated else run.curve(name)
        if curve is None:
            continue
        method, seed = labels[run.path], run.config.seed
        if seed in found.setdefault(method, {}):
            raise ConfigError(
                f"There are two runs of {method} with seed {seed}, such as {run.path}. "
                "Name --learning-rates, or fewer folders."
            )
        found[method][seed] = Curve(curve.x / run.config.settings["updates_per_rollout"], curve.y)
    return {method: list(seeds.values()) for method, seeds in found.items()}


def _labels(runs: Sequence[RunData]) -> dict[Path, str]:
    """Each run's method, with the settings in which its runs differ, unless they are the default."""
    by_method: dict[str, list[RunData]] = {}
    for run in runs:
        by_method.setdefault(str(run.config.settings["method"]["name"]), []).append(run)
    labels = {}
    for method, group in by_method.items():
        settings = [_settings_of_the_method(run) for run in group]
        defaults = {
            one.name: one.default for kind in (TrainConfig, find_method(method)) for one in fields(kind)
        }
        names = sorted(set().union(*settings))
        differ = [name for name in names if len({str(own.get(name)) for own in settings}) > 1]
        for run, own in zip(group, settings, strict=True):
            words = ", ".join(
                f"{name}={own[name]}" for name in differ if own.get(name) not in (None, defaults.get(name))
            )
            labels[run.path] = f"{_LABELS.get(method, method)} {words}".strip()
    return labels


def _settings_of_the_method(run: RunData) -> dict[str, object]:
    settings = run.config.settings
    own = {name: value for name, value in settings.items() if name in _BESIDE_THE_METHOD}
    return own | {name: value for name, value in settings["method"].items() if name != "name"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="tables of kept runs, or grids in them (b.csv/b-curve), or run folders",
    )
    parser.add_argument("--methods", nargs="+", help="which to draw; all if not given")
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", help="a panel (or row) each; one of all if not given"
    )
    parser.add_argument(
        "--over-training", action="store_true", help="success, entropy and KL over batches instead"
    )
    parser.add_argument(
        "--by-lag", action="store_true", help="over the lag of the sampler instead of updates a batch"
    )
    parser.add_argument("--output", type=Path, help="where the pictures go; beside the runs if not given")
    options = parser.parse_args(arguments)
    age = LAG if options.by_lag else UPDATES
    panels_of = _training_panels if options.over_training else partial(_staleness_panels, age)
    groups = parts(load_runs(options.runs, KINDS), options.learning_rates)
    panels = [panel for title, runs in groups.items() for panel in panels_of(title, runs)]
    panels = _chosen(panels, options.methods)
    name = "over-training" if options.over_training else f"success-by-{age.name}"
    table = table_and_part(options.runs[0])
    folder = options.output or (options.runs[0] if table is None else table[0].parent)
    for theme, suffix in (("light", ""), ("dark", "-dark")):
        width, columns = 5.2 if len(panels) in (1, 2, 4) else 4.2, 2 if len(panels) == 4 else 3
        figure = small_multiples(panels, theme, width=width, height=3.7, columns=columns)
        if not options.over_training:
            highest = max(axes.get_ylim()[1] for axes in figure.axes)
            for axes in figure.axes:
                axes.set_ylim(top=highest)  # panels of one number are compared with each other
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter("{x:g}")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}{suffix}.png"
        figure.savefig(path, dpi=160)
        print(path)


def _staleness_panels(age: Age, title: str, runs: Sequence[RunData]) -> list[Panel]:
    return [
        Panel(
            title[:1].upper() + title[1:] or "Success after training",
            final_by(age, runs),
            x_label=age.axis,
            y_label="held-out success after training",
            percent=True,
            from_zero=True,
            markers=True,
        )
    ]


def _training_panels(title: str, runs: Sequence[RunData]) -> list[Panel]:
    def curves(name: str, *, evaluated: bool = False) -> dict[str, list[Curve]]:
        return over_training(runs, name, evaluated=evaluated)

    common: dict[str, Any] = {"x_label": "batches of responses", "markers": True}
    at = _after(title)
    return [
        Panel(f"Held-out success{at}", curves("success", evaluated=True), percent=True, **common),
        Panel(f"Entropy (nats){at}", curves("entropy"), **common),
        Panel(f"Mean KL of the network (nats){at}", curves("kl_mean"), from_zero=True, **common),
    ]


def _after(title: str) -> str:
    return title and f", {title}"


def _chosen(panels: Sequence[Panel], methods: Sequence[str] | None) -> list[Panel]:
    known = sorted(set().union(*(panel.curves for panel in panels)))
    missing = sorted(set(methods or ()) - set(known))
    if missing:
        raise ConfigError(f"No finished runs of {', '.join(missing)}; there are {', '.join(known)}.")
    of_each = [
        {name: panel.curves[name] for name in methods or known if name in panel.curves} for panel in panels
    ]
    return [replace(panel, curves=curves) for panel, curves in zip(panels, of_each, strict=True) if curves]


if __name__ == "__main__":
    main()
