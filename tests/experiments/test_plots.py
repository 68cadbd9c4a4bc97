from __future__ import annotations

import io
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_hex, to_rgb
from PIL import Image

from tether.errors import InvalidInputError
from tether.experiments.plots import (
    COLOURS,
    Panel,
    Theme,
    band_of,
    curves_figure,
    keep_layout,
    palette,
    png_bytes,
    save_figure,
    small_multiples,
    stacked_bars,
)
from tether.experiments.statistics import Curve, mean_curve

X = np.arange(4.0)
TWO = [Curve(X, X), Curve(X, 3 * X)]


def lines_of(axes: Axes, colour: str) -> list[tuple[float, list[float]]]:
    """(width, y) of the lines of a colour, thin ones first."""
    found = [line for line in axes.get_lines() if to_hex(line.get_color()) == to_hex(colour)]
    return sorted((line.get_linewidth(), np.asarray(line.get_ydata()).tolist()) for line in found)


def test_runs_are_thin_lines_their_mean_a_thick_one_with_its_band() -> None:
    axes = curves_figure(Panel("Success", {"TROLL": TWO})).axes[0]
    lines = lines_of(axes, palette(["TROLL"])["TROLL"])
    assert sorted(y for _, y in lines[:2]) == [[0, 1, 2, 3], [0, 3, 6, 9]]
    assert lines[2][1] == [0, 2, 4, 6]
    assert lines[0][0] < lines[2][0]
    (band,) = [item for item in axes.collections if isinstance(item, FillBetweenPolyCollection)]
    low, high = band.get_paths()[0].get_extents().intervaly
    expected = mean_curve(TWO)
    assert (low, high) == (expected.low.min(), expected.high.max())


def test_a_single_run_is_one_thick_line_without_a_band() -> None:
    axes = curves_figure(Panel("Success", {"TROLL": TWO[:1]})).axes[0]
    assert len(axes.get_lines()) == 1
    assert not axes.collections


def test_each_label_is_named_once_in_its_lines_colour() -> None:
    curves = {f"method {i}": [Curve(X, X + i / 1000)] for i in range(6)}
    figure = small_multiples([Panel("", curves), Panel("", curves)])
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    shown = {name: to_hex(line.get_color()) for name, line in zip(names, legend.get_lines(), strict=True)}
    assert len(names) == 6
    assert shown == palette(list(curves))


def test_a_label_that_begins_with_an_underscore_is_named_like_any_other() -> None:
    for others in ((), ("clip",)):
        labels = ("_mine:loss", *others)
        figure = curves_figure(Panel("", {label: [Curve([0, 1], [0.0, 1.0])] for label in labels}))
        named = [text.get_text().removeprefix("\u200b") for text in figure.legends[0].get_texts()]
        assert sorted(named) == sorted(labels)
        png_bytes(figure)  # a glyph that the font lacks would be a warning


def test_runs_apart_without_a_mean_are_named_too() -> None:
    apart = [Curve([0, 1], [0.0, 1.0]), Curve([5, 6], [0.0, 1.0])]
    (legend,) = curves_figure(Panel("", {"TROLL": apart})).legends
    assert [text.get_text() for text in legend.get_texts()] == ["TROLL"]


def test_a_method_has_one_colour_whatever_else_is_shown() -> None:
    assert (
        palette(["TROLL"])["TROLL"]
        == palette(["clip", "zebra", "TROLL"])["TROLL"]
        == COLOURS["light"].cycle[0]
    )
    assert palette(["b", "a", "clip"]) == palette(["clip", "a", "b"])
    assert len(set(palette([f"m{i}" for i in range(8)]).values())) == 8
    assert palette(["tce", "TROLL"])["tce"] != palette(["tce", "TROLL"])["TROLL"]


# Colour vision without green and without red cones: Machado, Oliveira and Fernandes 2009, severity 1.0.
WITHOUT_GREEN = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
]
WITHOUT_RED = [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
]


def linear(colour: str) -> np.ndarray:
    srgb = np.array(to_rgb(colour))
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
    xyz = np.array(to_xyz) @ linear / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("cones", [WITHOUT_GREEN, WITHOUT_RED])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_apart_by_the_colour_blind(theme: Theme, cones: list[list[float]]) -> None:
    seen = [lab(np.clip(np.array(cones) @ linear(colour), 0, 1)) for colour in COLOURS[theme].cycle]
    distances = [np.linalg.norm(a - b) for a, b in combinations(seen, 2)]
    assert min(distances) > 12  # a CIELAB difference of 2.3 is just noticeable


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_stand_out_from_the_ground(theme: Theme) -> None:
    colours = COLOURS[theme]

    def contrast(colour: str) -> float:
        luminances = [
            float(np.array([0.2126, 0.7152, 0.0722]) @ linear(c)) for c in (colour, colours.background)
        ]
        return (max(luminances) + 0.05) / (min(luminances) + 0.05)

    assert min(contrast(colours.text), contrast(colours.muted)) >= 4.5  # WCAG 2.1, text
    assert min(contrast(colour) for colour in colours.cycle) >= 2.0


def test_logarithmic_axes_skip_what_has_no_logarithm_and_draw_the_bound() -> None:
    curve = Curve(X, np.array([0.0, 0.1, np.inf, 0.4]))
    axes = curves_figure(Panel("KL", {"TROLL": [curve]}, log=True, lines={"bound 0.05": 0.05})).axes[0]
    assert axes.get_yscale() == "log"
    dashed = [line for line in axes.get_lines() if np.asarray(line.get_ydata()).tolist() == [0.05, 0.05]]
    assert len(dashed) == 1
    assert lines_of(axes, palette(["TROLL"])["TROLL"])[0][1] == [0.1, 0.4]
    assert "bound 0.05" in [text.get_text() for text in axes.texts]
    low, high = axes.get_ylim()
    assert low < 0.05 < 0.4 < high


@pytest.mark.parametrize("values", [(0.06, 0.12), (0.011, 0.019), (0.002, 0.3), (1e-5, 1.0)])
def test_logarithmic_axes_have_ticks_however_short_they_are(values: tuple[float, float]) -> None:
    axes = curves_figure(Panel("KL", {"TROLL": [Curve(X[:2], np.array(values))]}, log=True)).axes[0]
    low, high = axes.get_ylim()
    assert 2 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 9


@pytest.mark.parametrize("bound", [0.05, 3.0])
def test_the_bounds_name_stays_off_its_line_and_the_title(bound: float) -> None:
    curve = Curve(X, np.array([0.1, 0.2, 0.3, 1.0]))
    figure = curves_figure(Panel("KL", {"TROLL": [curve]}, log=True, lines={"bound": bound}))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    (name,) = [text for text in axes.texts if text.get_text() == "bound"]
    box = name.get_window_extent()
    (_, line) = axes.transData.transform((0.0, bound))
    assert not box.y0 <= line <= box.y1
    assert box.y1 <= axes.get_window_extent().y1 + 1


def test_what_lies_in_the_background_is_grey_thin_and_unnamed() -> None:
    curves = {f"method {i}": [Curve(X, X + i), Curve(X, X - i)] for i in range(12)}
    background = frozenset(list(curves)[3:])
    axes = curves_figure(Panel("", curves, background=background)).axes[0]
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["method 0", "method 1", "method 2"]
    grey = lines_of(axes, COLOURS["light"].background_line)
    assert len(grey) == len(background), "one line a label, its mean"
    assert max(width for width, _ in grey) < 1
    assert len(axes.collections) == 3, "no band in the background"


def test_names_stand_below_and_leave_the_axes_their_room() -> None:
    def drawn(names: list[str]) -> tuple[float, Axes]:
        figure = curves_figure(Panel("", {name: [Curve(X, X)] for name in names}))
        figure.draw_without_rendering()
        return figure.axes[0].get_window_extent().width, figure.axes[0]

    names = [f"dppo divergence_low={i}, divergence_high=0.15, lr 0.0001" for i in range(3)]
    (short, _), (long, axes) = drawn(["a", "b"]), drawn(names)
    assert long >= short
    assert not axes.texts
    assert axes.figure is not None
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert legend.get_window_extent().y1 <= axes.get_window_extent().y0


def test_ticks_read_as_per_cent_and_thousands() -> None:
    curve = Curve(X * 1e5, X / 10)
    figure = curves_figure(Panel("", {"a": [curve]}, percent=True))
    figure.canvas.draw()
    axes = figure.axes[0]
    assert "20 %" in [tick.get_text() for tick in axes.get_yticklabels()]
    assert "100k" in [tick.get_text() for tick in axes.get_xticklabels()]


def test_whole_axes_show_all_fractions_whatever_was_reached() -> None:
    figure = curves_figure(Panel("", {"a": [Curve([0, 1], [0.0, 0.05])]}, percent=True, whole=True))
    assert figure.axes[0].get_ylim() == pytest.approx((-0.02, 1.02))


def test_runs_at_other_steps_are_averaged_on_a_grid_and_runs_apart_not_at_all() -> None:
    band = band_of([Curve([0, 10, 20], [0.0, 1.0, 2.0]), Curve([1, 11, 21], [0.1, 1.1, 2.1])])
    assert band is not None
    assert (band.x[0], band.x[-1]) == (1.0, 20.0)
    np.testing.assert_allclose(band.mean, band.x / 10, atol=1e-12)
    assert band_of([Curve([0, 1], [0.0, 1.0]), Curve([5, 6], [0.0, 1.0])]) is None
    apart = {"a": [Curve([0, 1], [0.0, 1.0]), Curve([5, 6], [0.0, 1.0])]}
    assert not curves_figure(Panel("", apart)).axes[0].collections


def test_a_panel_with_nothing_to_draw_says_so() -> None:
    with pytest.raises(InvalidInputError, match="'Reward' has no finite value"):
        curves_figure(Panel("Reward", {"a": [Curve(X, X * np.nan)]}))
    with pytest.raises(InvalidInputError, match="No panels"):
        small_multiples([])


def test_bars_stack_to_the_total() -> None:
    figure = stacked_bars(
        {"tce": {"sampling": 2.0, "policy": 1.0}, "bbrl": {"policy": 4.0}}, title="", x_label="s"
    )
    ends: dict[float, float] = {}
    for patch in figure.axes[0].patches:
        place = round(patch.get_y(), 3)  # type: ignore[attr-defined]
        ends[place] = max(ends.get(place, 0.0), patch.get_x() + patch.get_width())  # type: ignore[attr-defined]
    assert sorted(ends.values()) == [3.0, 4.0]


def test_pictures_are_repeatable_sharp_and_in_the_themes_colours(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    panel = Panel("Success", {"TROLL $x$": TWO})
    first, second = (png_bytes(curves_figure(panel, "dark"), "dark") for _ in range(2))
    assert first == second
    with Image.open(io.BytesIO(first)) as image:
        assert image.width >= 900
        assert (
            "#{:02x}{:02x}{:02x}".format(*image.convert("RGB").getpixel((0, 0))) == COLOURS["dark"].background
        )  # type: ignore[misc]
    path = save_figure(curves_figure(panel), tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_a_layout_that_is_kept_gives_the_same_pictures() -> None:
    panels = [Panel(f"metric {number}", {"TROLL": TWO, "clip": [Curve(X, 1e4 * X)]}) for number in range(3)]
    themes: tuple[Theme, Theme] = ("light", "dark")
    apart = [png_bytes(small_multiples(panels, theme), theme) for theme in themes]
    light, dark = (small_multiples(panels, theme) for theme in themes)
    together = [png_bytes(light)]
    keep_layout(light, [dark])
    assert [*together, png_bytes(dark, "dark")] == apart
    assert png_bytes(light) == apart[0]
