"""How far the network is from its sampler, against how old the data are."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tether.experiments.plots import Panel
from tether.experiments.run_data import RunData, by_label
from tether.experiments.statistics import Curve

_NAME = re.compile(r"lag_(\d+)_(\w+)")
#: What is measured by lag: title, axis, whether it is a share.
_SHOWN = {
    "kl": ("KL to the sampler by lag", "KL (nats)", False),
    "projected": ("Projected tokens by lag", "share of tokens", True),
    "uncertain": ("Tokens neither proven inside nor outside, by lag", "share of tokens", True),
}


def is_by_lag(name: str) -> bool:
    """Whether a metric is one of a single lag's, which these panels show.

    >>> is_by_lag("lag_16_kl"), is_by_lag("lag")
    (True, False)
    """
    found = _NAME.fullmatch(name)
    return found is not None and found[2] in _SHOWN


def lag_panels(runs: Sequence[RunData], background: frozenset[str] = frozenset()) -> list[Panel]:
    """A panel for each measure, its mean over a run's steps at each lag; none for data of one age."""
    panels = []
    for measure, (title, y_label, percent) in _SHOWN.items():
        curves = {
            label: found
            for label, group in by_label(runs).items()
            if (found := [curve for run in group if len((curve := _curve(run, measure)).x) > 1])
        }
        if curves:
            panel = Panel(
                title, curves, background,
                x_label="optimiser steps since the sampler's weights (at least)",
                y_label=y_label, percent=percent, markers=True,
            )  # fmt: skip
            panels.append(panel)
    return panels


def _curve(run: RunData, measure: str) -> Curve:
    lags = sorted(
        int(found[1]) for name in run.names if (found := _NAME.fullmatch(name)) and found[2] == measure
    )
    values = {lag: run.values(f"lag_{lag}_{measure}") for lag in lags}
    means = {lag: float(found.mean()) for lag, found in values.items() if found.size}
    return Curve(np.array(list(means), dtype=np.float64), np.array(list(means.values())))
