"""Write a data set as the Parquet files verl trains on.

    .venv-verl/bin/python recipes/verl/prepare_data.py gsm8k --output data/gsm8k
    .venv-verl/bin/python recipes/verl/prepare_data.py dapo-math --output data/dapo-math

GSM8K gets the instruction whose answers verl's own scorer reads (``#### <number>``). DAPO-Math-17k comes in
verl's format; its file repeats each of its 17,000 problems about a hundred times, and each is kept once.
AIME 2024, in the same format, is its test set.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def gsm8k_row(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """One question in verl's columns; the number after #### is the ground truth."""
    found = re.search(r"####\s*(-?[\d.,]+)\s*$", row["answer"])
    if found is None:
        raise ValueError(
            f"row {index} of {split}: the answer does not end in '#### <number>': {row['answer']!r}"
        )
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": found[1].replace(",", "")},
        "extra_info": {"split": split, "index": index},
    }


def unique_problems(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each problem once, by the text of its prompt, in the order of the file."""
    seen: dict[str, dict[str, Any]] = {}
    for row in rows:
        seen.setdefault(row["prompt"][-1]["content"], row)
    return list(seen.values())


def _gsm8k() -> dict[str, list[dict[str, Any]]]:
    from datasets import load_dataset

    data = load_dataset("openai/gsm8k", "main")
    return {
        split: [gsm8k_row(row, split, i) for i, row in enumerate(data[split])] for split in ("train", "test")
    }


def _dapo_math() -> dict[str, list[dict[str, Any]]]:
    from datasets import load_dataset

    return {
        "train": unique_problems(load_dataset("BytedTsinghua-SIA/DAPO-Math-17k", split="train")),
        "test": unique_problems(load_dataset("BytedTsinghua-SIA/AIME-2024", split="train")),
    }


SOURCES: dict[str, Callable[[], dict[str, list[dict[str, Any]]]]] = {
    "gsm8k": _gsm8k,
    "dapo-math": _dapo_math,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("--output", type=Path, required=True, help="folder of the two files")
    arguments = parser.parse_args()
    from datasets import Dataset

    arguments.output.mkdir(parents=True, exist_ok=True)
    for split, rows in SOURCES[arguments.source]().items():
        path = arguments.output / f"{split}.parquet"
        part = path.with_suffix(".part")
        Dataset.from_list(rows).to_parquet(str(part))
        part.rename(path)
        print(f"{path}: {len(rows)} problems")


if __name__ == "__main__":
    main()
