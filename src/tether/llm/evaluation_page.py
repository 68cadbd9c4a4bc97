"""Problems, responses, verdicts and token tints on one page that needs nothing but a browser."""

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
from tether.experiments.summary import format_gain, format_interval
from tether.llm.eval_config import EvalConfig
from tether.llm.evaluation_table import table_columns, table_rows
from tether.llm.measures import Row, TaskResult

TEMPLATE = Path(__file__).with_name("evaluation_page.html.jinja")

SURPRISE_LEVELS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Where the tint of a token changes by its surprise, -log probability, in nats."""

ENTROPY_LEVELS = (0.1, 0.5, 1.0, 1.5, 2.5)
"""Where it changes by the entropy before it, in nats."""


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
    if gap.low <= 0 <= gap.high:
        found = f"{config.model} and {config.baseline} are not told apart"
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
