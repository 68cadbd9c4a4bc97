"""What sets one kind of run apart in reports and displays; the code that trains such runs describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Settings = Mapping[str, Any]
Source = Literal["train", "eval"]
"""What measured a number: training, or an evaluation."""


@dataclass(frozen=True)
class PanelSpec:
    """A plot before the runs are known: where its numbers are and how they are drawn."""

    metric: str
    title: str
    y_label: str
    caption: str
    source: Source = "train"
    log: bool = False
    percent: bool = False
    bound: str = ""
    """The setting drawn as a dashed line."""
    from_zero: bool = False
    maximum: bool = False
    """Steps are combined by their largest value instead of their mean."""


def plain_metric_text(name: str) -> str:
    """A metric in words.

    >>> plain_metric_text("return_mean")
    'return mean'
    """
    return name.replace("_", " ")


@dataclass(frozen=True)
class RunKind:
    """How runs of one kind are judged, plotted and described.

    Every field but the name has a default that suits any run: all its numbers are plotted by their names.

    >>> RunKind("vision").headlines
    ('success', 'reward')
    """

    name: str
    """As it stands in ``config.json``."""
    headlines: tuple[str, ...] = ("success", "reward")
    """What methods are compared by: the first of these that every run has evaluated, else measured in
    training."""
    headline_suffixes: tuple[str, ...] = ("",)
    """Under which names a headline that a run's settings choose is evaluated."""
    metric_text: Callable[[str], str] = plain_metric_text
    """A metric in words."""
    displayed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Metric -> (short name, format): what a progress display shows, in this order."""
    x_metric: str = ""
    """What curves are drawn over; empty for the step."""
    x_label: str = "optimiser step"
    step_word: str = "a step"
    """What one step is called after "seconds"."""
    panels: tuple[PanelSpec, ...] = ()
    """The plots of a report, in order."""
    time_parts: Mapping[str, str] = field(default_factory=dict)
    """Metric in seconds -> its name in the plot of what a step's time is spent on."""
    cycle_setting: str = ""
    """The setting that says how many steps belong together, such as the updates on one batch."""
    token_bound_setting: str = ""
    """The bound on each token's KL, which scales the tint of responses."""
    bound_applies: Callable[[Settings], bool] = lambda settings: True
    """Whether a run's method uses the bounds in its settings."""
    subject_settings: tuple[str, ...] = ()
    """Settings that name what is learned, the first that is set; for a report's title."""
    problems_setting: str = ""
    """How many problems, or episodes, an evaluation is a mean over, where its record does not say."""
    reading_of_several: str = "The method whose curve ends higher{clear} learned more."
    """How to read a report of several methods; ``{clear}`` becomes a word on intervals, if there are any."""
    reading_of_one: str = ""
    """How to read a report of one method."""
    reading_of_kl: str = ""
    """What the KL of a report tells."""
    columns: tuple[str, ...] = ()
    """Settings that always get a column of their own where runs are kept as a table."""
    current_settings: Callable[[Settings], dict[str, Any]] = dict
    """Settings that an earlier version saved, as the same run would be asked for now."""


Kinds = Mapping[str, RunKind]
"""Kinds by name, as functions that read runs take them."""


def kind_named(name: str, kinds: Kinds) -> RunKind:
    """The description of a kind; of one that nobody described, the plain one."""
    return kinds.get(name) or RunKind(name)
