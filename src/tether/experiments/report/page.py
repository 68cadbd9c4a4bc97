"""Put numbers, plots and responses on one page that needs nothing but a browser."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tether.experiments.comparison import Row, by_point, can_decide, cells_of
from tether.experiments.files import atomic_write_bytes, atomic_write_text
from tether.experiments.report.panels import MOST_COLOURED, Picture, in_background, other_pictures, pictures
from tether.experiments.report.responses import samples
from tether.experiments.report.words import (
    by_difference,
    compare_settings,
    mixed_labels,
    render,
)
from tether.experiments.run_config import now
from tether.experiments.run_data import RunData, shared_ending
from tether.experiments.run_kind import Kinds, RunKind
from tether.experiments.study_table import load_runs
from tether.experiments.summary import MethodSummary, format_gain, format_interval, summarise

TEMPLATE = Path(__file__).with_name("page.html.jinja")
MEDIA = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif",
    ".webp": "image/webp", ".mp4": "video/mp4", ".webm": "video/webm",
}  # fmt: skip
EMBEDDED_BYTES = 8 * 2**20
"""Pictures and videos up to this size stand in the page; larger ones are named only."""
FEWEST_EQUAL_SEEDS = 4
"""So many seeds with one and the same end say something; the interval over fewer has no width, which is no
certainty. It is from four seeds a method on that a permutation test can decide, too."""
NAMED_RIVALS = 3
"""So many methods the sentence on the outcome names; the others it counts."""


def write_report(
    runs: Iterable[str | Path | RunData],
    out: str | Path,
    title: str | None = None,
    *,
    kinds: Kinds | None = None,
    comparison: tuple[str, Sequence[Row], str | None] | None = None,
) -> Path:
    """Show what some runs come to, on one page anybody can open and send on.

    The page holds everything (styles, plots, pictures, videos) and asks the network for nothing. Runs of one
    label are taken as seeds of one method; what all labels end in stands in the headline only. Plots are
    also written as PNG files, light and dark, into a folder beside the page.

    Args:
        runs: run folders, folders that hold some, tables of studies (`load_runs`); all of one kind.
        out: a folder, which gets ``report.html``, or the name of an ``.html`` file.
        title: the page's headline.
        kinds: what is known of each kind of run (`tether.kinds.KINDS` for those of this package); of others
            every number is plotted by its name.
        comparison: metric, rows and baseline of `tether.experiments.comparison.compare_methods`, to show in
            full.

    Returns:
        The path of the page.

    Raises:
        CheckpointError: no such run, a run without a number yet, runs of different kinds.
        MissingDependencyError: jinja2 or matplotlib is not installed.
    """
    found, point = _by_method(load_runs(runs, kinds))
    out = Path(out)
    page = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    summaries = summarise(found)
    background = in_background(summaries)
    plots, others = pictures(found, background), other_pictures(found, background)
    title = title or _title(found, [summary.label for summary in summaries]) + point
    html = _render(found, summaries, plots, others, title, comparison)
    folder = page.with_name(f"{page.stem}-plots")
    for picture in [*plots, *others]:
        for theme, png in picture.png.items():
            suffix = "" if theme == "light" else f"-{theme}"
            atomic_write_bytes(folder / f"{picture.name}{suffix}.png", png)
    return atomic_write_text(page, html)


def _render(
    runs: list[RunData],
    summaries: list[MethodSummary],
    plots: list[Picture],
    others: list[Picture],
    title: str,
    comparison: tuple[str, Sequence[Row], str | None] | None,
) -> str:
    shared, differing = compare_settings(runs)
    return render(
        TEMPLATE,
        title=title,
        kind=runs[0].kind,
        created=now(),
        lead=_lead(summaries),
        summaries=[_summary_row(summary) for summary in summaries],
        metric=summaries[0].metric_text,
        over=sorted({summary.over for summary in summaries}),
        few_seeds=any(1 < len(summary.seeds) < 5 for summary in summaries),
        unfinished=[_run_name(run) for run in runs if not run.finished],
        banded=any(len(summary.seeds) > 1 for summary in summaries),
        coloured=MOST_COLOURED,
        mixed=by_difference(mixed_labels(runs)),
        columns=[
            name
            for name in ("kl_mean", "kl_max", "projected")
            if any(getattr(summary, name) is not None for summary in summaries)
        ],
        comparison=_comparison(runs[0].kind, comparison),
        plots=[_embedded(picture) for picture in plots],
        others=[_embedded(picture) for picture in others],
        samples=samples(runs),
        media=_media(runs),
        shared=shared,
        differing=differing,
        labels=[summary.label for summary in summaries],
        runs=runs,
        versions=_versions(runs),
    )


def _comparison(
    kind: RunKind, comparison: tuple[str, Sequence[Row], str | None] | None
) -> dict[str, Any] | None:
    """The rows in words, point by point; None where there is nothing to test."""
    if comparison is None or comparison[2] is None:
        return None
    metric, rows, baseline = comparison
    points = {point: [cells_of(row, metric) for row in group] for point, group in by_point(rows).items()}
    columns = list(next(iter(points.values()))[0])
    return {"baseline": baseline, "metric": kind.metric_text(metric), "columns": columns, "points": points}


def _lead(summaries: Sequence[MethodSummary]) -> str:
    """The outcome in one sentence, claiming no more than the intervals do."""
    known = [summary for summary in summaries if summary.final is not None]
    if not known:
        return ""
    so_far = "" if all(summary.finished for summary in known) else "So far: "
    best = max(known, key=lambda summary: summary.final.value if summary.final else -math.inf)
    assert best.final is not None
    name = best.metric_text
    value = format_interval(best.final, best.is_fraction)
    if len(known) == 1:
        start = format_interval(best.start, best.is_fraction)
        return f"{so_far}{best.label}: {name} goes from {start} to {value}."
    outcome = f"{so_far}{best.label} ends highest, with a {name} of {value}"
    over = {summary.over for summary in known}
    if "nothing" in over or any(map(_too_few_equal, known)):
        return f"{outcome}; how certain that is cannot be told from these runs."
    rivals = [summary for summary in known if summary is not best]
    close = [rival.label for rival in rivals if rival.final and rival.final.high >= best.final.low]
    if close:
        left = len(close) - NAMED_RIVALS
        named = ", ".join(close[:NAMED_RIVALS]) + (f" and {left} more" if left > 0 else "")
        return f"{outcome}, but its interval does not set it apart from {named}."
    if over != {"seeds"}:
        limit = "; other seeds may end otherwise"
    elif all(can_decide(len(best.seeds), len(rival.seeds)) for rival in rivals):
        limit = ""
    else:  # bootstrap intervals of two or three seeds lie apart by chance in one comparison of three or ten
        limit = ", but so few seeds decide nothing"
    return f"{outcome}; its interval lies above all others{limit}."


def _too_few_equal(summary: MethodSummary) -> bool:
    final = summary.final
    return final is not None and final.low == final.high and len(summary.seeds) < FEWEST_EQUAL_SEEDS


def _summary_row(summary: MethodSummary) -> dict[str, Any]:
    fraction = summary.is_fraction
    return {
        "label": summary.label,
        "remarks": summary.remarks,
        "seeds": _seeds(summary.seeds),
        "start": format_interval(summary.start, fraction),
        "final": format_interval(summary.final, fraction),
        "gain": format_gain(summary.gain, fraction),
        "kl_mean": _number(summary.kl_mean),
        "kl_max": _number(summary.kl_max),
        "projected": "-" if summary.projected is None else f"{100 * summary.projected:.3g} %",
        "step_seconds": _number(summary.step_seconds, ".3g"),
        "run_seconds": summary.run_seconds,
    }


def _media(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Pictures and videos the runs made; without data where they are too large to embed."""
    found = []
    for run in runs:
        for path in run.folder.figures() if run.folder is not None else ():
            kind = MEDIA.get(path.suffix.lower())
            if kind is not None:
                small = path.stat().st_size < EMBEDDED_BYTES
                found.append({
                    "title": path.stem.replace("_", " ").replace("-", " "),
                    "run": _run_name(run),
                    "path": path,
                    "data": _data_uri(kind, path.read_bytes()) if small else None,
                    "is_video": kind.startswith("video"),
                })  # fmt: skip
    return found


def _embedded(picture: Picture) -> dict[str, str]:
    return {
        "name": picture.name,
        "title": picture.title,
        "caption": picture.caption,
        "svg": _data_uri("image/svg+xml", picture.svg.encode()),
        "csv": _data_uri("text/csv", picture.csv.encode()),
        **{theme: _data_uri("image/png", png) for theme, png in picture.png.items()},
    }


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _versions(runs: Sequence[RunData]) -> dict[str, str]:
    names = sorted({name for run in runs for name in run.config.versions})
    values = {name: sorted({run.config.versions.get(name, "-") for run in runs}) for name in names}
    return {name: ", ".join(found) for name, found in values.items()}


def _title(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    named = " against ".join(labels) if len(labels) <= 3 else f"{len(labels)} methods"
    every = [
        next(filter(None, map(run.config.settings.get, run.kind.subject_settings)), None) for run in runs
    ]
    # Of a grid over several tasks the title names none: each is among the settings that differ.
    return f"{named} on {every[0]}" if every[0] and all(one == every[0] for one in every) else named


def _by_method(runs: Sequence[RunData]) -> tuple[list[RunData], str]:
    """The runs without what all their labels end in, and that ending."""
    point = shared_ending([run.config.label for run in runs])
    short = [replace(run.config, label=run.config.label.removesuffix(point)) for run in runs]
    return [replace(run, config=config) for run, config in zip(runs, short, strict=True)], point


def _run_name(run: RunData) -> str:
    return f"{run.config.label}, seed {run.config.seed}"


def _seeds(seeds: Sequence[int]) -> tuple[str, str]:
    """How many, and which if they are few."""
    named = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}" if len(seeds) <= 6 else ""
    return str(len(seeds)), named


def _number(value: float | None, form: str = ".2g") -> str:
    return "-" if value is None else f"{value:{form}}"
