"""Run the sections one after the other and say which bars are met."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.bench import report, sections
from benchmarks.bench.bars import Finding
from benchmarks.bench.shapes import GPU

RESULTS = Path(__file__).parents[1] / "results" / "bench"


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    started = time.monotonic()
    devices = [torch.device(name) for name in arguments.device]
    missed: list[Finding] = []
    written: list[Path] = []
    heads = [shape for shape in GPU if not arguments.head or shape.name in arguments.head]
    command = f"python -m benchmarks.bench {' '.join(sys.argv[1:])}".strip()
    for device in devices:
        for name in arguments.only or sections.SECTIONS:
            print(f"-- {name} on {device.type}, {time.monotonic() - started:.0f} s", flush=True)
            measured = sections.SECTIONS[name](sections.Asked(device, arguments.quick, heads))
            findings = [finding for finding in measured if finding is not None]
            if arguments.quick:  # sizes that nothing was promised for
                findings = [replace(finding, bar=None) for finding in findings]
            for finding in findings:
                print(report.terminal_line(finding, device.type), flush=True)
            # After each section: what was measured is kept if a later one is interrupted.
            written = report.write(
                name, findings, device, arguments.output, command, others_stay=bool(arguments.head)
            )
            missed += [finding for finding in findings if finding.verdict(device.type) == "MISSED"]
        print("written:", *written)
    print(f"{time.monotonic() - started:.0f} s in all; bars missed: {len(missed)}")
    for finding in missed:
        print("  missed:", finding.bar.claim if finding.bar else "", "on", finding.where)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one turn: whether it runs at all")
    parser.add_argument("--only", nargs="+", choices=sections.SECTIONS, help="these sections alone")
    parser.add_argument(
        "--head", nargs="+", choices=[shape.name for shape in GPU],
        help="of a GPU's LM heads, these alone; what is known of others stays (default: all)",
    )  # fmt: skip
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument(
        "--device", nargs="+", choices=there, help="these devices alone (default: all there are)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the tables")
    arguments = parser.parse_args()
    if arguments.device is None:
        arguments.device = ["cpu"] if arguments.quick else there
    return arguments


if __name__ == "__main__":
    main()
