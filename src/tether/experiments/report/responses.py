"""Sampled responses, token by token, made ready for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tether.experiments.report.panels import bounds
from tether.experiments.report.words import probability_text, tint, tint_texts, verdict, visible
from tether.experiments.run_data import RunData, by_label

SHOWN_RESPONSES = 8
LEVELS = (0.01, 0.1, 0.5, 1.0, 4.0)
"""Where the tint of a token changes, as multiples of the scale (the bound where there is one)."""


def samples(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The latest responses of the first run of each label that kept some."""
    chosen: list[tuple[RunData, int, list[Mapping[str, Any]]]] = []
    for group in by_label(runs).values():
        for run in group:
            steps = run.folder.sample_steps() if run.folder is not None else []
            rows = choose(run.folder.samples(steps[-1])) if run.folder is not None and steps else []
            if rows:
                chosen.append((run, steps[-1], rows))
                break
    # One scale for all, or a strong tint would mean less in one method than in another.
    bound = min(bounds(runs, runs[0].kind.token_bound_setting).values(), default=None)
    scale = bound if bound is not None else _typical_large_kl([row for *_, rows in chosen for row in rows])
    return [
        {
            "label": run.config.label,
            "seed": run.config.seed,
            "step": step,
            "scale": scale,
            "scale_is_bound": bound is not None,
            "level_texts": tint_texts([f"{level * scale:.2g}" for level in LEVELS]),
            "responses": _with_one_open([_response(row, scale) for row in rows]),
        }
        for run, step, rows in chosen
    ]


def _with_one_open(responses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a projection can be seen at a glance: the first response that has one."""
    seen = next(
        (one for one in responses if any("projected" in bars["names"] for bars in one["moved"])), None
    )
    return [{**one, "open": one is seen} for one in responses]


def choose(rows: Sequence[Mapping[str, Any]], count: int = SHOWN_RESPONSES) -> list[Mapping[str, Any]]:
    """The first half as they were drawn, the other half the most moved of the rest: neither all dull nor all
    picked for show."""
    first = list(rows[: count - count // 2])
    rest = sorted(rows[len(first) :], key=_largest_kl, reverse=True)
    return first + rest[: count - len(first)]


def _response(row: Mapping[str, Any], scale: float) -> dict[str, Any]:
    tokens = [_token(token, scale) for token in _tokens(row)]
    reward = float(row.get("reward", math.nan))
    return {
        "prompt": row.get("prompt", ""),
        "reference": str(row.get("reference", "")),
        "reward": f"{reward:.3g}",
        "verdict": verdict(bool(row.get("correct", reward >= 1)), reward),
        "tokens": tokens,
        "projected": sum(token["projected"] for token in tokens),
        "largest_kl": f"{_largest_kl(row):.2g}" if tokens else "-",
        "moved": [_bars(one, tokens) for one in row.get("moved", []) if 0 <= one["at"] < len(tokens)],
    }


def _bars(moved: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A token's old, new and projected distribution, a few entries of each as bars."""
    step, token = float(moved["step"]), tokens[moved["at"]]
    names = ("old", "new", "projected") if token["projected"] else ("old", "new")
    return {
        "text": token["text"],
        "place": moved["at"] + 1,
        "step": f"{100 * step:.0f} %",
        "names": names,
        "entries": [
            {
                "text": visible(str(entry["text"])),
                "sampled": bool(entry.get("sampled")),
                "bars": {
                    name: (100 * float(entry[name]), f"{100 * float(entry[name]):.3g} %") for name in names
                },
            }
            for entry in moved["entries"]
        ],
    }


def _token(token: Mapping[str, Any], scale: float) -> dict[str, Any]:
    kl, text = _kl(token), str(token.get("text", ""))
    projected = bool(token.get("projected", False))
    lines = [f"KL {kl:.3g} nats"]
    # What the loss sees is the projection; samples of before it had a name of its own have nothing else.
    names = ("old_log_prob", "new_log_prob", "log_prob")
    old, new, in_loss = (_probability(token.get(name)) for name in names)
    new = new if projected else new or in_loss
    if new and old:
        lines.append(f"probability {old} → {new}")
    if projected:
        lines.append(f"projected back to the bound{f': {in_loss}' if in_loss else ''}")
    return {
        "text": visible(text),
        "level": tint(kl, [level * scale for level in LEVELS]),
        "projected": projected,
        "tip": "\n".join(lines),
        "breaks": text.endswith("\n"),
    }


def _tokens(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [token for token in row.get("tokens", []) if isinstance(token, Mapping)]


def _kl(token: Mapping[str, Any]) -> float:
    value = token.get("kl")
    return float(value) if isinstance(value, int | float) else math.nan


def _largest_kl(row: Mapping[str, Any]) -> float:
    return max((kl for kl in map(_kl, _tokens(row)) if kl == kl), default=0.0)


def _typical_large_kl(rows: Sequence[Mapping[str, Any]]) -> float:
    """The KL that one token in twenty exceeds: a scale where no bound gives one."""
    values = sorted(kl for row in rows for kl in map(_kl, _tokens(row)) if math.isfinite(kl) and kl > 0)
    return values[int(0.95 * (len(values) - 1))] if values else 1.0


def _probability(log_prob: object) -> str:
    if not isinstance(log_prob, int | float) or log_prob != log_prob:
        return ""
    return probability_text(log_prob)
