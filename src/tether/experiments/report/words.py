"""How a page is made, and how settings, dates, values, prompts and tokens look on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from tether.errors import MissingDependencyError
from tether.experiments.progress import format_duration
from tether.experiments.run_config import flatten_settings
from tether.experiments.run_data import RunData, by_label


def render(template: Path, **values: Any) -> str:
    """Fill a Jinja template of this package; what is filled in is anybody's text, and escaped."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("Pages need jinja2: pip install 'tether-rl[cli]'.") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "two_lines": two_lines, "visible": visible, "duration": format_duration, "date": date_text,
        "setting": setting_text, "prompt": prompt_text,
    }  # fmt: skip
    return environment.get_template(template.name).render(**values)


def setting_text(value: object) -> str:
    """A setting's value as a reader would write it.

    >>> setting_text(("gsm8k", "math")), setting_text(()), setting_text(None), setting_text({"terms": 3})
    ('gsm8k, math', '-', '-', 'terms: 3')
    >>> setting_text(True), setting_text(1e-4)
    ('yes', '0.0001')
    """
    if value is None or value == () or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {setting_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(setting_text(inner) for inner in value)
    return visible(str(value))


def date_text(moment: str) -> str:
    """A moment in ISO 8601 as people write it.

    >>> date_text("2026-11-03T14:54:11+00:00")
    '3 November 2026, 14:54 UTC'
    """
    there = datetime.fromisoformat(moment).astimezone(UTC)
    return f"{there.day} {there:%B %Y, %H:%M} UTC"


def two_lines(text: str) -> tuple[str, str]:
    """A value and its interval apart, for a narrow column.

    >>> two_lines("50 % (40-60)"), two_lines("-")
    (('50 %', '(40-60)'), ('-', ''))
    """
    value, opened, interval = text.partition(" (")
    return value, opened.strip() + interval


def tint(value: float, levels: Sequence[float]) -> int:
    """How many of the rising levels a value reaches; none where it is NaN.

    >>> tint(0.5, (0.1, 0.5, 1.0)), tint(float("nan"), (0.1, 0.5, 1.0))
    (2, 0)
    """
    return sum(value >= level for level in levels)


def tint_texts(edges: Sequence[str]) -> list[str]:
    """What each tint means, from the weakest.

    >>> tint_texts(("0.1", "0.5"))
    ['< 0.1', '0.1-0.5', '> 0.5']
    """
    return [f"< {edges[0]}", *(f"{low}-{high}" for low, high in pairwise(edges)), f"> {edges[-1]}"]


def verdict(right: bool, reward: float) -> str:
    """``"right"``, ``"partly right"`` (not right, and rewarded all the same) or ``"wrong"``."""
    return "right" if right else "partly right" if reward > 0 else "wrong"


def probability_text(log_prob: float) -> str:
    """In per cent; what rounding made of a certain token is not more than that."""
    return f"{100 * math.exp(min(log_prob, 0.0)):.3g} %"


def prompt_text(prompt: object) -> str:
    """A prompt as one text, the turns of a conversation below each other.

    >>> prompt_text([{"role": "user", "content": "2 + 2?"}])
    'user: 2 + 2?'
    """
    if not isinstance(prompt, list):
        return str(prompt)
    turns = [turn if isinstance(turn, Mapping) else {"content": turn} for turn in prompt]
    said = ((turn.get("role"), str(turn.get("content", ""))) for turn in turns)
    return "\n\n".join(f"{role}: {content}" if role else content for role, content in said)


def visible(text: str) -> str:
    """A token's text with line ends, tabs and control characters made visible; nothing else is changed.

    >>> visible("a\\n"), visible("\\x00"), visible("")
    ('a↵', '␀', '∅')
    """
    return text.translate(_SHOWN) if text else "∅"


#: Unicode's pictures of control characters; half a pair, delete, and what would turn the reading direction.
_SHOWN = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    ord("\n"): "↵",
    **dict.fromkeys((*range(0xD800, 0xE000), 0x7F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"),
}


def compare_settings(runs: Sequence[RunData]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """(settings all runs share, settings that differ: name -> label -> its values), by dotted names.

    A run's ``name`` is its label, and no setting.
    """
    flat = [flatten_settings(run.config.settings) for run in runs]
    shared: dict[str, str] = {}
    differing: dict[str, dict[str, str]] = {}
    for name in sorted(set().union(*flat) - {"name"}):
        texts = [setting_text(settings.get(name)) for settings in flat]
        if len(set(texts)) == 1:
            shared[name] = texts[0]
            continue
        values: dict[str, dict[str, None]] = {}  # label -> its values, each once, in order
        for run, text in zip(runs, texts, strict=True):
            values.setdefault(run.config.label, {})[text] = None
        differing[name] = {label: " or ".join(found) for label, found in values.items()}
    return shared, differing


def mixed_labels(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Labels whose runs are not seeds of one method: label -> the settings in which they differ."""
    mixed = {}
    for label, group in by_label(runs).items():
        _, differing = compare_settings(group)
        different = [name for name in differing if name != "seed"]
        seeds = [run.config.seed for run in group]
        if different or len(set(seeds)) < len(seeds):
            mixed[label] = different or ["nothing but their folder: a seed appears twice"]
    return mixed


def by_difference(mixed: Mapping[str, Sequence[str]]) -> list[tuple[list[str], list[str]]]:
    """Mixed labels that differ in the same settings together: (labels, settings).

    >>> by_difference({"a": ["tail"], "b": ["tail"], "c": ["top_k"]})
    [(['a', 'b'], ['tail']), (['c'], ['top_k'])]
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for label, names in mixed.items():
        groups.setdefault(tuple(names), []).append(label)
    return [(labels, list(names)) for names, labels in groups.items()]
