"""Where a pretrained model starts on a task: the share it solves, sampled and greedily, before training.

    python recipes/smollm2.py                                # once: gets the model
    python -m benchmarks.task_starts                         # all candidates, 100 problems each
    python -m benchmarks.task_starts words code-one-line --problems 400
    python -m benchmarks.task_starts gsm8k-short --gsm8k FOLDER   # with train.jsonl and test.jsonl

Validation problems. Reinforcement learning needs some success to begin with and room above it: a task is in
the band where 3 to 40 % of sampled responses are right. Intervals are Wilson's, 95 %. A candidate that
benchmarks/results/task_starts/starts.csv has with as many problems is not measured again.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tether.experiments.statistics import proportion_interval
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
    "gsm8k-short": ("gsm8k", {"require_boxed": False}, 200),
    "gym-sums": (
        "reasoning_gym",
        {"dataset": "chain_sum", "min_terms": 2, "max_terms": 2, "max_digits": 2},
        40,
    ),
    "gym-gcd": ("reasoning_gym", {"dataset": "gcd", "max_value": 60}, 40),
    "gym-backwards": ("reasoning_gym", {"dataset": "spell_backward", "max_word_len": 4}, 40),
    "instructions": ("custom", {"verifier": "exact"}, 40),
}
"""Name -> task, its options, longest response."""

# Of GSM8K's problems the shortest: so many calculations and words at most.
_CALCULATIONS, _WORDS = 2, 30
_NOUNS = (
    "river", "apple", "stone", "cloud", "tiger", "lamp", "bread", "horse", "green", "table", "music", "chair",
)  # fmt: skip

FIELDS = (
    "model", "candidate", "problems", "sampled_right", "greedy_right", "truncated", "mean_tokens",
)  # fmt: skip


def short_gsm8k(folder: Path, part: str) -> Iterator[dict[str, str]]:
    """GSM8K's problems of few calculations and words."""
    with (folder / f"{part}.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["answer"].count("<<") <= _CALCULATIONS and len(row["question"].split()) <= _WORDS:
                yield row


def instructions(part: str) -> Iterator[dict[str, str]]:
    """Instructions that a program can check by the text that is asked for.

    >>> next(instructions("train"))["answer"]
    'tiger, tiger, tiger, tiger'
    """
    rng, seen = random.Random(f"instructions {part}"), set()
    for number in range(4000):
        words = rng.sample(_NOUNS, 3)
        listed, count = " ".join(words), rng.randint(2, 5)
        asked, answer = [
            (f"Write the word {words[0]} {count} times, with commas between", ", ".join([words[0]] * count)),
            (f"Write these words in capital letters, with spaces between: {listed}", listed.upper()),
            (
                f"Write these words in alphabetical order, with spaces between: {listed}",
                " ".join(sorted(words)),
            ),
            (f"Write these words in reverse order, with spaces between: {listed}", " ".join(words[::-1])),
        ][number % 4]
        if asked not in seen:
            seen.add(asked)
            yield {"prompt": f"{asked}. Write nothing else.", "answer": answer}


def write_data(candidate: str, folder: Path, gsm8k: Path | None) -> dict[str, str]:
    """The files of a candidate that is read from any, and the options that name them."""
    if candidate not in ("gsm8k-short", "instructions"):
        return {}
    for part in ("train", "test"):
        if candidate == "instructions":
            rows = instructions(part)
        else:
            assert gsm8k is not None  # `main` has asked for it
            rows = short_gsm8k(gsm8k, part)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(text, encoding="utf-8")
    return {"path": str(folder)}


def measure(model_name: str, candidate: str, count: int, gsm8k: Path | None = None) -> dict[str, Any]:
    """One row of the table."""
    name, options, length = CANDIDATES[candidate]
    model, tokenizer = load_model_and_tokenizer(str(MODELS[model_name]))
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(name, **options, **write_data(candidate, Path(folder), gsm8k))
        problems = task.problems("validation", count)  # all, of a split that has fewer
    with closing(task), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16_pays()):
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
        share = int(row[name]) / asked
        interval = proportion_interval(share, asked)
        parts.append(f"{share:6.1%} [{interval.low:.1%}, {interval.high:.1%}]")
    return "  ".join([*parts, f"{int(row['truncated']) / asked:.0%} cut off, {row['mean_tokens']} tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("candidates", nargs="*", help=f"of {', '.join(CANDIDATES)}; by default all")
    parser.add_argument("--model", default="smollm2-135m-instruct", choices=list(MODELS))
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    given = parser.parse_args()
    chosen = given.candidates or [name for name in CANDIDATES if given.gsm8k or name != "gsm8k-short"]
    if unknown := [name for name in chosen if name not in CANDIDATES]:
        parser.error(f"There is no candidate {unknown[0]!r}; choose of {', '.join(CANDIDATES)}.")
    if "gsm8k-short" in chosen and given.gsm8k is None:
        parser.error("gsm8k-short needs --gsm8k FOLDER, with train.jsonl and test.jsonl")
    if not MODELS[given.model].is_dir():
        raise SystemExit(f"No model in {MODELS[given.model]}: get it with recipes/smollm2.py or gemma3.py.")
    for candidate in chosen:
        key = (given.model, candidate)
        same = [row for row in table() if (row["model"], row["candidate"]) == key]
        if not same or int(same[0]["problems"]) < given.problems:
            found = measure(given.model, candidate, given.problems, given.gsm8k)
            # Read again: the other model may have been measured meanwhile.
            write([row for row in table() if (row["model"], row["candidate"]) != key] + [found])
            print(shown(found), flush=True)
    print("\n".join(map(shown, table())))


if __name__ == "__main__":
    main()
