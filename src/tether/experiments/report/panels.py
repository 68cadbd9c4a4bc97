"""Which plots a report shows, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tether.experiments.files import csv_text
from tether.experiments.plots import (
    Panel,
    Theme,
    curves_figure,
    keep_layout,
    png_bytes,
    small_multiples,
    stacked_bars,
    svg_text,
)
from tether.experiments.report.lag_panels import is_by_lag, lag_panels
from tether.experiments.run_config import flatten_settings
from tether.experiments.run_data import RunData, by_label
from tether.experiments.run_kind import PanelSpec, Source
from tether.experiments.statistics import Curve, block_curve
from tether.experiments.summary import MethodSummary, headline_metric, own_headlines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THEMES: tuple[Theme, ...] = ("light", "dark")

MOST_COLOURED = 7
"""So many methods, those that end highest, have a colour and a name; the others are grey."""


@dataclass(frozen=True)
class Picture:
    """A plot of the report in both themes."""

    name: str
    title: str
    caption: str
    png: Mapping[Theme, bytes]
    svg: str
    """The light one."""
    csv: str
    """What is drawn: a line a point."""


_NOT_METRICS = {"step", "time_s", "problems"}
_PANELS_A_PICTURE = 12
_OF_LAGS = "Means over training, by how many optimiser steps old the policy was that sampled a token."


def pictures(runs: Sequence[RunData], background: frozenset[str] = frozenset()) -> list[Picture]:
    """The plots of the kind of run, those that have numbers; labels in the background are grey."""
    made = []
    for spec in _specs(runs):
        panel = _panel(runs, spec, background)
        if panel is not None:
            name = f"{'eval-' if spec.source == 'eval' else ''}{spec.metric}"
            made.append(_picture(name, spec.title, spec.caption, _of_panel(panel), points_csv([panel])))
    for panel in lag_panels(runs, background):
        name = panel.title.lower().replace(" ", "-").replace(",", "")
        made.append(_picture(name, panel.title, _OF_LAGS, _of_panel(panel), points_csv([panel])))
    return made + _time_split(runs)


def _of_panel(panel: Panel) -> dict[Theme, Figure]:
    return {theme: curves_figure(panel, theme) for theme in THEMES}


def other_pictures(runs: Sequence[RunData], background: frozenset[str] = frozenset()) -> list[Picture]:
    """Small plots of every number that `pictures` does not show."""
    shown = {(spec.source, spec.metric) for spec in _specs(runs)}
    shown |= {("train", name) for name in runs[0].kind.time_parts}
    named: set[tuple[Source, str]] = {("train", name) for run in runs for name in run.names}
    named |= {("eval", name) for run in runs for name in run.eval_names}
    unwanted = _NOT_METRICS | {runs[0].kind.x_metric}
    left = sorted(pair for pair in named - shown if pair[1] not in unwanted and not is_by_lag(pair[1]))
    panels = []
    for source, name in left:
        title = name if source == "train" else f"{name} (evaluation)"
        panel = _panel(runs, PanelSpec(name, title, "", "", source=source), background)
        if panel is not None:
            panels.append(panel)
    made = []
    for start in range(0, len(panels), _PANELS_A_PICTURE):
        some = panels[start : start + _PANELS_A_PICTURE]
        number = start // _PANELS_A_PICTURE + 1
        figures = {theme: small_multiples(some, theme) for theme in THEMES}
        title = f"All other metrics, part {number}"
        made.append(_picture(f"all-metrics-{number}", title, "", figures, points_csv(some)))
    return made


def in_background(summaries: Sequence[MethodSummary]) -> frozenset[str]:
    """Of methods, the best first, the labels that are too many to be told apart by colour."""
    return frozenset(summary.label for summary in summaries[MOST_COLOURED:])


def bounds(runs: Sequence[RunData], setting: str) -> dict[str, float]:
    """The finite bounds to draw, by what to call them; runs without a trust region's bound give none."""
    values = set()
    for run in runs:
        settings = flatten_settings(run.config.settings)  # "mean_bound" or "trust_region.mean_bound"
        value = next((settings[name] for name in settings if name.split(".")[-1] == setting), None)
        if (
            run.kind.bound_applies(settings)
            and isinstance(value, int | float)
            and math.isfinite(value)
            and value > 0
        ):
            values.add(float(value))
    return {f"bound {value:g}": value for value in sorted(values)}


def _specs(runs: Sequence[RunData]) -> tuple[PanelSpec, ...]:
    """The panels of the kind of run, before them the runs' own headline if it is another number."""
    specs = runs[0].kind.panels
    headline = headline_metric(runs)
    if headline is None or any(spec.metric == headline for spec in specs):
        return specs
    evaluated = all(headline in run.eval_names for run in runs)
    name = runs[0].kind.metric_text(headline)
    text = "What these runs are compared by, at each evaluation."
    if headline in own_headlines(runs):
        # Judged by another number, such a task may define no success: a curve at 0 would look like a failure.
        specs = tuple(spec for spec in specs if spec.metric not in ("success", "success_greedy"))
    own = PanelSpec(
        headline, name[:1].upper() + name[1:], name, text, source="eval" if evaluated else "train"
    )
    return (own, *specs)


def _panel(runs: Sequence[RunData], spec: PanelSpec, background: frozenset[str]) -> Panel | None:
    curves: dict[str, list[Curve]] = {}
    for label, group in by_label(runs).items():
        evaluated = spec.source == "eval"
        found = (run.eval_curve(spec.metric) if evaluated else run.curve(spec.metric) for run in group)
        usable = [
            curve
            for curve in found
            if curve is not None and np.any(np.isfinite(curve.y) & ((curve.y > 0) | (not spec.log)))
        ]
        if usable:
            curves[label] = usable
    if not curves:
        return None
    size = 1 if spec.source == "eval" else _block_size(runs, curves)
    if size > 1:
        reduce = np.max if spec.maximum else np.mean
        curves = {
            label: [block_curve(curve, min(size, len(curve.x)), reduce) for curve in group]
            for label, group in curves.items()
        }
    x_label = runs[0].kind.x_label
    lines = bounds(runs, spec.bound) if spec.bound else {}
    return Panel(
        title=spec.title,
        curves=curves,
        background=background,
        x_label=f"{x_label} ({'maxima' if spec.maximum else 'means'} of {size})" if size > 1 else x_label,
        y_label=spec.y_label,
        log=spec.log,
        percent=spec.percent,
        from_zero=spec.from_zero,
        lines=lines if len(lines) <= 4 else {},
        markers=spec.source == "eval" and all(len(c.x) <= 40 for g in curves.values() for c in g),
    )


def _block_size(runs: Sequence[RunData], curves: Mapping[str, Sequence[Curve]]) -> int:
    """Steps that become one point: whole rollout batches, since KL and time rise and fall with each."""
    longest = max(len(curve.x) for group in curves.values() for curve in group)
    cycles = [run.config.settings.get(run.kind.cycle_setting) for run in runs]
    cycle = max((value for value in cycles if isinstance(value, int) and value >= 1), default=1)
    if longest < 0.75 * max(run.steps for run in runs):  # measured once a batch, as the reward is
        cycle = 1
    size = cycle * max(1, longest // (100 * cycle))
    return size if 4 * size <= longest else 1


def _time_split(runs: Sequence[RunData]) -> list[Picture]:
    parts: dict[str, dict[str, float]] = {}
    for label, group in by_label(runs).items():
        for name, part in runs[0].kind.time_parts.items():
            values = [float(found.mean()) for found in (run.values(name) for run in group) if found.size]
            if values:
                parts.setdefault(label, {})[part] = sum(values) / len(values)
    if not parts:
        return []
    title = "Time of an iteration"
    figures = {theme: stacked_bars(parts, theme, title=title, x_label="seconds") for theme in THEMES}
    rows = [(label, part, value) for label, split in parts.items() for part, value in split.items()]
    caption = "Mean seconds of an iteration by what they were spent on."
    return [_picture("time-split", title, caption, figures, csv_text([("method", "part", "seconds"), *rows]))]


def points_csv(panels: Sequence[Panel]) -> str:
    """The points of panels as they are drawn, a line each.

    >>> print(points_csv([Panel("Success", {"troll": [Curve([0, 10], [0.3, 0.6])]})]))
    panel,method,run,x,y
    Success,troll,1,0,0.3
    Success,troll,1,10,0.6
    <BLANKLINE>
    """
    rows = [
        (panel.title, label, number, f"{x:.7g}", f"{y:.7g}")
        for panel in panels
        for label, curves in panel.curves.items()
        for number, curve in enumerate(curves, 1)
        for x, y in zip(curve.x, curve.y, strict=True)
    ]
    return csv_text([("panel", "method", "run", "x", "y"), *rows])


def _picture(name: str, title: str, caption: str, figures: Mapping[Theme, Figure], data: str) -> Picture:
    light = figures["light"]
    png: dict[Theme, bytes] = {"light": png_bytes(light)}
    others = {theme: figure for theme, figure in figures.items() if theme != "light"}
    keep_layout(light, others.values())  # finding it takes as long as drawing
    png |= {theme: png_bytes(figure, theme) for theme, figure in others.items()}
    return Picture(name, title, caption, png, svg_text(light), data)
