"""Pictures of what an episodic policy tries: whole motions, before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tether.episodic.episodes import FloatArray, Starts
from tether.episodic.learner import Learner
from tether.errors import InvalidInputError
from tether.experiments.plots import COLOURS, Theme, house_style, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_JOINTS = 7
"""Degrees of freedom that fit beside each other."""


@dataclass(frozen=True)
class MotionSamples:
    """Motions a policy plans for one start; N are drawn from it."""

    times: FloatArray
    """Seconds, [T]."""

    sampled: FloatArray
    """Desired positions, [N, T, D]."""

    mean: FloatArray
    """Those of the policy's mean, [T, D]."""

    def __post_init__(self) -> None:
        if self.sampled.ndim != 3 or self.mean.shape != self.sampled.shape[1:] or (
            self.times.shape != self.mean.shape[:1]
        ):  # fmt: skip
            raise InvalidInputError(
                "Motions have times [T], sampled [N, T, D] and mean [T, D]; got shapes "
                f"{self.times.shape}, {self.sampled.shape} and {self.mean.shape}."
            )


def sample_motions(learner: Learner, start: Starts, number: int) -> MotionSamples:
    """What a learner would try from one start. Its random numbers are put back.

    Args:
        learner: trained or not.
        start: one start; of more, the first is taken.
        number: N, motions to draw.

    Raises:
        InvalidInputError: no motion to draw.
    """
    if number < 1:
        raise InvalidInputError(f"number is at least 1; got {number}.")
    many = Starts(
        contexts=np.repeat(start.contexts[:1], number, axis=0),
        observations=np.repeat(start.observations[:1], number, axis=0),
        positions=np.repeat(start.positions[:1], number, axis=0),
        velocities=np.repeat(start.velocities[:1], number, axis=0),
        seeds=start.seeds[:1] * number,
    )
    before = learner.generator.get_state()
    sampled = learner.act(many).positions
    learner.generator.set_state(before)
    mean = learner.act(many, explore=False).positions[0]
    times = learner.spec.dt * np.arange(1, learner.spec.horizon + 1, dtype=np.float64)
    return MotionSamples(times, sampled, mean)


def exploration_figure(
    rows: Sequence[tuple[str, MotionSamples]], *, title: str = "", theme: Theme = "light"
) -> Figure:
    """Show what a policy tries: a row of axes a policy, a column a degree of freedom.

    Thin lines are motions drawn from the policy, the thick one is its mean. The axes of a column share
    their scale, so that what training did to the spread can be seen. Of more than `SHOWN_JOINTS` degrees
    of freedom the first are drawn, and the title says so.

    Args:
        rows: (name, its motions) from top to bottom, such as before and after training.
        title: above all axes.
        theme: light or dark.

    Raises:
        InvalidInputError: no row, or rows of robots with different degrees of freedom.
        MissingDependencyError: matplotlib is not installed.

    >>> still = MotionSamples(np.array([0.1, 0.2]), np.zeros((3, 2, 2)), np.zeros((2, 2)))
    >>> figure = exploration_figure([("before", still), ("after", still)])
    >>> len(figure.axes), len(figure.axes[0].lines)
    (4, 4)
    """
    degrees = {motions.mean.shape[1] for _, motions in rows}
    if len(degrees) != 1:
        raise InvalidInputError(
            f"An exploration picture needs rows of one robot; got {len(rows)} rows with degrees of freedom "
            f"{sorted(degrees)}."
        )
    total = degrees.pop()
    columns = min(total, SHOWN_JOINTS)
    if columns < total:
        title = f"{title} (joints 1 to {columns} of {total})".strip()
    with house_style(theme):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        size = (1.2 + 2.4 * columns, 0.7 + 1.9 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(rows), columns, sharex=True, sharey="col", squeeze=False)
        for axes_row, (name, motions) in zip(grid, rows, strict=True):
            for joint, axes in enumerate(axes_row):
                _draw_joint(axes, motions, joint, theme)
            axes_row[0].set_ylabel(f"{name}\ndesired position")
        for joint in range(columns):
            grid[0, joint].set_title(f"joint {joint + 1}", loc="left")
            grid[-1, joint].set_xlabel("seconds")
        if title:
            figure.suptitle(title)
        return figure


def save_exploration(
    rows: Sequence[tuple[str, MotionSamples]], path: str | Path, *, title: str = "", theme: Theme = "light"
) -> Path:
    """Write `exploration_figure` as PNG, whole or not at all."""
    return save_figure(exploration_figure(rows, title=title, theme=theme), path, theme)


def _draw_joint(axes: Axes, motions: MotionSamples, joint: int, theme: Theme) -> None:
    colours = COLOURS[theme].cycle
    for motion in motions.sampled:
        axes.plot(motions.times, motion[:, joint], color=colours[0], linewidth=0.7, alpha=0.45)
    axes.plot(motions.times, motions.mean[:, joint], color=colours[1], linewidth=2.0)
