"""Results of an evaluation: tables for the terminal, and one page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.experiments.files import atomic_write_text
from tether.experiments.report.words import (
    probability_text,
    prompt_text,
    render,
    tint,
    tint_texts,
    verdict,
    visible,
)
from tether.experiments.run_config import installed_versions, now
from tether.experiments.statistics import Interval
from tether.experiments.summary import format_gain, format_interval
from tether.llm.eval_config import PAGE_FILE, EvalConfig
from tether.llm.measures import Row, TaskResult

TEMPLATE = Path(__file__).with_name("evaluation_page.html.jinja")

SURPRISE_LEVELS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Where the tint of a token changes by its surprise, -log probability, in nats."""

ENTROPY_LEVELS = (0.1, 0.5, 1.0, 1.5, 2.5)
"""Where it changes by the entropy before it, in nats."""

FEWEST_PROBLEMS = 6
"""On which two models must differ for one to be ahead: a sign test of fewer does not reach 5 % even where all
go one way. A bootstrap calls a winner of one, and of four among any number on which they agree."""


def write_page(page: Path, config: EvalConfig, results: Sequence[TaskResult]) -> Path:
    """Write the page of an evaluation; it holds everything and asks the network for nothing."""
    tasks = [_task(config, result) for result in results]
    html = render(
        TEMPLATE,
        title=f"{visible(config.model)} on {', '.join(config.task)}",
        config=config,
        tasks=tasks,
        filters=_filters(config, [problem["kind"] for task in tasks for problem in task["problems"]]),
        surprise_texts=tint_texts([f"{level:g}" for level in SURPRISE_LEVELS]),
        entropy_texts=tint_texts([f"{level:g}" for level in ENTROPY_LEVELS]),
        scored=config.token_scores,
        created=now(),
        settings=config.settings(),
        versions=installed_versions(),
    )
    return atomic_write_text(page, html)


def _task(config: EvalConfig, result: TaskResult) -> dict[str, Any]:
    count = len(result.rows["model"])
    shown = min(config.page_problems, count)
    return {
        "name": result.task,
        "outcome": outcome(config, result),
        "headings": [heading for heading, _ in table_columns(result, config)],
        "rows": table_rows(result, config),
        "parts": ", ".join(f"{name} {value:.3g}" for name, value in result.summaries["model"].parts.items()),
        "problems": [_problem(config, result, place) for place in range(shown)],
        "left_out": count - shown,
        "count": count,
    }


def outcome(config: EvalConfig, result: TaskResult) -> str:
    """What came of one task in one sentence, claiming no more than the intervals do."""
    name = "success" if config.samples else "greedy"
    own = getattr(result.summaries["model"], name)
    responses = "sampled responses are right" if config.samples else "problems are right greedily"
    if result.difference is None:
        return f"{format_interval(own, fraction=True)} of the {responses}."
    gap = getattr(result.difference, name)
    shares = " against ".join(
        f"{100 * getattr(result.summaries[side], name).value:.1f} %" for side in ("model", "baseline")
    )
    pairs = zip(result.rows["model"], result.rows["baseline"], strict=True)
    if gap.low <= 0 <= gap.high:
        found = f"{config.model} and {config.baseline} are not told apart"
    elif sum(_share(ours) != _share(theirs) for ours, theirs in pairs) < FEWEST_PROBLEMS:
        found = (
            f"Who is ahead, {config.model} or {config.baseline}, cannot be told from so few problems on "
            "which they differ"
        )
    else:
        found = f"{config.model} does {'better' if gap.low > 0 else 'worse'} than {config.baseline}"
    return f"{found}: {shares} of the {responses}, {format_gain(gap, fraction=True)}."


def _filters(config: EvalConfig, kinds: Sequence[str]) -> list[tuple[str, str, int]]:
    """CSS class, words and number of problems of each choice besides "all"."""
    words = {"solved": "always right", "mixed": "sometimes right", "unsolved": "never right"}
    if config.baseline is not None:
        words = {"better": "better than the baseline", "worse": "worse", "same": "the same"}
    return [(kind, text, kinds.count(kind)) for kind, text in words.items()]


def _problem(config: EvalConfig, result: TaskResult, place: int) -> dict[str, Any]:
    rows = {side: answered[place] for side, answered in result.rows.items()}
    prompt, reference = prompt_text(rows["model"]["prompt"]), rows["model"]["reference"]
    return {
        "number": place + 1,
        "prompt": prompt,
        "headline": visible(" ".join(prompt.split()))[:160],
        "reference": reference if len(reference) <= 2000 else reference[:2000] + " ...",
        "sides": [(name, _score(rows[side]), _responses(rows[side])) for side, name in config.models.items()],
        "kind": _kind(rows),
    }


def _kind(rows: Mapping[str, Row]) -> str:
    """CSS class of a problem, for the filter."""
    share = _share(rows["model"])
    if "baseline" in rows:
        before = _share(rows["baseline"])
        return "better" if share > before else "worse" if share < before else "same"
    return "solved" if share == 1 else "unsolved" if share == 0 else "mixed"


def _share(row: Row) -> float:
    """Right responses among the sampled ones, or the greedy one where there are none."""
    responses = row["samples"] or [row["greedy"]]
    return sum(response["correct"] for response in responses) / len(responses)


def _score(row: Row) -> str:
    parts = []
    if row["samples"]:
        right = sum(response["correct"] for response in row["samples"])
        parts.append(f"{right} of {len(row['samples'])} right")
    if row["greedy"] is not None:
        parts.append("greedy right" if row["greedy"]["correct"] else "greedy wrong")
    return ", ".join(parts)


def _responses(row: Row) -> list[dict[str, Any]]:
    """The greedy response first."""
    shown = [] if row["greedy"] is None else [_response("greedy", row["greedy"])]
    return shown + [_response(f"sample {n}", response) for n, response in enumerate(row["samples"], start=1)]


def _response(title: str, response: Mapping[str, Any]) -> dict[str, Any]:
    reward = float(response["reward"])
    notes = [f"reward {reward:.3g}", f"{response['length']} tokens"]
    if response["truncated"]:
        notes.append("cut off")
    notes += [f"{name} {value:.3g}" for name, value in response["parts"].items() if name != "correct"]
    return {
        "title": title,
        "verdict": verdict(response["correct"], reward),
        "notes": ", ".join(notes),
        "text": "\n".join(visible(line) if line else "" for line in response["text"].split("\n")),
        "tokens": [_token(*token) for token in response.get("tokens", ())],
    }


def _token(text: str, log_prob: float, entropy: float) -> dict[str, Any]:
    """One token, tinted by the scores of the model that sampled it."""
    return {
        "text": visible(text),
        "surprise": tint(-log_prob, SURPRISE_LEVELS),
        "entropy": tint(entropy, ENTROPY_LEVELS),
        "tip": f"probability {probability_text(log_prob)}\nentropy before it {entropy:.3g} nats",
        "breaks": text.endswith("\n"),
    }


def print_evaluation(config: EvalConfig, results: Sequence[TaskResult]) -> None:
    """Show the results as tables, with 95 % intervals over problems, and where the page is."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for result in results:
        count = result.summaries["model"].problems
        table = Table(title=f"{result.task} ({config.split}, {count} problems)", title_justify="left")
        rows = table_rows(result, config)
        table.add_column("95 % intervals over problems")
        for name, _ in rows:
            table.add_column(name, justify="right", overflow="fold")
        for place, (heading, _) in enumerate(table_columns(result, config)):
            table.add_row(heading, *(cells[place] for _, cells in rows))
        console.print(table)
    if config.output is not None:
        console.print(f"Page: {(config.output / PAGE_FILE).resolve().as_uri()}", soft_wrap=True)


def table_rows(result: TaskResult, config: EvalConfig) -> list[tuple[str, list[str]]]:
    """Rows of the table: what it is about, and its cells; the difference of two models comes last."""
    names: dict[str, str] = {**config.models}
    if result.difference is not None:
        names["difference"] = "model less baseline"
    columns = table_columns(result, config)
    return [(name, [cells[side] for _, cells in columns]) for side, name in names.items()]


def table_columns(result: TaskResult, config: EvalConfig) -> list[tuple[str, dict[str, str]]]:
    """Columns of the table: heading, and text by side (and ``"difference"``)."""
    columns: list[tuple[str, dict[str, str]]] = []

    def add(heading: str, shares: Mapping[str, Interval | None]) -> None:
        cells = {side: format_interval(shares[side], fraction=True) for side in result.summaries}
        if result.difference is not None:
            cells["difference"] = format_gain(shares["difference"], fraction=True)
        columns.append((heading, cells))

    sides: dict[str, Any] = {**result.summaries, "difference": result.difference or result.summaries["model"]}
    if config.samples:
        add(f"success, avg@{config.samples}", {side: one.success for side, one in sides.items()})
        for k in config.ks:
            if k > 1:
                add(f"pass@{k}", {side: one.pass_at[k] for side, one in sides.items()})
    if config.greedy:
        add("greedy", {side: one.greedy for side, one in sides.items()})
    for heading, name in (("reward", "reward"), ("cut off", "truncated"), ("tokens", "length")):
        columns.append((heading, _numbers(result, name)))
    return columns


def _numbers(result: TaskResult, name: str) -> dict[str, str]:
    values = {side: getattr(summary, name) for side, summary in result.summaries.items()}
    share = name == "truncated"
    cells = {side: f"{100 * value:.1f} %" if share else f"{value:.3g}" for side, value in values.items()}
    return cells | {"difference": ""}
