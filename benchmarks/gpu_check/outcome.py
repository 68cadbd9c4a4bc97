"""What a piece found: figures with their bars, or why there are none."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Figure:
    """One number and what it must be."""

    name: str
    value: float
    bar: float | None = None
    """The most it may be, or the least; None for what is reported besides."""
    least: bool = False
    """Whether the bar is the least."""
    unit: str = ""

    @property
    def met(self) -> bool:
        """A number that is none meets nothing."""
        if self.bar is None:
            return True
        return self.value >= self.bar if self.least else self.value <= self.bar

    @property
    def cells(self) -> tuple[str, str, str, str]:
        verdict = "-" if self.bar is None else "met" if self.met else "**MISSED**"
        relation = "" if self.bar is None else f"{'>=' if self.least else '<='} {self.bar:.4g}"
        return self.name, f"{self.value:.4g} {self.unit}".strip(), relation, verdict


class NotHere(Exception):
    """What a piece needs is not on this machine: no failure, and not silence either."""


@dataclass(frozen=True)
class Outcome:
    """Of one piece."""

    piece: str
    status: Literal["ran", "not run", "failed"]
    seconds: float
    figures: Sequence[Figure] = field(default=())
    words: str = ""
    """Why it did not run, or how it failed."""

    @property
    def good(self) -> bool:
        return self.status != "failed" and all(figure.met for figure in self.figures)

    def as_json(self) -> dict[str, Any]:
        """Numbers that JSON does not know become words."""
        figures = [
            asdict(figure)
            | {"met": figure.met}
            | ({} if math.isfinite(figure.value) else {"value": str(figure.value)})
            for figure in self.figures
        ]
        return {
            "piece": self.piece,
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "words": self.words,
            "figures": figures,
        }

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Outcome:
        read = [{key: value for key, value in figure.items() if key != "met"} for figure in entry["figures"]]
        figures = [Figure(**figure | {"value": float(figure["value"])}) for figure in read]
        return cls(entry["piece"], entry["status"], entry["seconds"], figures, entry["words"])


def page(machine: dict[str, str], outcomes: Sequence[Outcome], command: str) -> str:
    """One page: the machine, then every piece with its figures."""
    missed = [f for outcome in outcomes for f in outcome.figures if not f.met]
    failed = [outcome.piece for outcome in outcomes if outcome.status == "failed"]
    lines = [
        f"# {machine['device']}", "", f"`{command}`, {sum(o.seconds for o in outcomes):.0f} s.", "",
        f"Bars missed: {len(missed)}. Pieces that failed: {', '.join(failed) or 'none'}.", "",
        *(f"- {name}: {value}" for name, value in machine.items()),
    ]  # fmt: skip
    for outcome in outcomes:
        lines += ["", f"## {outcome.piece}: {outcome.status}, {outcome.seconds:.0f} s", ""]
        if outcome.words:
            lines += [outcome.words.replace("\n", " "), ""]
        if outcome.figures:
            lines += ["| figure | value | bar | |", "| --- | --- | --- | --- |"]
            lines += [f"| {' | '.join(figure.cells)} |" for figure in outcome.figures]
    return "\n".join(lines) + "\n"


def write(
    folder: Path, machine: dict[str, str], outcomes: Sequence[Outcome], command: str
) -> tuple[Path, Path]:
    """The page and the numbers, named after the device."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "-" for c in machine["device"].lower()).strip("-")
    numbers = {"command": command, "machine": machine, "pieces": [outcome.as_json() for outcome in outcomes]}
    paths = folder / f"{name}.md", folder / f"{name}.json"
    texts = page(machine, outcomes, command), json.dumps(numbers, indent=1) + "\n"
    for path, text in zip(paths, texts, strict=True):
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(path)
    return paths
