"""Build the sdist and the wheel, and try the wheel as a stranger would: `make wheel`.

    python tests/wheel.py                # builds into dist/
    python tests/wheel.py --tag v0.2.0   # and the version must be the tag's

The wheel is built from the sdist, and a second time from the tree: both must hold the same files. Then it is
installed into an empty environment beside torch alone, where the examples of the core's docstrings and the
core's tests run and `tether` names what an extra would bring.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
ENVIRONMENT = ROOT / "build" / "wheel-env"
PYTHON = ENVIRONMENT / "bin" / "python"

#: What torch and numpy alone carry, and tests of it that look at nothing but the installed package.
CORE = ("tether.projection", "tether.ops", "tether.losses", "tether.advantages", "tether.settings")
TESTS = (
    *("projection/test_categorical.py", "projection/test_sparse.py", "projection/test_certificate.py"),
    *("projection/test_compact.py", "ops/test_linear.py", "ops/test_trust_region.py"),
    *("losses/test_troll.py", "losses/test_every_loss.py"),
)


def main() -> None:
    """Build, compare, install and try; any step that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", help="such as v0.2.0: refuse any other version")
    wheel = build()
    check_version(wheel, parser.parse_args().tag)
    install(wheel)
    run_examples()
    try_the_command()
    run_tests()
    print(f"{wheel.relative_to(ROOT)} works beside torch alone.")


def build() -> Path:
    """The wheel made from the sdist, after one made from the tree turned out the same."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(ROOT / "build" / "from-tree"), str(ROOT))
    run(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
    (wheel,) = DIST.glob("*.whl")
    if contents(wheel) != contents(ROOT / "build" / "from-tree" / wheel.name):
        raise SystemExit("The wheel made from the sdist differs from the one made from the tree.")
    return wheel


def contents(wheel: Path) -> dict[str, str]:
    """Each file's digest; the record of digests itself aside."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if not name.endswith("/RECORD")
        }


def check_version(wheel: Path, tag: str | None) -> None:
    """The tag, the wheel, the citation and the newest section of the changelog name one version."""
    version = wheel.name.split("-")[1]
    citation = re.search(
        r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = {"the wheel": version, "CITATION.cff": citation[1].strip('"') if citation else "nothing"}
    if tag is not None:
        named["the tag"] = tag.removeprefix("v")
        if f"## {version}" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
            raise SystemExit(f"CHANGELOG.md has no section {version!r}.")
    if len(set(named.values())) > 1:
        raise SystemExit("Versions differ: " + ", ".join(f"{where} {what}" for where, what in named.items()))


def install(wheel: Path) -> None:
    """Into an empty environment, with the versions of torch and numpy that the tests have."""
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(ENVIRONMENT))
    run(
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        "constraints.txt",
        str(wheel),
        "pytest",
    )


def pip_install(*what: str) -> None:
    """Into the environment made for this."""
    run(str(PYTHON), "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", *what)


def run_examples() -> None:
    """The docstrings' examples of every module of the core; Triton's kernels are imported where it is."""
    run_pytest(
        "--doctest-modules", "--doctest-continue-on-failure", "--ignore-glob=*triton*", "--pyargs", *CORE
    )


def run_tests() -> None:
    """The core's own tests; what they compare with comes now, so that nothing before could lean on it."""
    run(
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        "constraints.txt",
        "hypothesis",
        "cvxpy",
    )
    run_pytest(
        "--noconftest",
        "--hypothesis-profile=ci",  # the same examples on every machine, and no deadline
        *(str(ROOT / "tests" / name) for name in TESTS),
        environment={"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"},
    )


def run_pytest(*what: str, environment: dict[str, str] | None = None) -> None:
    """In the environment made for this, out of sight of the repository's settings."""
    command = (str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", *what)
    run(*command, cwd=ENVIRONMENT, environment=environment)


def try_the_command() -> None:
    """`tether --version` answers; a command that needs an extra says which."""
    run(str(ENVIRONMENT / "bin" / "tether"), "--version")
    answer = subprocess.run(
        [ENVIRONMENT / "bin" / "tether", "llm", "train"], capture_output=True, text=True, check=False
    )
    if answer.returncode == 0 or "tether-rl[llm]" not in answer.stdout + answer.stderr:
        raise SystemExit(f"`tether llm train` without its extra must name it. It said:\n{answer.stderr}")


def run(*command: str, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> None:
    """A step, in sight."""
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True, cwd=cwd, env={**os.environ, **(environment or {})})


if __name__ == "__main__":
    main()
