"""The plug-ins' tests over the oldest and newest versions people have: `make test-matrix`.

    python tests/matrix.py                  # every environment, one after another
    python tests/matrix.py newest        # one of them
    python tests/matrix.py --table          # only write the table again, from what was found last

Each environment is of its own, `.venv-matrix-<name>`, made once and brought up to date on each call: those
called newest take whatever the package index has. In every one torch is the version of constraints.txt. What
ran goes to benchmarks/results/versions/matrix.json, and from there into the table of docs/versions.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions" / "matrix.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- made by make test-matrix: begin -->\n", "<!-- made by make test-matrix: end -->\n"

#: Minutes, not the whole suite: what touches the other packages most, and the core under another Python.
CORE = (
    "tests/projection/test_certificate.py",
    "tests/projection/test_sparse.py",
    "tests/losses/test_troll.py",
)
TRL = (
    "tests/integrations/test_trl_seam.py",
    "tests/integrations/test_trl_identity.py",
    "tests/integrations/test_trl_loss.py",
    "tests/integrations/test_sparse_head.py",
)
TRACKERS = ("tests/experiments/test_trackers.py",)
VERL = ("tests/verl/test_verl_contract.py", "tests/verl/test_verl_losses.py")


@dataclass(frozen=True)
class Environment:
    """A Python, the packages whose versions matter, and the tests that run beside them."""

    python: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    extras: str = "llm,test"
    constraints: str = "constraints.txt"


ENVIRONMENTS = {
    "oldest": Environment("3.11", ("trl==1.14.0", "transformers==5.9.0"), (*CORE, *TRL)),
    "middle": Environment("3.12", ("trl==1.15.0", "transformers==5.16.1"), (*CORE, *TRL)),
    "newest": Environment(
        "3.13", ("trl", "transformers", "trackio", "wandb"), (*CORE, *TRL, *TRACKERS), constraints=""
    ),
    "verl-oldest": Environment("3.11", ("verl==0.9.0",), VERL, "verl,test", "constraints-verl.txt"),
    "verl-newest": Environment("3.11", ("verl",), VERL, "verl,test", "constraints-verl.txt"),
}

#: Whose versions are told.
TOLD = ("torch", "trl", "transformers", "verl", "accelerate", "datasets", "peft", "numpy", "trackio", "wandb")


def main() -> None:
    """Make, run, write down; ends with an error where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="environment", help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--table", action="store_true", help="write the table from what was found last")
    asked = parser.parse_args()
    unknown = set(asked.names) - set(ENVIRONMENTS)
    if unknown:
        raise SystemExit(f"No environment {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}.")
    if not asked.table:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        for name in asked.names or ENVIRONMENTS:
            python = make(name, ENVIRONMENTS[name])
            ran = {name: run(name, ENVIRONMENTS[name], python)}
            # Read now, for another call may have written what it found.
            RESULTS.write_text(json.dumps(read() | ran, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    found = read()
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    failed = [name for name in asked.names or found if found[name]["failed"]]
    if failed:
        raise SystemExit(f"Tests failed in {', '.join(failed)}.")


def read() -> dict[str, Any]:
    """What was found last, by environment."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    return found


def interpreter(version: str) -> str:
    """A Python of that version: the one that runs this, one on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]
    ask = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    for candidate in candidates:
        if candidate is None:
            continue
        answer = subprocess.run([candidate, "-c", ask], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return str(candidate)
    raise SystemExit(f"No Python {version} found. Install one, or name the environments that can run here.")


def make(name: str, environment: Environment) -> Path:
    """The environment, with the newest of what is not pinned."""
    folder = ROOT / f".venv-matrix-{name}"
    python = folder / "bin" / "python"
    if not python.is_file():
        step(interpreter(environment.python), "-m", "venv", str(folder))
    limits = folder / "constraints.txt"
    limits.write_text(constraints(environment), encoding="utf-8")
    step(
        str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile",
        "--upgrade", "--constraint", str(limits), "--editable", f"{ROOT}[{environment.extras}]",
        *environment.packages,
    )  # fmt: skip
    return python


def constraints(environment: Environment) -> str:
    """torch's version for all; where an environment is pinned, those of the packages it does not name too."""
    own = {re.split(r"[=<>]", package)[0].lower() for package in environment.packages}
    if own & {"transformers"}:
        own |= {"huggingface_hub", "tokenizers"}  # which come with it
    file = ROOT / (environment.constraints or "constraints.txt")
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if "==" in line]
    kept = [
        line
        for line in lines
        if line.startswith("torch==") or (environment.constraints and line.split("==")[0].lower() not in own)
    ]
    return "\n".join(kept) + "\n"


def run(name: str, environment: Environment, python: Path) -> dict[str, Any]:
    """What the tests came to, and the versions they ran with."""
    report = ROOT / f".venv-matrix-{name}" / "report.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    command = [
        str(python), "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", "-m", "not slow",
        "-o", "addopts=--strict-markers --timeout=600", f"--junit-xml={report}",
        # A version above the tested range is what is asked about here.
        "-o", "filterwarnings=error::tether.errors.TetherWarning\ndefault:.*nobody has trained with it",
        *environment.tests,
    ]  # fmt: skip
    print("+", " ".join(command), flush=True)
    subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if not report.is_file():
        raise SystemExit(f"{name}: pytest did not come to run a test.")
    suite = ElementTree.parse(report).getroot()[0]
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {
        "python": step(str(python), "-c", "import platform; print(platform.python_version())").strip(),
        "versions": versions(python),
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": skipped(suite),
        "seconds": round(time.monotonic() - started),
    }


def skipped(suite: ElementTree.Element) -> dict[str, int]:
    """How many tests were left out for which reason."""
    reasons: dict[str, int] = {}
    for mark in suite.iter("skipped"):
        reason = mark.get("message", "").removeprefix("Skipped: ")
        reasons[reason] = reasons.get(reason, 0) + 1
    return reasons


def versions(python: Path) -> dict[str, str]:
    """Of the packages that matter, without the build's suffix."""
    ask = (
        "import importlib.metadata as m, importlib.util as u, json; "
        f"print(json.dumps({{name: m.version(name) for name in {TOLD} if u.find_spec(name)}}))"
    )
    found = json.loads(step(str(python), "-c", ask))
    return {name: version.split("+")[0] for name, version in found.items()}


def with_table(page: str, found: dict[str, Any]) -> str:
    """The page with the table of what was found."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(found) + END + rest.split(END)[1]


def table(found: dict[str, Any]) -> str:
    """A row an environment."""
    rows = [
        "| environment | Python | torch | TRL | transformers | verl | passed | failed | skipped |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ENVIRONMENTS:
        if name not in found:
            continue
        one = found[name]
        of = [one["versions"].get(package, "") for package in ("torch", "trl", "transformers", "verl")]
        cells = [f"`{name}`", one["python"], *of, one["passed"], one["failed"], sum(one["skipped"].values())]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows) + "\n"


def step(*command: str) -> str:
    """A step, in sight; its output."""
    print("+", " ".join(command), flush=True)
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
