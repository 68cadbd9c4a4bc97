"""Names of lines: at their ends, below the axes where names are long, along bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class End:
    """Where a line ends, and what it looks like."""

    label: str
    colour: str
    dash: object
    """As matplotlib's ``linestyle``."""
    y: float


def legend_below(figure: Figure, ends: Iterable[End]) -> None:
    """Name each line below all axes, one a row; the figure grows by the room this takes."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=end.colour, linestyle=end.dash, label=end.label)  # type: ignore[arg-type]
        for end in ends
    ]
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * len(handles))
    figure.legend(handles=handles, loc="outside lower left", ncols=1, borderpad=0.1, labelspacing=0.25)


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write each label where its line ends, moved apart where they would overlap; the layout is settled."""
    height = axes.get_window_extent().height / axes.figure.dpi * 72  # points
    wanted = [axes.transAxes.inverted().transform(axes.transData.transform((0.0, end.y)))[1] for end in ends]
    spread = spread_apart([float(place) * height for place in wanted], gap=10.5, low=0.0, high=height)
    for end, place in zip(ends, spread, strict=True):
        axes.annotate(
            end.label, (1.0, place / height), xycoords="axes fraction", xytext=(5, 0),
            textcoords="offset points", color=end.colour, fontsize=8.5, fontweight="bold", va="center",
            annotation_clip=False,
        )  # fmt: skip


def name_line(axes: Axes, name: str, height: float, colour: str, ground: str) -> None:
    """Name a horizontal line above it, or below where the title is near; after the axis has its limits."""
    _, place = axes.transAxes.inverted().transform(axes.transData.transform((0.0, height)))
    below = place > 0.9
    axes.annotate(
        name, (0.0, height), xycoords=("axes fraction", "data"), xytext=(4, -4 if below else 4),
        textcoords="offset points", fontsize=8, color=colour, va="top" if below else "bottom", zorder=4,
        # Readable where a curve passes behind it.
        bbox={"facecolor": ground, "edgecolor": "none", "alpha": 0.6, "pad": 0.5},
    )  # fmt: skip


def spread_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move places apart to at least ``gap``, in order, as near as can be and inside [low, high] if they fit.

    >>> spread_apart([5.0, 5.0, 30.0], gap=10.0, low=0.0, high=40.0)
    [0.0, 10.0, 30.0]
    """
    order = sorted(range(len(places)), key=lambda index: (places[index], index))
    # Groups of touching labels, each (its centre, its members); touching groups merge around their mean.
    groups: list[tuple[float, list[int]]] = []
    for index in order:
        groups.append((min(max(places[index], low), high), [index]))
        while True:
            groups[-1] = (_inside(groups[-1], gap, low, high), groups[-1][1])
            if len(groups) < 2 or not _touch(groups[-2], groups[-1], gap):
                break
            (below, members), (above, others) = groups[-2], groups[-1]
            total = len(members) + len(others)
            groups[-2:] = [((below * len(members) + above * len(others)) / total, members + others)]
    result = [0.0] * len(places)
    for centre, members in groups:
        for position, index in enumerate(members):
            result[index] = centre + gap * (position - (len(members) - 1) / 2)
    return result


def _inside(group: tuple[float, list[int]], gap: float, low: float, high: float) -> float:
    half = gap * (len(group[1]) - 1) / 2
    return max(min(group[0], high - half), low + half)


def _touch(below: tuple[float, list[int]], above: tuple[float, list[int]], gap: float) -> bool:
    room = gap * (len(below[1]) + len(above[1])) / 2
    return above[0] - below[0] < room - 1e-9
