"""What was found, as a table on the terminal, a table in Markdown and JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.bench.bars import Bar, Finding
from benchmarks.bench.timing import Ratio

_COLUMNS = ("bar", "ours / against", "where", "ratio", "95 %", "bar at", "verdict", "medians")


def write(
    section: str,
    findings: Sequence[Finding],
    device: torch.device,
    folder: Path,
    command: str,
    *,
    others_stay: bool = False,
) -> list[Path]:
    """Put a section's findings into `<device>.json` and `<device>.md`, in the place of what was there before.

    Each file is written to a temporary name first. What other sections found stays; with `others_stay`, what
    this one found elsewhere (with another LM head) as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{device.type}.json"
    sections = json.loads(target.read_text(encoding="utf-8"))["sections"] if target.exists() else {}
    entries = [_as_json(finding, device.type) for finding in findings]
    if others_stay:
        measured = {(entry["ours"], entry["against"], entry["where"]) for entry in entries}
        before = sections.get(section, {"findings": []})["findings"]
        entries = [e for e in before if (e["ours"], e["against"], e["where"]) not in measured] + entries
    sections[section] = {
        "command": command,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if device.type == "cpu" else "wall time, queue emptied",
        "findings": entries,
    }
    every = [_from_json(entry) for part in sections.values() for entry in part["findings"]]
    return [
        _replace(target, json.dumps({"sections": sections}, indent=1) + "\n"),
        _replace(target.with_suffix(".md"), markdown(every, device.type)),
    ]


def _replace(target: Path, text: str) -> Path:
    temporary = target.with_suffix(f"{target.suffix}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(target)
    return target


def terminal_line(finding: Finding, device_type: str) -> str:
    """One finding in a line."""
    number, pair, where, value, interval, limit, verdict, medians = _cells(finding, device_type)
    return f"{number:>2} {pair:34} {value:>6} {interval:>13} {limit:>5} {verdict:7} {medians:22} {where}"


def markdown(findings: Sequence[Finding], device_type: str) -> str:
    """All findings as a table."""
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS), *(_cells(finding, device_type) for finding in findings)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(finding: Finding, device_type: str) -> tuple[str, ...]:
    limit = finding.limit(device_type)
    form = {"s": ".4f", "MiB": ".0f"}.get(finding.unit, ".1e")
    return (
        "" if finding.bar is None else str(finding.bar.number),
        f"{finding.ours} / {finding.against}",
        finding.where,
        f"{finding.ratio.median:.3f}",
        f"{finding.ratio.low:.3f}-{finding.ratio.high:.3f}",
        "" if limit is None else f"{limit:g}",
        finding.verdict(device_type),
        f"{finding.ours_cost:{form}} / {finding.against_cost:{form}} {finding.unit}",
    )


def _as_json(finding: Finding, device_type: str) -> dict[str, Any]:
    limit, verdict = finding.limit(device_type), finding.verdict(device_type)
    return asdict(finding) | {"limit": limit, "verdict": verdict}


def _from_json(entry: dict[str, Any]) -> Finding:
    known = {name: value for name, value in entry.items() if name not in ("limit", "verdict")}
    bar = None if entry["bar"] is None else Bar(**entry["bar"])
    return Finding(**known | {"ratio": Ratio(**entry["ratio"]), "bar": bar})


def processor_name() -> str:
    """Of this machine, where the system tells it; else its kind."""
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
