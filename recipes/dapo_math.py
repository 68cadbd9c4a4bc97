"""Write DAPO-Math as the JSON lines that the recipes train on.

    python recipes/dapo_math.py                      # into data/dapo-math
    python recipes/dapo_math.py --out /some/folder

Downloads `open-r1/DAPO-Math-17k-Processed` (configuration "en") from the Hugging Face hub: competition
problems whose answers are integers, from DAPO (arXiv 2503.14476). A hundredth of them, by a hash of the
problem, is kept for validation and another for testing; the rest is for training. The folder appears when
it is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tether.llm.tasks.data import read_hub
from tether.llm.tasks.gsm8k import INSTRUCTION
from tether.llm.tasks.protocol import split_of

HUB_NAME, CONFIGURATION = "open-r1/DAPO-Math-17k-Processed", "en"
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "data" / "dapo-math"


def split_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, str]]]:
    """Problems with their answers by split, each problem once."""
    parts: dict[str, list[dict[str, str]]] = {"train": [], "validation": [], "test": []}
    seen = set()
    for row in rows:
        problem = str(row["prompt"]).strip()
        if problem in seen:
            continue
        seen.add(problem)
        split = split_of(problem, validation_percent=1, test_percent=1)
        parts[split].append({"prompt": f"{problem}\n\n{INSTRUCTION}", "answer": str(row["solution"]).strip()})
    return parts


def write(parts: Mapping[str, list[dict[str, str]]], out: Path) -> None:
    """Into a temporary folder beside `out`, then give it the name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for name, rows in parts.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (fresh / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        fresh.chmod(0o755)
        os.rename(fresh, out)
    except BaseException:
        shutil.rmtree(fresh)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder to write (default: %(default)s)"
    )
    out: Path = parser.parse_args().out.expanduser().resolve()
    if out.exists():
        raise SystemExit(f"{out} is there already. Delete it to make it again.")
    rows = read_hub(HUB_NAME, "train", ("prompt", "solution"), CONFIGURATION, bad_rows="skip")
    parts = split_rows(row for _, row in rows)
    write(parts, out)
    print(f"{out}: " + ", ".join(f"{len(rows)} {name}" for name, rows in parts.items()))


if __name__ == "__main__":
    main()
