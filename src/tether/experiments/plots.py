"""Figures of one style: curves with intervals over seeds, in light and dark."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tether.errors import InvalidInputError, MissingDependencyError
from tether.experiments.files import atomic_write_bytes
from tether.experiments.statistics import Curve, CurveBand, mean_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]


@dataclass(frozen=True)
class Colours:
    """What a theme is painted with."""

    background: str
    text: str
    muted: str
    grid: str
    background_line: str
    """Lines in the background."""
    cycle: tuple[str, ...]
    """Okabe and Ito's colours, lightened for the dark theme: told apart without green or red cones, too."""


COLOURS: dict[Theme, Colours] = {
    "light": Colours(
        "#ffffff", "#1b2430", "#5d6876", "#e4e8ee", "#bdc4cc",
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4b2e83", "#666666"),
    ),
    "dark": Colours(
        "#161b22", "#e6edf3", "#9aa7b4", "#2b333d", "#4a545f",
        ("#3fa7ee", "#f0762b", "#17b584", "#ee9fd0", "#f7dc6f", "#a9e0ff", "#8a5cff", "#858585"),
    ),
}  # fmt: skip

_FIXED_COLOURS = {
    "troll": 0, "tce": 0, "clip": 1, "ppo_clip": 1, "bbrl": 1, "none": 7, "unclipped": 7,
    "no trust region": 7,
}  # fmt: skip

LONGEST_BESIDE_ANOTHER = 18
"""Labels longer than this stand one below the other."""
_TITLE_LINE = 40  # characters: a longer one would run into the next panel's

_DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
)


@dataclass(frozen=True)
class Panel:
    """One pair of axes: what is drawn and how it is named."""

    title: str
    curves: Mapping[str, Sequence[Curve]]
    """Label -> the curves of its runs (seeds)."""
    background: frozenset[str] = frozenset()
    """Labels drawn thin and grey, without a name: the many that a few are seen against."""
    x_label: str = "optimiser step"
    y_label: str = ""
    """With its unit: ``"KL (nats)"``."""
    log: bool = False
    percent: bool = False
    """The values are fractions and read as per cent."""
    whole: bool = False
    """The axis goes from 0 to 1, so that panels beside each other compare."""
    lines: Mapping[str, float] = field(default_factory=dict)
    """Dashed horizontal lines by their names, such as the KL bound."""
    from_zero: bool = False
    """The axis begins at 0, so that lengths compare as they look."""
    markers: bool = False
    """Dots at the points: for evaluations, which are few."""


def palette(labels: Sequence[str], theme: Theme = "light") -> dict[str, str]:
    """A colour a label, the same in every figure of the same labels; known methods always have theirs.

    >>> palette(["troll", "clip"]) == palette(["clip", "troll"])
    True
    """
    cycle = COLOURS[theme].cycle
    return {label: cycle[place % len(cycle)] for label, place in _colour_indices(labels).items()}


def curves_figure(panel: Panel, theme: Theme = "light", *, width: float = 5.2, height: float = 3.2) -> Figure:
    """One panel as a figure, with a thin line a run and the mean with its 95 % interval over runs.

    >>> figure = curves_figure(Panel("Success", {"troll": [Curve([0, 10], [0.3, 0.6])]}, percent=True))
    >>> figure.axes[0].get_title(loc="left")
    'Success'
    """
    return small_multiples([panel], theme, columns=1, width=width, height=height)


def small_multiples(
    panels: Sequence[Panel],
    theme: Theme = "light",
    *,
    columns: int = 3,
    width: float = 4.2,
    height: float = 2.7,
) -> Figure:
    """Several panels in a grid; ``width`` and ``height`` are those of one panel, in inches.

    Labels keep their colour over all panels and are named once, below them.
    """
    if not panels:
        raise InvalidInputError("No panels to draw.")
    with house_style(theme):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns = min(columns, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        FigureCanvasAgg(figure)
        labels = _named(panels)
        for index, panel in enumerate(panels):
            _draw(figure.add_subplot(rows, columns, index + 1), panel, labels, theme)
        named = {
            name: line
            for axes in figure.axes
            for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        lines = -(-len(named) // (1 if max(map(len, named)) > LONGEST_BESIDE_ANOTHER else 3 * columns))
        figure.set_size_inches(width * columns, height * rows + 0.19 * lines)
        figure.legend(
            named.values(), named, loc="outside lower left", ncols=-(-len(named) // lines), borderpad=0.1,
            labelspacing=0.25,
        )  # fmt: skip
        return figure


def _named(panels: Sequence[Panel]) -> list[str]:
    """The labels that have a colour of their own."""
    return list(
        dict.fromkeys(label for panel in panels for label in panel.curves if label not in panel.background)
    )


def _draw(axes: Axes, panel: Panel, labels: Sequence[str], theme: Theme) -> None:
    colours, places = palette(labels, theme), _colour_indices(labels)
    axes.set_title(textwrap.fill(panel.title, _TITLE_LINE, break_long_words=False), loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.log:
        axes.set_yscale("log", nonpositive="mask")
    for label, curves in panel.curves.items():
        drawable = [shown for shown in (_drawable(curve, panel.log) for curve in curves) if shown is not None]
        if drawable and label in panel.background:
            _draw_background(axes, drawable, theme)
        elif drawable:
            dash = _DASHES[places[label] // len(COLOURS[theme].cycle) % len(_DASHES)]
            _draw_label(axes, drawable, label, colours[label], dash, panel.markers)
    if not axes.get_lines():
        raise InvalidInputError(f"Panel {panel.title!r} has no finite value to draw.")
    for height in panel.lines.values():
        axes.axhline(
            height, color=COLOURS[theme].text, linestyle=(0, (4, 3)), linewidth=1.1, alpha=0.8, zorder=2.5
        )
    _scale(axes, panel)
    for name, height in panel.lines.items():
        _name_line(axes, name, height, COLOURS[theme])


def _name_line(axes: Axes, name: str, height: float, colours: Colours) -> None:
    """Name a horizontal line above it, or below where the title is near; after the axis has its limits."""
    _, place = axes.transAxes.inverted().transform(axes.transData.transform((0.0, height)))
    below = place > 0.9
    axes.annotate(
        name, (0.0, height), xycoords=("axes fraction", "data"), xytext=(4, -4 if below else 4),
        textcoords="offset points", fontsize=8, color=colours.text, va="top" if below else "bottom", zorder=4,
        # Readable where a curve passes behind it.
        bbox={"facecolor": colours.background, "edgecolor": "none", "alpha": 0.6, "pad": 0.5},
    )  # fmt: skip


def stacked_bars(
    parts: Mapping[str, Mapping[str, float]], theme: Theme = "light", *, title: str, x_label: str
) -> Figure:
    """What a total is made of: one bar a label, split into named parts, such as the seconds of an iteration.

    >>> bars = stacked_bars({"tce": {"sampling": 2.0, "policy": 1.0}}, title="Time", x_label="seconds")
    >>> [text.get_text() for text in bars.axes[0].get_yticklabels()]
    ['tce']
    """
    if not parts:
        raise InvalidInputError("No bars to draw.")
    with house_style(theme):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2, 1.4 + 0.4 * len(parts)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        names = list(dict.fromkeys(name for part in parts.values() for name in part))
        left = np.zeros(len(parts))
        for name, colour in zip(names, _part_colours(len(names), theme), strict=True):
            widths = np.array([part.get(name, 0.0) for part in parts.values()])
            axes.barh(list(parts), widths, left=left, color=colour, label=name, height=0.6)
            left += widths
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_title(title, loc="left")
        axes.set_xlabel(x_label)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(names), borderpad=0.1)
        return figure


def save_figure(figure: Figure, path: str | Path, theme: Theme = "light") -> Path:
    """Write a figure as PNG, whole or not at all."""
    return atomic_write_bytes(path, png_bytes(figure, theme))


def png_bytes(figure: Figure, theme: Theme = "light") -> bytes:
    """A figure as PNG, sharp at README width on dense screens; equal figures give equal bytes."""
    from PIL import Image

    with house_style(theme):
        figure.set_dpi(180)
        figure.canvas.draw()
    pixels = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    # 256 colours are enough for lines on a plain ground, at a third of the size.
    pixels.quantize(256, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def keep_layout(drawn: Figure, others: Iterable[Figure] = ()) -> None:
    """Leave the axes of a figure that was drawn in their places, and put those of its like there."""
    for figure in others:
        figure.set_layout_engine("none")
        for axes, placed in zip(figure.axes, drawn.axes, strict=True):
            axes.set_position(placed.get_position())
    drawn.set_layout_engine("none")


def svg_text(figure: Figure, theme: Theme = "light") -> str:
    """A figure as SVG, its words as text; equal figures give equal files."""
    import matplotlib

    buffer = io.StringIO()
    with house_style(theme), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tether"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


@contextmanager
def house_style(theme: Theme = "light") -> Iterator[None]:
    """Matplotlib in this package's style inside a ``with``; what was set before comes back afterwards."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("Figures need matplotlib: pip install 'tether-rl[cli]'.") from error
    colours = COLOURS[theme]
    painted: dict[str, tuple[str, ...]] = {
        colours.background: ("figure.facecolor", "savefig.facecolor", "axes.facecolor"),
        colours.muted: ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"),
        colours.text: ("axes.titlecolor", "text.color"),
        colours.grid: ("grid.color",),
    }
    style: dict[Any, Any] = {part: colour for colour, parts in painted.items() for part in parts}
    with matplotlib.rc_context(style, fname=Path(__file__).with_suffix(".mplstyle")):
        yield


def band_of(curves: Sequence[Curve]) -> CurveBand | None:
    """Mean and interval of curves: at the x they share, interpolated where they share few.

    None where they cover no common range: a mean would be of other runs at each end.
    """
    shared = curves[0].x
    for curve in curves[1:]:
        shared = np.intersect1d(shared, curve.x, assume_unique=True)
    fewest = min(len(curve.x) for curve in curves)
    if 2 * shared.size >= fewest and shared.size >= 1:
        return mean_curve(curves)
    start, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    if start >= end:
        return None
    return mean_curve(curves, grid=max(2, min(fewest, 200)))


def _colour_indices(labels: Sequence[str]) -> dict[str, int]:
    unique = sorted(dict.fromkeys(labels))
    known = {label: label.casefold() for label in unique}
    fixed = {label: _FIXED_COLOURS[name] for label, name in known.items() if name in _FIXED_COLOURS}
    # Two names of one place (troll, tce) in one figure: the second takes the next free place.
    places: dict[str, int] = {}
    for label, place in fixed.items():
        if place not in places.values():
            places[label] = place
    free = (place for place in range(10_000) if place not in fixed.values())
    for label in unique:
        if label not in places:
            places[label] = next(free)
    return places


def _part_colours(count: int, theme: Theme) -> list[str]:
    cycle = COLOURS[theme].cycle
    return [cycle[(2, 4, 3, 5, 6, 7, 0, 1)[index % 8]] for index in range(count)]


def _drawable(curve: Curve, log: bool) -> Curve | None:
    keep = np.isfinite(curve.y) & (curve.y > 0 if log else True)
    return Curve(curve.x[keep], curve.y[keep]) if keep.any() else None


def _draw_label(axes: Axes, curves: list[Curve], label: str, colour: str, dash: Any, markers: bool) -> None:
    """Draw the runs of one label and their mean; where they cover no common range, one run bears the name."""
    # Matplotlib leaves out of its legends what begins with an underscore, as a module's name may.
    label = f"\u200b{label}" if label.startswith("_") else label
    style: dict[str, Any] = {"color": colour, "linestyle": dash, "label": label}
    style |= {"marker": "o", "markersize": 3.6} if markers else {}
    band = band_of(curves) if len(curves) > 1 else None
    if len(curves) == 1:
        axes.plot(curves[0].x, curves[0].y, **style)
        return
    for curve in curves:
        axes.plot(curve.x, curve.y, color=colour, linewidth=0.7, alpha=0.28)
    if band is None:
        axes.get_lines()[-1].set_label(label)
        return
    axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.17, linewidth=0)
    axes.plot(band.x, band.mean, **style)


def _draw_background(axes: Axes, curves: list[Curve], theme: Theme) -> None:
    """The mean of the runs of a label nobody is to look for."""
    band = band_of(curves) if len(curves) > 1 else None
    x, y = (band.x, band.mean) if band is not None else (curves[0].x, curves[0].y)
    axes.plot(x, y, color=COLOURS[theme].background_line, linewidth=0.8, zorder=1.5)


def _scale(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if panel.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        low, high = axes.get_ylim()
        edge = 0.02 * (high - low)  # room for a line that lies on 0 or 1
        axes.set_ylim(max(low, -edge), min(high, 1.0 + edge))
    if panel.whole:
        axes.set_ylim(-0.02, 1.02)
    if panel.from_zero:
        axes.set_ylim(bottom=0.0)
    if panel.log:
        low, high = axes.get_ylim()
        decades = np.log10(high / low)
        axes.yaxis.set_major_locator(
            MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10])  # 1, 2 and 5 might all lie outside
            if decades < 0.7
            else LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=9)
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.margins(x=0.02)


def _short(value: float) -> str:
    """A number as an axis shows it.

    >>> _short(160), _short(2500), _short(25_000), _short(1_250_000)
    ('160', '2500', '25k', '1.25M')
    """
    for unit, size in (("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e6 if unit == 'M' else 1e3):g}{unit}"
    return f"{value:g}"
