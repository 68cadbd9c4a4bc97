"""Figures of the studies' kept runs, with intervals over seeds: success by updates a batch, or over training.

    .venv/bin/python benchmarks/study_figure.py benchmarks/results/studies/{b,b-curve,b-tuned} \\
        --learning-rates 3e-4 1e-4 --methods TROLL clip vespo
    .venv/bin/python benchmarks/study_figure.py benchmarks/results/studies/f --over-training

The first writes success-by-updates.png, a panel for each learning rate; the second over-training.png, with
success, entropy and KL. Both with a dark sibling, beside the runs or where --output says.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.experiments.plots import Panel, small_multiples
from tether.experiments.statistics import Curve
from tether.experiments.summary import RunData, load_runs
from tether.llm.config import TrainConfig

_LABELS = {"troll": "TROLL", "none": "no trust region"}
_METHOD_FIELDS = ("kl_bound", "alpha", "kl_stop", "clip_low", "clip_high", "max_grad_norm")


def final_by_updates(runs: Sequence[RunData], learning_rate: float | None) -> dict[str, list[Curve]]:
    """Method -> a curve for each seed: the last sampled success over updates a batch.

    Only seeds that a method has at every staleness are drawn, so that a mean is one of the same seeds.

    Raises:
        ConfigError: two runs of a method, staleness and seed, which differ in something else.
    """
    runs = _with_rate(runs, learning_rate)
    labels = _labels(runs)
    found: dict[str, dict[int, dict[int, float]]] = {}
    for run in runs:
        curve = run.eval_curve("success")
        if curve is not None:
            method, updates = labels[run.folder.path], run.config.settings["updates_per_rollout"]
            values = found.setdefault(method, {}).setdefault(run.config.seed, {})
            if updates in values:
                raise ConfigError(
                    f"There are two runs of {method} with {updates} updates and seed "
                    f"{run.config.seed}, such as {run.folder.path}. Name --learning-rates, or fewer folders."
                )
            values[updates] = float(curve.y[-1])
    curves: dict[str, list[Curve]] = {}
    for method, seeds in found.items():
        places = sorted(set().union(*seeds.values()))
        whole = [values for values in seeds.values() if len(values) == len(places)]
        if whole:
            curves[method] = [Curve(places, [values[place] for place in places]) for values in whole]
    return curves


def over_training(
    runs: Sequence[RunData], name: str, *, evaluated: bool, learning_rate: float | None = None
) -> dict[str, list[Curve]]:
    """Method -> a curve for each seed: a number over batches of responses.

    Raises:
        ConfigError: two runs of a method and seed, which differ in something else.
    """
    runs = _with_rate(runs, learning_rate)
    labels = _labels(runs)
    found: dict[str, dict[int, Curve]] = {}
    for run in runs:
        curve = run.eval_curve(name) if evaluated else run.curve(name)
        if curve is None:
            continue
        method, seed = labels[run.folder.path], run.config.seed
        if seed in found.setdefault(method, {}):
            raise ConfigError(
                f"There are two runs of {method} with seed {seed}, such as {run.folder.path}. "
                "Name --learning-rates, or fewer folders."
            )
        found[method][seed] = Curve(curve.x / run.config.settings["updates_per_rollout"], curve.y)
    return {method: list(seeds.values()) for method, seeds in found.items()}


def _with_rate(runs: Sequence[RunData], learning_rate: float | None) -> Sequence[RunData]:
    if learning_rate is None:
        return runs
    return [run for run in runs if run.config.settings["learning_rate"] == learning_rate]


def _labels(runs: Sequence[RunData]) -> dict[Path, str]:
    """Each run's method, with the settings in which its runs differ, unless they are the default."""
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    by_method: dict[str, list[RunData]] = {}
    for run in runs:
        by_method.setdefault(str(run.config.settings["trust_region"]), []).append(run)
    labels = {}
    for method, group in by_method.items():
        settings = [_settings_of_the_method(run) for run in group]
        names = sorted(set().union(*settings))
        differ = [name for name in names if len({str(own.get(name)) for own in settings}) > 1]
        for run, own in zip(group, settings, strict=True):
            words = ", ".join(
                f"{name}={own[name]}" for name in differ if own.get(name) not in (None, defaults.get(name))
            )
            labels[run.folder.path] = f"{_LABELS.get(method, method)} {words}".strip()
    return labels


def _settings_of_the_method(run: RunData) -> dict[str, object]:
    settings = run.config.settings
    own = {name: value for name, value in settings.items() if name in _METHOD_FIELDS}
    return {**own, **settings.get("loss_options", {})}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of kept runs")
    parser.add_argument("--methods", nargs="+", help="which to draw; all if not given")
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", help="a panel (or row) each; one of all if not given"
    )
    parser.add_argument(
        "--over-training", action="store_true", help="success, entropy and KL over batches instead"
    )
    parser.add_argument("--output", type=Path, help="where the pictures go; beside the runs if not given")
    options = parser.parse_args(arguments)
    runs = load_runs(options.runs)
    draw = _training_panels if options.over_training else _staleness_panels
    panels = [
        panel for rate in options.learning_rates or [None] for panel in draw(runs, rate, options.methods)
    ]
    name = "over-training" if options.over_training else "success-by-updates"
    folder = options.output or options.runs[0]
    for theme, suffix in (("light", ""), ("dark", "-dark")):
        figure = small_multiples(panels, theme, width=5.2 if len(panels) < 3 else 4.2, height=3.7)
        if not options.over_training:
            for axes in figure.axes:
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter("{x:g}")
        path = folder / f"{name}{suffix}.png"
        figure.savefig(path, dpi=160)
        print(path)


def _staleness_panels(
    runs: Sequence[RunData], learning_rate: float | None, methods: Sequence[str] | None
) -> list[Panel]:
    return [
        Panel(
            f"Success after training{_at(learning_rate)}",
            _chosen(final_by_updates(runs, learning_rate), methods),
            x_label="updates on each batch of responses",
            y_label="held-out success",
            percent=True,
            markers=True,
        )
    ]


def _training_panels(
    runs: Sequence[RunData], learning_rate: float | None, methods: Sequence[str] | None
) -> list[Panel]:
    def curves(name: str, *, evaluated: bool = False) -> dict[str, list[Curve]]:
        found = over_training(runs, name, evaluated=evaluated, learning_rate=learning_rate)
        return _chosen(found, methods)

    common: dict[str, Any] = {"x_label": "batches of responses", "markers": True}
    at = _at(learning_rate)
    return [
        Panel(f"Held-out success{at}", curves("success", evaluated=True), percent=True, **common),
        Panel(f"Entropy (nats){at}", curves("entropy"), **common),
        Panel(f"Mean KL of the network (nats){at}", curves("kl_mean"), from_zero=True, **common),
    ]


def _at(learning_rate: float | None) -> str:
    return "" if learning_rate is None else f", learning rate {learning_rate:g}"


def _chosen(curves: dict[str, list[Curve]], methods: Sequence[str] | None) -> dict[str, list[Curve]]:
    missing = sorted(set(methods or ()) - set(curves))
    if missing:
        raise ConfigError(f"No finished runs of {', '.join(missing)}; there are {', '.join(sorted(curves))}.")
    return {method: curves[method] for method in methods or curves}


if __name__ == "__main__":
    main()
