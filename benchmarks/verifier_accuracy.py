"""How often reference answers verify against themselves, and perturbed ones do not.

    python benchmarks/verifier_accuracy.py --gsm8k FOLDER --math FOLDER

The folders hold GSM8K's and MATH's JSONL files, see docs/tasks.md. Every reference answer of GSM8K (train and
test), MATH-500, AMC and AIME is given to its task in four surface forms. 200 answers of GSM8K and 200 of
MATH-500 are changed in a way that changes their value, and must be rejected. Writes
benchmarks/results/verifier/accuracy.json and exits with 1 if anything was judged wrongly.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from tether.llm.tasks import GSM8KTask, MathTask, Split, Task
from tether.llm.tasks.training import verify_all

RESULTS = Path(__file__).parent / "results" / "verifier"
PERTURBED = 200

FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda answer: answer,
    "boxed": lambda answer: f"\\boxed{{{answer}}}",
    "with text": lambda answer: (
        f"First we add the 3 parts. So the answer is $\\boxed{{{answer}}}$, as asked."
    ),
    "boxed twice": lambda answer: f"Is it \\boxed{{12345}}? No: after checking, it is \\boxed{{ {answer} }}.",
}


@dataclass
class Count:
    """How one set of answers fared."""

    answers: int = 0
    forms: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORMS, 0))
    perturbed: int = 0
    rejected: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def perfect(self) -> bool:
        return not self.failures


def answers_of(task: Task, splits: tuple[Split, ...]) -> list[str]:
    return [problem.answer for split in splits for problem in task.problems(split)]


def accept(count: Count, strict: Task, lenient: Task, answers: list[str]) -> None:
    """Every answer in every form; a bare answer counts only for the task that needs no box."""
    distinct = sorted(set(answers))
    judged: dict[str, dict[str, bool]] = {}
    for name, form in FORMS.items():
        task = lenient if name == "plain" else strict
        verdicts = verify_all(task, [form(answer) for answer in distinct], distinct)
        judged[name] = {answer: verdict.correct for answer, verdict in zip(distinct, verdicts, strict=True)}
    for answer in answers:
        count.answers += 1
        for name, correct in judged.items():
            count.forms[name] += correct[answer]
            if not correct[answer]:
                count.failures.append(f"rejected {name}: {answer}")


def reject(count: Count, strict: Task, lenient: Task, answers: list[str], rng: random.Random) -> None:
    """Changed answers, boxed and plain; one that is accepted in either form counts as accepted."""
    chosen = rng.sample(answers, PERTURBED)
    changed = [perturb(answer, rng) for answer in chosen]
    boxed = verify_all(strict, [FORMS["with text"](text) for text in changed], chosen)
    plain = verify_all(lenient, changed, chosen)
    for text, answer, *verdicts in zip(changed, chosen, boxed, plain, strict=True):
        accepted = any(verdict.correct for verdict in verdicts)
        count.perturbed += 1
        count.rejected += not accepted
        if accepted:
            count.failures.append(f"accepted {text} for {answer}")


def perturb(answer: str, rng: random.Random) -> str:
    """Change what an answer means: one of its numbers by 1 to 9, or a word of it."""
    numbers = list(re.finditer(r"\d+", answer))
    if numbers:
        chosen = rng.choice(numbers)
        value = str(int(chosen[0]) + rng.randint(1, 9)).zfill(len(chosen[0]))
        return answer[: chosen.start()] + value + answer[chosen.end() :]
    words = list(re.finditer(r"(?<![\\A-Za-z])[A-Za-z]+", answer.replace("\\text", "     ")))
    if words:
        chosen = rng.choice(words)
        swapped = {"even": "odd", "A": "B", "B": "C", "C": "D", "D": "E", "E": "A"}.get(chosen[0], "Zoe")
        return answer[: chosen.start()] + swapped + answer[chosen.end() :]
    return f"{answer} + 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--math", type=Path, required=True, help="folder with MATH's files")
    arguments = parser.parse_args()
    rng = random.Random(0)
    sets: dict[str, tuple[Task, Task, tuple[Split, ...], bool]] = {
        "gsm8k": (
            GSM8KTask(arguments.gsm8k),
            GSM8KTask(arguments.gsm8k, require_boxed=False),
            get_args(Split),
            True,
        )
    }
    for name, benchmark, perturbed in (
        ("math500", "math500", True),
        ("amc", "amc", False),
        ("aime", "aime", False),
    ):
        options: dict[str, Any] = {"path": arguments.math, "benchmark": benchmark}
        sets[name] = MathTask(**options), MathTask(**options, require_boxed=False), ("test",), perturbed
    results: dict[str, Any] = {}
    for name, (strict, lenient, splits, perturbed) in sets.items():
        count, started = Count(), time.perf_counter()
        answers = answers_of(strict, splits)
        accept(count, strict, lenient, answers)
        if perturbed:
            reject(count, strict, lenient, answers, rng)
        count.seconds = round(time.perf_counter() - started, 1)
        results[name] = vars(count)
        forms = ", ".join(f"{form} {right}/{count.answers}" for form, right in count.forms.items())
        print(f"{name}: {forms}; rejected {count.rejected}/{count.perturbed} perturbed; {count.seconds} s")
        for failure in count.failures:
            print(f"  {failure}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "accuracy.json"
    file.with_suffix(".part").write_text(
        json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    file.with_suffix(".part").replace(file)
    sys.exit(any(result["failures"] for result in results.values()))


if __name__ == "__main__":
    main()
