"""Problems, responses, verdicts and token tints on one page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.errors import MissingDependencyError
from tether.experiments.files import atomic_write_text
from tether.experiments.report import tinted
from tether.experiments.report.tinted import visible
from tether.experiments.report.words import date_text, setting_text, two_lines
from tether.experiments.run_config import installed_versions, now
from tether.experiments.summary import format_gain, format_interval
from tether.llm.eval_config import EvalConfig
from tether.llm.evaluation_table import table_columns, table_rows
from tether.llm.measures import Row, TaskResult

TEMPLATE = "evaluation_page.html.jinja"

SURPRISE_LEVELS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Where the tint of a token changes by its surprise, -log probability, in nats."""

ENTROPY_LEVELS = (0.1, 0.5, 1.0, 1.5, 2.5)
"""Where it changes by the entropy before it, in nats."""


@dataclass(frozen=True)
class Token(tinted.Token):
    """One token, tinted by the scores of the model that sampled it."""

    surprise: int
    """Tint: 0 (expected) to ``len(SURPRISE_LEVELS)``."""
    entropy: int


@dataclass(frozen=True)
class Shown:
    """One response as it is shown."""

    title: str
    verdict: str
    """``"right"``, ``"partly right"`` or ``"wrong"``."""
    notes: str
    """Reward, length and parts in words."""
    text: str
    tokens: list[Token]
    """Empty where no scores were kept; then the text is shown."""


@dataclass(frozen=True)
class Problem:
    """One problem with the responses of each model."""

    number: int
    prompt: str
    headline: str
    """The prompt's beginning, in one line."""
    reference: str
    sides: list[tuple[str, str, list[Shown]]]
    """Of each model: its heading, its score in words, its responses."""
    kind: str
    """CSS class for the filter: solved, mixed, unsolved; with a baseline: better, worse, same."""


def write_page(page: Path, config: EvalConfig, results: Sequence[TaskResult]) -> Path:
    """Write the page of an evaluation; it holds everything and asks the network for nothing.

    Raises:
        MissingDependencyError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("The page needs jinja2: pip install 'tether-rl[cli]'.") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # prompts and responses are anybody's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    problems = [
        [_problem(config, result, place) for place in range(_shown(config, result))] for result in results
    ]
    tasks = [
        {
            "name": result.task,
            "outcome": outcome(config, result),
            "headings": [heading for heading, _ in table_columns(result, config)],
            "rows": [
                (name, [two_lines(cell) for cell in cells]) for name, cells in table_rows(result, config)
            ],
            "parts": _parts(result),
            "problems": shown,
            "left_out": len(result.rows["model"]) - len(shown),
            "count": len(result.rows["model"]),
        }
        for result, shown in zip(results, problems, strict=True)
    ]
    html = environment.get_template(TEMPLATE).render(
        title=f"{visible(config.model)} on {', '.join(config.task)}",
        config=config,
        tasks=tasks,
        filters=_filters(config, [problem for shown in problems for problem in shown]),
        surprise_texts=_level_texts(SURPRISE_LEVELS),
        entropy_texts=_level_texts(ENTROPY_LEVELS),
        scored=config.token_scores,
        created=date_text(now()),
        settings={name: setting_text(value) for name, value in config.settings().items()},
        versions=installed_versions(),
    )
    return atomic_write_text(page, html)


def _shown(config: EvalConfig, result: TaskResult) -> int:
    return min(config.page_problems, len(result.rows["model"]))


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


def _filters(config: EvalConfig, problems: Sequence[Problem]) -> list[tuple[str, str, int]]:
    """CSS class, words and number of problems of each choice besides "all"."""
    words = {"solved": "always right", "mixed": "sometimes right", "unsolved": "never right"}
    if config.baseline is not None:
        words = {"better": "better than the baseline", "worse": "worse", "same": "the same"}
    kinds = [problem.kind for problem in problems]
    return [(kind, text, kinds.count(kind)) for kind, text in words.items()]


def _problem(config: EvalConfig, result: TaskResult, place: int) -> Problem:
    rows = {side: answered[place] for side, answered in result.rows.items()}
    prompt = tinted.prompt_text(rows["model"]["prompt"])
    return Problem(
        number=place + 1,
        prompt=prompt,
        headline=visible(" ".join(prompt.split()))[:160],
        reference=_reference_text(rows["model"]["reference"]),
        sides=[(name, _score(rows[side]), _responses(rows[side])) for side, name in config.models.items()],
        kind=_kind(rows),
    )


def _kind(rows: Mapping[str, Row]) -> str:
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


def _responses(row: Row) -> list[Shown]:
    """The greedy response first."""
    shown = [] if row["greedy"] is None else [_response("greedy", row["greedy"])]
    return shown + [_response(f"sample {n}", response) for n, response in enumerate(row["samples"], start=1)]


def _response(title: str, response: Mapping[str, Any]) -> Shown:
    reward = float(response["reward"])
    notes = [f"reward {reward:.3g}", f"{response['length']} tokens"]
    if response["truncated"]:
        notes.append("cut off")
    notes += [f"{name} {value:.3g}" for name, value in response["parts"].items() if name != "correct"]
    return Shown(
        title=title,
        verdict=tinted.verdict(response["correct"], reward),
        notes=", ".join(notes),
        text="\n".join(visible(line) if line else "" for line in response["text"].split("\n")),
        tokens=[_token(*token) for token in response.get("tokens", ())],
    )


def _token(text: str, log_prob: float, entropy: float) -> Token:
    return Token(
        text=visible(text),
        surprise=tinted.tint(-log_prob, SURPRISE_LEVELS),
        entropy=tinted.tint(entropy, ENTROPY_LEVELS),
        tip=f"probability {tinted.probability_text(log_prob)}\nentropy before it {entropy:.3g} nats",
        breaks=text.endswith("\n"),
    )


def _reference_text(reference: str) -> str:
    return reference if len(reference) <= 2000 else reference[:2000] + " ..."


def _parts(result: TaskResult) -> str:
    """Means of the verdicts' parts of the model, in words."""
    return ", ".join(f"{name} {value:.3g}" for name, value in result.summaries["model"].parts.items())


def _level_texts(levels: Sequence[float]) -> list[str]:
    return tinted.tint_texts([f"{level:g}" for level in levels])
