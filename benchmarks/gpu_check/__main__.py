"""Run the pieces, each in a process of its own, and write the page."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import benchmarks.gpu_check
import torch
from benchmarks.gpu_check.outcome import NotHere, Outcome, write
from benchmarks.gpu_check.pieces import PIECES, ROOT
from benchmarks.gpu_check.plan import make_plan

RESULTS = ROOT / "benchmarks" / "results" / "gpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a bar is missed or a piece fails, 2 without a GPU."""
    given = _read(arguments)
    if given.piece is not None:
        _run_and_write(given.piece, given.dry_run, given.model, given.output)
        return 0
    if not given.dry_run and not torch.cuda.is_available():
        print(
            f"gpu-check needs a CUDA device, and torch {torch.__version__} sees none here. On a machine with "
            "one, install a torch built for CUDA. For the same code on a CPU: python -m benchmarks.gpu_check "
            "--dry-run",
            file=sys.stderr,
        )
        return 2
    if given.dry_run:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton asks when it is imported
    outcomes = []
    for name in given.only or PIECES:
        print(f"-- {name}", flush=True)
        # The dry run is one process: imports would take longer than the pieces.
        if given.dry_run:
            outcome = run_piece(name, dry=True, model=given.model)
        else:
            outcome = run_apart(name, given.model, 60 * PIECES[name].minutes)
        outcomes.append(outcome)
        print(f"   {outcome.status}, {outcome.seconds:.0f} s. {outcome.words}", flush=True)
        for figure in outcome.figures:
            print("   " + "  ".join(figure.cells), flush=True)
    command = f"python -m benchmarks.gpu_check {' '.join(sys.argv[1:] if arguments is None else arguments)}"
    print("written:", *write(given.output or RESULTS, machine(given.dry_run), outcomes, command.strip()))
    bad = [outcome.piece for outcome in outcomes if not outcome.good]
    print(f"failed or below a bar: {', '.join(bad) or 'nothing'}")
    return int(bool(bad))


def run_piece(name: str, *, dry: bool, model: str | None) -> Outcome:
    """In this process; whatever it raises is what is reported."""
    began = time.monotonic()
    try:
        figures = tuple(PIECES[name].run(make_plan(dry=dry, model=model)))
    except NotHere as reason:
        return Outcome(name, "not run", time.monotonic() - began, words=str(reason))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported, and the exit status tells
        return Outcome(name, "failed", time.monotonic() - began, words=f"{type(error).__name__}: {error}")
    return Outcome(name, "ran", time.monotonic() - began, figures)


def run_apart(name: str, model: str | None, seconds: float, *, dry: bool = False) -> Outcome:
    """In a process of its own, so that a crash, a hang or a lost device is this piece's alone."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--piece", name, "--output", str(target)]
        command += [*(["--model", model] if model else []), *(["--dry-run"] if dry else [])]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        with (Path(folder) / "words.txt").open("w+", encoding="utf-8") as words:
            piece = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True,
                stdout=words, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                code = piece.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                return Outcome(
                    name, "failed", time.monotonic() - began, words=f"not done after {seconds:g} s"
                )
            finally:
                _end(piece)
            said = (words.seek(0), words.read())[1]
        if not target.exists():
            ending = f"its process ended with {code}: {said[-1500:]}"
            return Outcome(name, "failed", time.monotonic() - began, words=ending)
        return Outcome.read(json.loads(target.read_text()))


def _end(piece: subprocess.Popen[bytes]) -> None:
    """It, and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(piece.pid, signal.SIGKILL)
    piece.wait()


def _run_and_write(name: str, dry: bool, model: str | None, target: Path) -> None:
    target.write_text(json.dumps(run_piece(name, dry=dry, model=model).as_json()))


def machine(dry: bool) -> dict[str, str]:
    """What the figures were measured on."""
    found = {"device": "CPU, dry run", "GPUs": "0"}
    if not dry:
        properties = torch.cuda.get_device_properties(0)
        found = {
            "device": properties.name,
            "GPUs": f"{torch.cuda.device_count()}, {properties.total_memory / 2**30:.0f} GiB each",
            "compute capability": f"{properties.major}.{properties.minor}",
            "CUDA": str(torch.version.cuda),
        }
    packages = {
        name: importlib.metadata.version(name)
        for name in ("torch", "triton", "transformers", "trl", "vllm")
        if importlib.util.find_spec(name) is not None
    }
    return {
        **found,
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
    }


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=benchmarks.gpu_check.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU: whether it runs at all")
    parser.add_argument("--only", nargs="+", choices=PIECES, help="these pieces alone")
    parser.add_argument("--output", type=Path, help="folder for the page (default: benchmarks/results/gpu)")
    parser.add_argument("--model", help="to train: a folder or a hub's name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--piece", choices=PIECES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
