"""The figure of docs/async.md: which policy the trust region is around, with stale data.

    python docs/anchors_figure.py        # writes docs/images/anchors.svg

Plain SVG from the standard library. Points stand for a token's distribution, distances for KL.
"""

from __future__ import annotations

import math
from pathlib import Path

FILE = Path(__file__).parent / "images" / "anchors.svg"
WIDTH, HEIGHT, PANEL = 900, 410, 450

SAMPLER, PROXIMAL, NETWORK = (170.0, 215.0), (292.0, 168.0), (385.0, 180.0)
GREY, BLUE, RED, BLACK = "#8a8f98", "#1f6fb2", "#c0392b", "#22262b"


def circle(at: tuple[float, float], radius: float, **style: object) -> str:
    """One circle."""
    x, y = at
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"{_attributes(style)}/>'


def text(at: tuple[float, float], words: str, **style: object) -> str:
    """One line of words; its middle stands at `at` unless `text_anchor` says otherwise."""
    x, y = at
    style = {"text_anchor": "middle", "fill": BLACK, "font_size": 13, **style}
    return f'<text x="{x:.1f}" y="{y:.1f}"{_attributes(style)}>{words}</text>'


def line(one: tuple[float, float], two: tuple[float, float], **style: object) -> str:
    """An arrow from one point to near the other."""
    length = math.dist(one, two)
    x, y = (a + (b - a) * (1 - 9 / length) for a, b in zip(one, two, strict=True))
    style = {"stroke": BLACK, "stroke_width": 1.6, "marker_end": "url(#tip)", **style}
    return f'<line x1="{one[0]:.1f}" y1="{one[1]:.1f}" x2="{x:.1f}" y2="{y:.1f}"{_attributes(style)}/>'


def _attributes(style: dict[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())


def panel(left: float, title: str, parts: list[str]) -> str:
    """One of the two halves."""
    head = text((PANEL / 2, 28), title, font_weight="bold", font_size=15)
    return f'<g transform="translate({left:.0f},0)">{head}{"".join(parts)}</g>'


def policies() -> list[str]:
    """The three of them, and the way between."""
    below = 24
    return [
        line(SAMPLER, PROXIMAL, stroke=GREY, stroke_dasharray="5 4"),
        text((224, 184), "lag 16", fill=GREY, font_size=12, transform="rotate(-21 224 184)"),
        line(PROXIMAL, NETWORK),
        circle(SAMPLER, 5, fill=BLUE), circle(PROXIMAL, 5, fill=GREY), circle(NETWORK, 5, fill=BLACK),
        text((SAMPLER[0], SAMPLER[1] + below), "sampler μ", fill=BLUE),
        text((SAMPLER[0], SAMPLER[1] + below + 16), "drew the tokens", fill=BLUE, font_size=11),
        text((PROXIMAL[0] + 18, PROXIMAL[1] - 14), "proximal π_p", fill="#5c626b"),
        text((NETWORK[0] + 16, NETWORK[1] + 22), "network π"),
    ]  # fmt: skip


def towards(centre: tuple[float, float], radius: float) -> tuple[float, float]:
    """Where the way from the network to a region's centre enters the region."""
    share = radius / math.dist(centre, NETWORK)
    return (centre[0] + (NETWORK[0] - centre[0]) * share, centre[1] + (NETWORK[1] - centre[1]) * share)


def projection(centre: tuple[float, float], radius: float, words: str) -> list[str]:
    """The network's projection onto a region, and what it is called."""
    at = towards(centre, radius)
    return [
        line(NETWORK, at, stroke=RED), circle(at, 5, fill=RED),
        text((at[0] + 4, at[1] + 22), words, fill=RED),
    ]  # fmt: skip


def region(centre: tuple[float, float], radius: float) -> str:
    """A trust region."""
    return circle(centre, radius, fill=BLUE, fill_opacity=0.09, stroke=BLUE, stroke_width=1.6)


def figure() -> str:
    """The whole of it as SVG."""
    trainer = [
        region(PROXIMAL, 50), *policies(), *projection(PROXIMAL, 50, "projected"),
        text((PANEL / 2, 366), "The region ignores where the data came from;", font_size=12),
        text((PANEL / 2, 383), "min(π_p / μ, 2) may weigh each token for it.", font_size=12),
        text((PANEL / 2, 400), "Costs a scoring pass of the rollouts.", font_size=12),
    ]  # fmt: skip
    sampler = [
        circle(SAMPLER, 66, fill="none", stroke=BLUE, stroke_width=1.2, stroke_dasharray="2 4"),
        region(SAMPLER, 140), *policies(), *projection(SAMPLER, 140, "projected"),
        text((SAMPLER[0] - 4, SAMPLER[1] - 71), "bound, lag 0", fill=BLUE, font_size=11),
        text((SAMPLER[0], SAMPLER[1] - 147), "bound at lag 16 (LagBound)", fill=BLUE, font_size=11),
        text((PANEL / 2, 383), "Lag and the engine's arithmetic count: KL(π ‖ μ).", font_size=12),
        text((PANEL / 2, 400), "Costs recording what the engine reports.", font_size=12),
    ]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img">'
        "<title>Anchor trainer: the region is around the proximal policy. Anchor sampler: around the policy "
        "that drew the tokens.</title>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="context-stroke"/></marker></defs>'
        + panel(0, 'anchor "trainer"', trainer)
        + panel(PANEL, 'anchor "sampler"', sampler)
        + "</svg>\n"
    )


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(figure(), encoding="utf-8")
