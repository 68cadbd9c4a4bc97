"""Which plots a report shows, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tether.experiments.plots import Panel, Theme, curves_figure, png_bytes, small_multiples, stacked_bars
from tether.experiments.run_config import flatten_settings
from tether.experiments.statistics import Curve, Statistic, block_curve
from tether.experiments.summary import (
    MethodSummary,
    RunData,
    by_label,
    headline_metric,
    metric_text,
    own_headlines,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THEMES: tuple[Theme, ...] = ("light", "dark")

MOST_COLOURED = 7
"""So many methods, those that end highest, have a colour and a name; the others are grey."""

_TRAINING, _EVALUATION = "metrics", "evals"


@dataclass(frozen=True)
class Spec:
    """A panel before the runs are known: where its numbers are and how they are drawn."""

    metric: str
    title: str
    y_label: str
    caption: str
    source: str = _TRAINING
    log: bool = False
    percent: bool = False
    bound: str = ""
    """The setting drawn as a dashed line."""
    from_zero: bool = False
    maximum: bool = False
    """Steps are brought together by their largest value instead of their mean."""


@dataclass(frozen=True)
class Picture:
    """A plot of the report in both themes."""

    name: str
    title: str
    caption: str
    png: Mapping[Theme, bytes]


LLM_PANELS = (
    Spec(
        "success", "Success on held-out problems", "sampled responses that are right",
        "Share of sampled responses to problems never trained on that are right. The measure that counts.",
        source=_EVALUATION, percent=True,
    ),
    Spec(
        "success_greedy", "Greedy success on held-out problems", "most likely responses that are right",
        "Share of held-out problems that are right with the most likely token at each place.",
        source=_EVALUATION, percent=True,
    ),
    Spec("reward", "Training reward", "mean reward", "Mean reward of the responses trained on."),
    Spec(
        "entropy", "Entropy", "entropy (nats per token)",
        "How undecided the policy is. A fast fall means it stops trying other answers.",
    ),
    Spec(
        "kl_mean", "Mean KL before projection", "KL (nats)",
        "How far the network has moved from the policy that gathered the data, on an average token.",
        log=True, bound="kl_bound",
    ),
    Spec(
        "kl_max", "Largest KL before projection", "KL (nats)",
        "The distance on the token that moved most. Tokens above the dashed bound are projected back to it.",
        log=True, bound="kl_bound", maximum=True,
    ),
    Spec(
        "projected", "Projected tokens", "share of tokens",
        "Share of tokens on which the trust region acted.", percent=True,
    ),
    Spec("step_seconds", "Time a step", "seconds", "Duration of an optimiser step.", from_zero=True),
)  # fmt: skip

EPISODIC_PANELS = (
    Spec(
        "success", "Success", "episodes that succeed",
        "Share of evaluation episodes that reach the goal.", source=_EVALUATION, percent=True,
    ),
    Spec(
        "success_greedy", "Success of the mean motion", "episodes that succeed",
        "Share of evaluation episodes that reach the goal with the mean motion, without exploration.",
        source=_EVALUATION, percent=True,
    ),
    Spec(
        "return_mean", "Return in evaluation", "return of an episode",
        "Mean sum of rewards over evaluation episodes.", source=_EVALUATION,
    ),
    Spec(
        "return_greedy", "Return of the mean motion", "return of an episode",
        "Mean sum of rewards when the mean motion is executed, without exploration.", source=_EVALUATION,
    ),
    Spec("success", "Success while training", "episodes that succeed",
         "Share of training episodes, exploration included, that reach the goal.", percent=True),
    Spec("return_mean", "Return while training", "return of an episode",
         "Mean sum of rewards over training episodes, exploration included."),
    Spec("entropy", "Entropy", "entropy (nats)", "How widely the policy explores."),
    Spec(
        "kl_mean_part", "KL of the mean before projection", "KL (nats)",
        "How far the mean motion has moved from the policy that gathered the data.",
        log=True, bound="mean_bound",
    ),
    Spec(
        "kl_cov_part", "KL of the covariance before projection", "KL (nats)",
        "How far the shape of the exploration has moved.", log=True, bound="cov_bound",
    ),
    Spec("projected", "Projected policies", "share of contexts",
         "Share of contexts on which the trust region acted.", percent=True),
    Spec("jerk", "Smoothness of the motion", "mean squared jerk",
         "Jerk is the change of acceleration: lower is smoother.", source=_EVALUATION),
    Spec("jerk_greedy", "Smoothness of the mean motion", "root mean square jerk",
         "Jerk is the change of acceleration (position units per second cubed): lower is smoother.",
         source=_EVALUATION),
    Spec("smoothness", "Smoothness of the motion", "smoothness",
         "As the evaluation measures it.", source=_EVALUATION),
)  # fmt: skip

_TIME_PARTS = {"sampling_seconds": "sampling", "critic_seconds": "critic", "policy_seconds": "policy"}
_NOT_METRICS = {"step", "time_s", "env_steps", "problems"}
_PANELS_A_PICTURE = 12


def pictures(runs: Sequence[RunData], background: frozenset[str] = frozenset()) -> list[Picture]:
    """The plots of the kind of run, those that have numbers; labels in the background are grey."""
    made = []
    for spec in _specs(runs):
        panel = _panel(runs, spec, background)
        if panel is not None:
            name = f"{'eval-' if spec.source == _EVALUATION else ''}{spec.metric}"
            made.append(_picture(name, spec.title, spec.caption, _of_panel(panel)))
    if runs[0].config.kind == "episodic":
        made += _time_split(runs)
    return made


def other_pictures(runs: Sequence[RunData], background: frozenset[str] = frozenset()) -> list[Picture]:
    """Small plots of every number that `pictures` does not show."""
    shown = {(spec.source, spec.metric) for spec in _specs(runs)}
    if runs[0].config.kind == "episodic":
        shown |= {(_TRAINING, name) for name in _TIME_PARTS}
    named = {(_TRAINING, name) for run in runs for name in run.names} | {
        (_EVALUATION, name) for run in runs for name in run.eval_names
    }
    left = sorted(pair for pair in named - shown if pair[1] not in _NOT_METRICS)
    panels = []
    for source, name in left:
        title = name if source == _TRAINING else f"{name} (evaluation)"
        panel = _panel(runs, Spec(name, title, "", "", source=source), background)
        if panel is not None:
            panels.append(panel)
    made = []
    for start in range(0, len(panels), _PANELS_A_PICTURE):
        some = panels[start : start + _PANELS_A_PICTURE]
        number = start // _PANELS_A_PICTURE + 1
        figures = {theme: small_multiples(some, theme) for theme in THEMES}
        made.append(_picture(f"all-metrics-{number}", f"All other metrics, part {number}", "", figures))
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
        # A run with the clip carries the bound as an unused setting.
        acts = settings.get("trust_region", "troll") == "troll"
        if acts and isinstance(value, int | float) and math.isfinite(value) and value > 0:
            values.add(float(value))
    return {f"bound {value:g}": value for value in sorted(values)}


def _specs(runs: Sequence[RunData]) -> tuple[Spec, ...]:
    """The panels of the kind of run, before them the runs' own headline if it is another number."""
    specs: tuple[Spec, ...] = EPISODIC_PANELS if runs[0].config.kind == "episodic" else LLM_PANELS
    headline = headline_metric(runs)
    if headline is None or any(spec.metric == headline for spec in specs):
        return specs
    evaluated = any(headline in run.eval_names for run in runs)
    name = metric_text(headline)
    text = "What these runs are compared by, at each evaluation."
    if headline in own_headlines(runs):
        # Judged by another number, such a task may define no success: a curve at 0 would look like a failure.
        specs = tuple(spec for spec in specs if spec.metric not in ("success", "success_greedy"))
    own = Spec(
        headline, name[:1].upper() + name[1:], name, text, source=_EVALUATION if evaluated else _TRAINING
    )
    return (own, *specs)


def _panel(runs: Sequence[RunData], spec: Spec, background: frozenset[str]) -> Panel | None:
    curves: dict[str, list[Curve]] = {}
    for label, group in by_label(runs).items():
        evaluated = spec.source == _EVALUATION
        found = (run.eval_curve(spec.metric) if evaluated else run.curve(spec.metric) for run in group)
        usable = [curve for curve in found if curve is not None and _drawable(curve, spec.log)]
        if usable:
            curves[label] = usable
    if not curves:
        return None
    size = 1 if spec.source == _EVALUATION else _block_size(runs, curves)
    if size > 1:
        reduce = np.max if spec.maximum else np.mean
        curves = {label: [_blocks(curve, size, reduce) for curve in group] for label, group in curves.items()}
    x_label = "environment steps" if runs[0].config.kind == "episodic" else "optimiser step"
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
        markers=spec.source == _EVALUATION and all(len(c.x) <= 40 for g in curves.values() for c in g),
    )


def _block_size(runs: Sequence[RunData], curves: Mapping[str, Sequence[Curve]]) -> int:
    """Steps that become one point: whole rollout batches, since KL and time rise and fall with each."""
    longest = max(len(curve.x) for group in curves.values() for curve in group)
    cycles = [run.config.settings.get("updates_per_rollout") for run in runs]
    cycle = max((value for value in cycles if isinstance(value, int) and value >= 1), default=1)
    if longest < 0.75 * max(run.steps for run in runs):  # measured once a batch, as the reward is
        cycle = 1
    size = cycle * max(1, longest // (100 * cycle))
    return size if 4 * size <= longest else 1


def _blocks(curve: Curve, size: int, reduce: Statistic) -> Curve:
    return block_curve(curve, min(size, len(curve.x)), reduce)


def _drawable(curve: Curve, log: bool) -> bool:
    return any(math.isfinite(value) and (value > 0 or not log) for value in curve.y)


def _of_panel(panel: Panel) -> dict[Theme, Figure]:
    return {theme: curves_figure(panel, theme) for theme in THEMES}


def _time_split(runs: Sequence[RunData]) -> list[Picture]:
    parts: dict[str, dict[str, float]] = {}
    for label, group in by_label(runs).items():
        for name, part in _TIME_PARTS.items():
            values = [float(found.mean()) for found in (run.values(name) for run in group) if found.size]
            if values:
                parts.setdefault(label, {})[part] = sum(values) / len(values)
    if not parts:
        return []
    title = "Time of an iteration"
    figures = {theme: stacked_bars(parts, theme, title=title, x_label="seconds") for theme in THEMES}
    return [
        _picture("time-split", title, "Mean seconds of an iteration by what they were spent on.", figures)
    ]


def _picture(name: str, title: str, caption: str, figures: Mapping[Theme, Figure]) -> Picture:
    return Picture(
        name, title, caption, {theme: png_bytes(figure, theme) for theme, figure in figures.items()}
    )
