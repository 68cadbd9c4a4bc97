"""Long robot runs that stopped half way, kept with the repository so that another machine goes on with them.

    python benchmarks/carried_runs.py pack long
    python benchmarks/carried_runs.py unpack long

`pack` puts every run of benchmarks/robots/long.yaml under runs/robots/long that has trained for an hour and
has not come to its end into an archive of its own under benchmarks/results/robots/carried: what it measured
and its latest checkpoint, a megabyte or two. Archives of runs that have ended since are removed. `unpack`
puts those back that have no folder yet; `make robots-long` begins with it. Pack when nothing trains.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

from tether.episodic.options import TrainConfig
from tether.episodic.queue import read_queue
from tether.experiments import RunFolder
from tether.experiments.files import atomic_write_bytes, last_measurement
from tether.experiments.runs import METRICS_FILE

ROOT = Path(__file__).parent.parent
CARRIED = ROOT / "benchmarks" / "results" / "robots" / "carried"
WORTH_CARRYING_S = 3600.0


def pack(runs: list[TrainConfig], output: Path, carried: Path) -> list[Path]:
    """Archive those of these runs in `output` that have not ended; remove the archives of those that have."""
    kept = []
    for run in runs:
        archive = _archive(run, output, carried)
        if not (run.folder() / "config.json").is_file():
            continue
        folder = RunFolder.open(run.folder())
        checkpoint, last = folder.latest_checkpoint(), last_measurement(folder.path / METRICS_FILE)
        if checkpoint is None or checkpoint.step >= run.end():
            archive.unlink(missing_ok=True)
        elif last is not None and last["time_s"] >= WORTH_CARRYING_S:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w:xz") as tar:
                for path in (*sorted(folder.path.glob("*.json*")), checkpoint.path):
                    tar.add(path, path.relative_to(folder.path))
            kept.append(atomic_write_bytes(archive, packed.getvalue()))
    return kept


def unpack(runs: list[TrainConfig], output: Path, carried: Path) -> list[Path]:
    """Put archived runs back where there is no folder of theirs."""
    restored = []
    for run in runs:
        archive = _archive(run, output, carried)
        if archive.is_file() and not run.folder().exists():
            part = run.folder().with_name(f"{run.folder().name}.part")
            with tarfile.open(archive) as tar:
                tar.extractall(part, filter="data")
            restored.append(part.rename(run.folder()))
    return restored


def _archive(run: TrainConfig, output: Path, carried: Path) -> Path:
    name = run.folder().relative_to(output)
    return carried / name.with_name(name.name + ".tar.xz")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("queue", help="long, of benchmarks/robots/long.yaml")
    options = parser.parse_args()
    output = ROOT / "runs" / "robots" / options.queue
    studies = read_queue(ROOT / "benchmarks" / "robots" / f"{options.queue}.yaml")
    runs = [run for study in studies for run in study.runs(output)]
    for path in (pack if options.action == "pack" else unpack)(runs, output, CARRIED / options.queue):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
