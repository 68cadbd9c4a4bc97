"""Put numbers, plots and responses on one page that needs nothing but a browser."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.errors import MissingDependencyError
from tether.experiments.comparison import Row, by_point, cells_of
from tether.experiments.files import atomic_write_bytes, atomic_write_text
from tether.experiments.progress import format_duration
from tether.experiments.report.panels import Picture, other_pictures, pictures
from tether.experiments.report.responses import samples
from tether.experiments.report.tinted import visible
from tether.experiments.run_config import flatten_settings, now
from tether.experiments.summary import (
    MethodSummary,
    RunData,
    by_label,
    format_gain,
    format_interval,
    load_runs,
    summarise,
)

TEMPLATE = "page.html.jinja"
MEDIA = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif",
    ".webp": "image/webp", ".mp4": "video/mp4", ".webm": "video/webm",
}  # fmt: skip
EMBEDDED_BYTES = 8 * 2**20
"""Pictures and videos up to this size stand in the page; larger ones are named only."""


@dataclass(frozen=True)
class Medium:
    """A picture or video a run made."""

    title: str
    run: str
    path: str
    data: str | None
    """A data URI; None for a file too large to embed."""
    is_video: bool


def write_report(
    run_paths: Iterable[str | Path],
    out: str | Path,
    title: str | None = None,
    *,
    comparison: tuple[str, Sequence[Row], str | None] | None = None,
) -> Path:
    """Show what some runs come to, on one page anybody can open and send on.

    The page holds everything (styles, plots, pictures, videos) and asks the network for nothing. Runs of one
    label are taken as seeds of one method. Plots are also written as PNG files, light and dark, into a folder
    beside the page.

    Args:
        run_paths: run folders, or folders that hold some; all of one kind.
        out: a folder, which gets ``report.html``, or the name of an ``.html`` file.
        title: the page's headline.
        comparison: metric, rows and baseline of `tether.experiments.comparison.compare_methods`, to show in
            full.

    Returns:
        The path of the page.

    Raises:
        CheckpointError: no such run, a run without a number yet, runs of different kinds.
        MissingDependencyError: jinja2 or matplotlib is not installed.
    """
    runs = load_runs(run_paths)
    out = Path(out)
    page = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    plots, others = pictures(runs), other_pictures(runs)
    html = _render(runs, plots, others, title or _title(runs), comparison)
    folder = page.with_name(f"{page.stem}-plots")
    for picture in [*plots, *others]:
        for theme, png in picture.png.items():
            suffix = "" if theme == "light" else f"-{theme}"
            atomic_write_bytes(folder / f"{picture.name}{suffix}.png", png)
    return atomic_write_text(page, html)


def _render(
    runs: list[RunData],
    plots: list[Picture],
    others: list[Picture],
    title: str,
    comparison: tuple[str, Sequence[Row], str | None] | None,
) -> str:
    summaries = summarise(runs)
    shared, differing = compare_settings(runs)
    return _template().render(
        title=title,
        kind=runs[0].config.kind,
        created=now(),
        lead=_lead(summaries),
        summaries=[_summary_row(summary) for summary in summaries],
        metric=summaries[0].metric.replace("_", " "),
        over=sorted({summary.over for summary in summaries}),
        few_seeds=any(1 < len(summary.seeds) < 5 for summary in summaries),
        unfinished=[_run_name(run) for run in runs if not run.folder.finished],
        mixed_labels=mixed_labels(runs),
        columns=[name for name in ("kl_mean", "kl_max", "projected") if _any(summaries, name)],
        comparison=_comparison(comparison),
        plots=[_embedded(picture) for picture in plots],
        others=[_embedded(picture) for picture in others],
        samples=samples(runs),
        media=_media(runs),
        shared=shared,
        differing=differing,
        labels=list(by_label(runs)),
        runs=[_run_row(run) for run in runs],
        versions=_versions(runs),
    )


def _comparison(comparison: tuple[str, Sequence[Row], str | None] | None) -> dict[str, Any] | None:
    """The rows in words, point by point; None where there is nothing to test."""
    if comparison is None or comparison[2] is None:
        return None
    metric, rows, baseline = comparison
    points = {
        point: [{name: _two_lines(text) for name, text in cells_of(row, metric).items()} for row in group]
        for point, group in by_point(rows).items()
    }
    columns = list(next(iter(points.values()))[0])
    return {"baseline": baseline, "metric": metric.replace("_", " "), "columns": columns, "points": points}


def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("Reports need jinja2: pip install 'tether-rl[cli]'.") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # labels, settings, prompts and responses are anybody's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE)


def compare_settings(runs: Sequence[RunData]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """(settings all runs share, settings that differ: name -> label -> its values), by dotted names."""
    flat = [flatten_settings(run.config.settings) for run in runs]
    shared: dict[str, str] = {}
    differing: dict[str, dict[str, str]] = {}
    for name in sorted(set().union(*flat)):
        texts = [_setting(settings[name]) if name in settings else "-" for settings in flat]
        if len(set(texts)) == 1:
            shared[name] = texts[0]
            continue
        differing[name] = {}
        for run, text in zip(runs, texts, strict=True):
            known = differing[name].get(run.config.label)
            if known is None:
                differing[name][run.config.label] = text
            elif text not in known.split(", "):
                differing[name][run.config.label] = f"{known}, {text}"
    return shared, differing


def mixed_labels(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Labels whose runs are not seeds of one method: label -> the settings in which they differ."""
    mixed = {}
    for label, group in by_label(runs).items():
        flat = [flatten_settings(run.config.settings) for run in group]
        names = sorted(set().union(*flat))
        different = [name for name in names if len({_setting(one.get(name)) for one in flat}) > 1]
        different = [name for name in different if name != "seed"]
        seeds = [run.config.seed for run in group]
        if different or len(set(seeds)) < len(seeds):
            mixed[label] = different or ["nothing but their folder: a seed appears twice"]
    return mixed


def _lead(summaries: Sequence[MethodSummary]) -> str:
    """The outcome in one sentence, claiming no more than the intervals do."""
    known = [summary for summary in summaries if summary.final is not None]
    if not known:
        return ""
    so_far = "" if all(summary.finished for summary in known) else "So far: "
    best = max(known, key=lambda summary: summary.final.value if summary.final else -math.inf)
    assert best.final is not None
    name = best.metric.replace("_", " ")
    value = format_interval(best.final, best.is_fraction)
    if len(known) == 1:
        start = format_interval(best.start, best.is_fraction)
        return f"{so_far}{best.label}: {name} goes from {start} to {value}."
    outcome = f"{so_far}{best.label} ends highest, with a {name} of {value}"
    over = {summary.over for summary in known}
    if "nothing" in over:
        return f"{outcome}; how certain that is cannot be told from these runs."
    rivals = [summary for summary in known if summary is not best]
    close = [rival.label for rival in rivals if rival.final and rival.final.high >= best.final.low]
    if close:
        return f"{outcome}, but its interval does not set it apart from {', '.join(close)}."
    seeds = "" if over == {"seeds"} else "; other seeds may end otherwise"
    return f"{outcome}; its interval lies above all others{seeds}."


def _summary_row(summary: MethodSummary) -> dict[str, Any]:
    return {
        "label": summary.label,
        "finished": summary.finished,
        "seeds": _seeds(summary.seeds),
        "start": _two_lines(format_interval(summary.start, summary.is_fraction)),
        "final": _two_lines(format_interval(summary.final, summary.is_fraction)),
        "gain": _two_lines(format_gain(summary.gain, summary.is_fraction)),
        "kl_mean": _number(summary.kl_mean),
        "kl_max": _number(summary.kl_max),
        "projected": "-" if summary.projected is None else f"{100 * summary.projected:.3g} %",
        "step_seconds": "-" if summary.step_seconds is None else f"{summary.step_seconds:.3g}",
        "run_time": format_duration(summary.run_seconds),
    }


def _two_lines(text: str) -> tuple[str, str]:
    """A value and its interval, "50 % (40-60)", apart."""
    value, opened, interval = text.partition(" (")
    return value, opened.strip() + interval


def _run_row(run: RunData) -> dict[str, str]:
    return {
        "name": run.folder.path.name,
        "label": run.config.label,
        "seed": str(run.config.seed),
        "steps": str(run.steps),
        "state": "finished" if run.folder.finished else "unfinished",
        "time": format_duration(run.seconds),
        "started": run.config.started,
    }


def _media(runs: Sequence[RunData]) -> list[Medium]:
    found = []
    for run in runs:
        for path in run.folder.figures():
            kind = MEDIA.get(path.suffix.lower())
            if kind is None:
                continue
            data = None
            if path.stat().st_size < EMBEDDED_BYTES:
                data = _data_uri(kind, path.read_bytes())
            title = path.stem.replace("_", " ").replace("-", " ")
            found.append(Medium(title, _run_name(run), str(path), data, kind.startswith("video")))
    return found


def _embedded(picture: Picture) -> dict[str, str]:
    return {
        "title": picture.title,
        "caption": picture.caption,
        **{theme: _data_uri("image/png", png) for theme, png in picture.png.items()},
    }


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _versions(runs: Sequence[RunData]) -> dict[str, str]:
    names = sorted({name for run in runs for name in run.config.versions})
    values = {name: sorted({run.config.versions.get(name, "-") for run in runs}) for name in names}
    return {name: ", ".join(found) for name, found in values.items()}


def _title(runs: Sequence[RunData]) -> str:
    labels = list(by_label(runs))
    named = " against ".join(labels) if len(labels) <= 3 else f"{len(labels)} methods"
    settings = runs[0].config.settings
    subject = settings.get("task") or settings.get("env") or settings.get("env_id")
    return f"{named} on {subject}" if subject else named


def _run_name(run: RunData) -> str:
    return f"{run.config.label}, seed {run.config.seed}"


def _seeds(seeds: Sequence[int]) -> str:
    listed = ", ".join(map(str, seeds))
    return f"{len(seeds)} ({listed})" if len(seeds) <= 6 else str(len(seeds))


def _setting(value: object) -> str:
    if isinstance(value, Mapping):
        return "{}" if not value else str(dict(value))
    return "-" if value is None else visible(str(value))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _any(summaries: Sequence[MethodSummary], name: str) -> bool:
    return any(getattr(summary, name) is not None for summary in summaries)
