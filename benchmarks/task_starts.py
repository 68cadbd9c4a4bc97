"""Where a pretrained model starts on a task: the share it solves, sampled and greedily, before training.

    python recipes/smollm2.py                                # once: gets the model
    python -m benchmarks.task_starts                         # all candidates, 100 problems each
    python -m benchmarks.task_starts words code --problems 400

Validation problems. Reinforcement learning needs some success to begin with and room above it: a task is in
the band where 3 to 40 % of sampled responses are right. Intervals are Wilson's, 95 %. A candidate that
benchmarks/results/task_starts/starts.csv has with as many problems is not measured again.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from tether.llm.generate import answer_and_judge
from tether.llm.models import load_model_and_tokenizer
from tether.llm.precision import bfloat16_pays
from tether.llm.tasks import make_task
from tether.llm.tasks.training import closing

ROOT = Path(__file__).resolve().parents[1]
MODELS = {name: ROOT / "models" / name for name in ("smollm2-135m-instruct", "gemma-3-270m")}
RESULTS = Path(__file__).parent / "results" / "task_starts" / "starts.csv"

CANDIDATES: dict[str, tuple[str, dict[str, Any], int]] = {
    "words": ("word_problems", {}, 40),
    "words-to-10": ("word_problems", {"largest": 10}, 40),
    "words-all": ("word_problems", {"operations": "+-*/"}, 40),
    "words-two-steps": ("word_problems", {"steps": 2}, 60),
    "words-shown": ("word_problems", {"examples": 3, "instruction": ""}, 20),
    "words-all-shown": ("word_problems", {"examples": 3, "instruction": "", "operations": "+-*/"}, 20),
    "words-two-steps-shown": ("word_problems", {"examples": 3, "instruction": "", "steps": 2}, 30),
    "code-one-line": ("code", {"steps": 0}, 64),
    "code-one-line-shown": ("code", {"steps": 0, "examples": 4, "instruction": ""}, 40),
    "code-one-step": ("code", {"steps": 1}, 128),
}
"""Name -> task, its options, longest response."""

FIELDS = (
    "model", "candidate", "problems", "sampled_right", "greedy_right", "truncated", "mean_tokens",
)  # fmt: skip


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share.

    >>> [round(end, 3) for end in wilson(6, 100)]
    [0.028, 0.125]
    """
    share, weight = right / asked, z * z / asked
    middle = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / asked + weight / (4 * asked)) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


def measure(model_name: str, candidate: str, count: int) -> dict[str, Any]:
    """One row of the table."""
    name, options, length = CANDIDATES[candidate]
    model, tokenizer = load_model_and_tokenizer(str(MODELS[model_name]))
    task = make_task(name, **options)
    with closing(task), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16_pays()):
        problems = task.problems("validation", count)  # all, of a split that has fewer
        sampled, greedy = (
            answer_and_judge(
                model, tokenizer, task, problems, max_response_tokens=length, temperature=temperature,
                batch_size=64, seed=0, compact=True,
            )
            for temperature in (1.0, None)
        )  # fmt: skip
    return {
        "model": model_name, "candidate": candidate, "problems": len(problems),
        "sampled_right": sum(verdict.correct for _, verdict in sampled),
        "greedy_right": sum(verdict.correct for _, verdict in greedy),
        "truncated": sum(response.truncated for response, _ in sampled),
        "mean_tokens": round(statistics.fmean(len(response.ids) for response, _ in sampled), 1),
    }  # fmt: skip


def table() -> list[dict[str, Any]]:
    """What is measured already."""
    if not RESULTS.is_file():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[dict[str, Any]]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def shown(row: dict[str, Any]) -> str:
    """A line of the printed table."""
    asked = int(row["problems"])
    parts = [f"{row['model']:24}{row['candidate']:18}{asked:5}"]
    for name in ("sampled_right", "greedy_right"):
        low, high = wilson(int(row[name]), asked)
        parts.append(f"{int(row[name]) / asked:6.1%} [{low:.1%}, {high:.1%}]")
    return "  ".join([*parts, f"{int(row['truncated']) / asked:.0%} cut off, {row['mean_tokens']} tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("candidates", nargs="*", help=f"of {', '.join(CANDIDATES)}; by default all")
    parser.add_argument("--model", default="smollm2-135m-instruct", choices=list(MODELS))
    parser.add_argument("--problems", type=int, default=100)
    given = parser.parse_args()
    if not MODELS[given.model].is_dir():
        raise SystemExit(f"No model in {MODELS[given.model]}: get it with recipes/smollm2.py or gemma3.py.")
    rows = table()
    for candidate in given.candidates or CANDIDATES:
        same = [row for row in rows if (row["model"], row["candidate"]) == (given.model, candidate)]
        if not same or int(same[0]["problems"]) < given.problems:
            found = measure(given.model, candidate, given.problems)
            rows = [row for row in rows if row not in same] + [found]
            write(rows)
            print(shown(found), flush=True)
    print("\n".join(map(shown, rows)))


if __name__ == "__main__":
    main()
