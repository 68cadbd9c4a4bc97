"""Success against updates per batch, with intervals over seeds, from the kept runs of staleness studies.

    .venv/bin/python benchmarks/study_figure.py benchmarks/results/studies/b --methods TROLL clip dppo

Writes success-by-updates.png and its dark sibling beside the runs, or where --output says.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tether.errors import ConfigError
from tether.experiments.plots import Panel, curves_figure
from tether.experiments.statistics import Curve
from tether.experiments.summary import RunData, load_runs

_LABELS = {"troll": "TROLL", "none": "no trust region"}


def final_by_updates(runs: Sequence[RunData], learning_rate: float | None) -> dict[str, list[Curve]]:
    """Method -> a curve for each seed: the last sampled success over updates a batch.

    Only seeds that a method has at every staleness are drawn, so that a mean is one of the same seeds.

    Raises:
        ConfigError: two runs of a method, staleness and seed, which differ in something else.
    """
    found: dict[str, dict[int, dict[int, float]]] = {}
    for run in runs:
        settings = run.config.settings
        if learning_rate is not None and settings["learning_rate"] != learning_rate:
            continue
        curve = run.eval_curve("success")
        if curve is not None:
            updates = settings["updates_per_rollout"]
            values = found.setdefault(_method(settings), {}).setdefault(run.config.seed, {})
            if updates in values:
                raise ConfigError(
                    f"There are two runs of {_method(settings)} with {updates} updates and seed "
                    f"{run.config.seed}, such as {run.folder.path}. Name a --learning-rate, or fewer folders."
                )
            values[updates] = float(curve.y[-1])
    curves: dict[str, list[Curve]] = {}
    for method, seeds in found.items():
        places = sorted(set().union(*seeds.values()))
        whole = [values for values in seeds.values() if len(values) == len(places)]
        if whole:
            curves[method] = [Curve(places, [values[place] for place in places]) for values in whole]
    return curves


def _method(settings: dict[str, object]) -> str:
    name = str(settings["trust_region"])
    label = _LABELS.get(name, name)
    if name == "troll" and settings["kl_bound"] != 0.05:
        label += f" kl_bound={settings['kl_bound']}"
    return label


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of kept runs")
    parser.add_argument("--methods", nargs="+", help="which to draw; all if not given")
    parser.add_argument("--learning-rate", type=float, help="which of the study's learning rates")
    parser.add_argument("--output", type=Path, help="where the pictures go; beside the runs if not given")
    options = parser.parse_args(arguments)
    curves = final_by_updates(load_runs(options.runs), options.learning_rate)
    if options.methods:
        missing = sorted(set(options.methods) - set(curves))
        if missing:
            raise ConfigError(
                f"No finished runs of {', '.join(missing)}; there are {', '.join(sorted(curves))}."
            )
        curves = {method: curves[method] for method in options.methods}
    panel = Panel(
        "Success after training, by updates a batch",
        curves,
        x_label="updates on each batch of responses",
        y_label="held-out success",
        percent=True,
        markers=True,
    )
    folder = options.output or options.runs[0]
    for theme, suffix in (("light", ""), ("dark", "-dark")):
        figure = curves_figure(panel, theme)
        axes = figure.axes[0]
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        path = folder / f"success-by-updates{suffix}.png"
        figure.savefig(path, dpi=160)
        print(path)


if __name__ == "__main__":
    main()
