r"""Whether `tether llm eval` counts right what lm-evaluation-harness does: same problems, prompts, decoding.

    python recipes/smollm2.py                               # once: gets the model
    make lm-eval-agreement DATA=folder-with-gsm8k           # an environment with both, then this script

`DATA` holds GSM8K's test.jsonl. Both sides are run as users do, by their commands, on the same problems:
greedy, float32, the same longest response, the model's own chat template around the same words.
lm-evaluation-harness gets a task file with the answer filter of its own GSM8K (the last number) and one that
reads the last \boxed{}. Prompts are compared before any answer.

Problems are asked in parts; what is done is in benchmarks/results/lm_eval/answers.jsonl, a line each, and
the command goes on after a kill. `--table` prints the table of that file again, without a model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tether.experiments.files import atomic_write_json, atomic_write_text, dump_json_lines, read_json_lines
from tether.llm.models import read_config_and_tokenizer
from tether.llm.tasks import Problem, make_task
from tether.llm.tasks.math_answers import MathVerifier, last_boxed

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
WORK = ROOT / "runs" / "lm-eval-agreement"
ANSWERS = ROOT / "benchmarks" / "results" / "lm_eval" / "answers.jsonl"

TASK = "tether_gsm8k"
FILTERS = {
    # As in lm-evaluation-harness's own gsm8k.yaml.
    "last number": {"regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)", "group_select": -1},
    "box": {"regex_pattern": r"\\boxed\{([^{}]*)\}", "group_select": -1},
}
"""How lm-evaluation-harness finds the answer in a response; Tether's counterparts are in `ours_right`."""

#: Characters of a response's end, where the answer is looked for.
_SHOWN = 24

Row = dict[str, Any]


class Asked(NamedTuple):
    """What both sides are asked, and how."""

    model: Path
    tokens: int
    batch_size: int
    work: Path
    """Holds the problems, ``test.jsonl``, and what both sides write."""

    @property
    def task_options(self) -> dict[str, str | bool]:
        """Of Tether's task: an answer without a box counts too, so that one run shows both readings."""
        return {"require_boxed": False, "path": str(self.work)}

    def settings(self) -> dict[str, Any]:
        """What changes answers."""
        return {
            "model": self.model.name, "max_response_tokens": self.tokens, "part": self.batch_size,
            "dtype": "float32",
        }  # fmt: skip


# ---------------------------------------------------------------------- asking


def ask_tether(asked: Asked) -> list[Row]:
    """The rows of `tether llm eval`, one a problem."""
    out = asked.work / "tether"
    options = [str(part) for pair in asked.task_options.items() for part in pair]
    run([
        "tether", "llm", "eval", "--model", str(asked.model), "--task", "gsm8k", "--task-options", *options,
        "--problems", str(asked.batch_size), "--samples", "0", "--max-response-tokens", str(asked.tokens),
        "--batch-size", str(asked.batch_size), "--no-token-scores", "--device", "cpu", "--threads", "1",
        "--output", str(out),
    ])  # fmt: skip
    return read_json_lines(out / "gsm8k-model.jsonl")


def ask_lm_eval(asked: Asked, problems: Sequence[Problem], ends: Sequence[str]) -> list[Row]:
    """The samples lm-evaluation-harness logs, one a problem and filter."""
    tasks, out = asked.work / "lm-eval-task", asked.work / "lm-eval"
    write_task(tasks, problems, asked.tokens, ends)
    run([
        "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={asked.model},dtype=float32",
        "--include_path", str(tasks), "--tasks", TASK, "--apply_chat_template", "--device", "cpu",
        "--batch_size", str(asked.batch_size), "--log_samples", "--output_path", str(out),
        "--use_cache", str(asked.work / "lm-eval-cache"),
    ])  # fmt: skip
    newest = max(out.glob(f"**/samples_{TASK}_*.jsonl"), key=lambda file: file.stat().st_mtime)
    return read_json_lines(newest)


def write_task(folder: Path, problems: Sequence[Problem], tokens: int, ends: Sequence[str]) -> None:
    """A task of lm-evaluation-harness: these problems in Tether's words, GSM8K's metric and filters."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": problem.prompt[0]["content"], "answer": problem.answer} for problem in problems]
    atomic_write_text(folder / "problems.jsonl", dump_json_lines(rows))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "problems.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": list(ends), "do_sample": False, "max_gen_toks": tokens},
        "num_fewshot": 0,
        "filter_list": [
            {"name": name, "filter": [{"function": "regex", **options}, {"function": "take_first"}]}
            for name, options in FILTERS.items()
        ],
        "metric_list": [
            {
                "metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
                "ignore_case": True, "ignore_punctuation": False,
                "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
            }
        ],
    }  # fmt: skip
    atomic_write_text(folder / f"{TASK}.yaml", yaml.safe_dump(task, sort_keys=False))


def run(arguments: Sequence[str]) -> None:
    """A command of this environment, in words and then in deed."""
    print("+", *arguments, flush=True)
    settings = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-m", *arguments], env={**settings, **os.environ}, stdout=subprocess.DEVNULL
    )
    if finished.returncode != 0:
        raise SystemExit(f"{arguments[0]} ended with code {finished.returncode}; the same command goes on.")


def same_prompts(problems: Sequence[Problem], samples: Sequence[Row], tokenizer: Any) -> None:
    """Stop where the two sides were not asked the same."""
    for sample in samples:
        ours = tokenizer.apply_chat_template(
            problems[sample["doc_id"]].prompt, tokenize=False, add_generation_prompt=True
        )
        theirs = sample["arguments"]["gen_args_0"]["arg_0"]
        if ours != theirs:
            raise SystemExit(
                f"Problem {sample['doc_id']} was asked in other words:\n{ours!r}\nby Tether,\n{theirs!r}\nby "
                "lm-evaluation-harness. Answers to different prompts cannot be compared."
            )


# ---------------------------------------------------------------------- comparing


def compare(ours: Sequence[Row], samples: Sequence[Row]) -> list[Row]:
    """One row a problem: both verdicts, both responses where they differ, and what each side read.

    A response of lm-evaluation-harness that is not Tether's own is judged by Tether too, so that differences
    of the text and of the judge are told apart.
    """
    theirs: dict[int, dict[str, Row]] = {}
    for sample in samples:
        theirs.setdefault(sample["doc_id"], {})[sample["filter"]] = sample
    if sorted(theirs) != [row["problem"] for row in ours]:
        raise SystemExit(f"Tether answered {len(ours)} problems, lm-evaluation-harness {len(theirs)}.")
    rows = []
    with MathVerifier(require_boxed=False) as verifier:
        for row in ours:
            said, judged = row["greedy"], theirs[row["problem"]]
            text = judged["box"]["resps"][0][0]
            found: Row = {
                "problem": row["problem"], "reference": row["reference"], "text": said["text"],
                "tether": {"correct": said["correct"], "boxed": bool(said["parts"]["boxed"])},
                "lm_eval": {name: bool(judged[name]["exact_match"]) for name in FILTERS},
                "lm_eval_read": {name: judged[name]["filtered_resps"][0] for name in FILTERS},
            }  # fmt: skip
            if text != said["text"]:
                found["lm_eval_text"] = text
                found["tether_on_lm_eval_text"] = verifier.check(text, row["reference"])._asdict()
            rows.append(found)
    return rows


def ours_right(row: Row, reading: str, which: str = "tether") -> bool:
    """Tether's verdict: "last number" is `require_boxed: false`, "box" is its default."""
    verdict = row[which]
    return bool(verdict["correct"] and (reading == "last number" or verdict["boxed"]))


def reason(row: Row, reading: str) -> str:
    """Why the two sides disagree about a problem."""
    read, answer = row["lm_eval_read"][reading], row["reference"]
    if (
        "lm_eval_text" in row
        and ours_right(row, reading, "tether_on_lm_eval_text") == (row["lm_eval"][reading])
    ):
        pairs = zip(row["text"], row["lm_eval_text"], strict=False)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), "the end")
        return f"another response from character {place} on, judged alike"
    box = last_boxed(row.get("lm_eval_text", row["text"]))
    where = "there is no box" if box is None else f"the last box holds {box!r}"
    if row["lm_eval"][reading]:
        end = row.get("lm_eval_text", row["text"])[-_SHOWN:]
        return f"lm-evaluation-harness read {read!r}; Tether reads no {answer} at the end of {end!r}, {where}"
    if _number(read) is not None and _number(read) == _number(answer):
        return f"the same number as {answer} in other writing: lm-evaluation-harness read {read!r}, {where}"
    return f"for {answer} lm-evaluation-harness read {read!r}; {where}"


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace("$", "").strip().rstrip("."))
    except ValueError:
        return None


def table(rows: Sequence[Row]) -> str:
    """What both sides count right, and every problem on which they disagree."""
    alike = sum("lm_eval_text" not in row for row in rows)
    lines = [
        f"{len(rows)} problems; the same response to {alike}, another to {len(rows) - alike}.",
        "",
        "| answer read from | right by Tether | right by lm-evaluation-harness | by both | agreement |",
        "|---|---|---|---|---|",
    ]
    disputed = []
    for reading in FILTERS:
        pairs = [(ours_right(row, reading), row["lm_eval"][reading]) for row in rows]
        ours, theirs, both = (sum(map(bool, each)) for each in (*zip(*pairs, strict=True), map(all, pairs)))
        same = sum(a == b for a, b in pairs)
        lines.append(f"| {reading} | {ours} | {theirs} | {both} | {same} of {len(rows)} |")
        disputed += [
            f"| {row['problem']} | {reading} | {'Tether' if a else 'lm-evaluation-harness'} | "
            f"{reason(row, reading)} |"
            for row, (a, b) in zip(rows, pairs, strict=True)
            if a != b
        ]
    if disputed:
        lines += ["", "| problem | answer read from | right only by | why |", "|---|---|---|---|", *disputed]
    return "\n".join(lines)


# ---------------------------------------------------------------------- the command


def measure(asked: Asked) -> list[Row]:
    """Ask both about one part, check that they were asked the same, compare."""
    for name in ("tether", "lm-eval-task", "lm-eval"):
        (asked.work / name).mkdir(parents=True, exist_ok=True)
    _, tokenizer = read_config_and_tokenizer(asked.model)
    problems = make_task("gsm8k", **asked.task_options).problems("test", asked.batch_size, 0)
    ours = ask_tether(asked)
    samples = ask_lm_eval(asked, problems, [tokenizer.eos_token])
    same_prompts(problems, samples, tokenizer)
    return compare(ours, samples)


def go_on(model: Path, data: Path, problems: int, tokens: int, part: int, work: Path, answers: Path) -> None:
    """Measure the parts that are missing in `answers`; the problems are a random choice, always the same."""
    rows = read_json_lines(answers)
    chosen = read_json_lines(data / "test.jsonl")
    random.Random(0).shuffle(chosen)
    for start in range(len(rows), problems, part):
        asked = Asked(model, tokens, part, work / f"{start:04d}-{tokens}")
        claim(answers, asked.settings())
        asked.work.mkdir(parents=True, exist_ok=True)
        atomic_write_text(asked.work / "test.jsonl", dump_json_lines(chosen[start : start + part]))
        rows += [{**row, "problem": start + row["problem"]} for row in measure(asked)]
        atomic_write_text(answers, dump_json_lines(rows))
        print(f"{len(rows)} of {problems}", flush=True)


def claim(answers: Path, settings: dict[str, Any]) -> None:
    """Keep answers to one question apart from answers to another."""
    file = answers.with_suffix(".settings.json")
    if answers.exists() and json.loads(file.read_text()) != settings:
        raise SystemExit(f"{answers} holds another measurement. Delete it, or give another --answers.")
    answers.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_json(file, settings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder with GSM8K's test.jsonl")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="longest response (default: %(default)s)")
    parser.add_argument("--part", type=int, default=25, help="problems at a time (default: %(default)s)")
    parser.add_argument(
        "--work", type=Path, default=WORK, help="what both sides write (default: %(default)s)"
    )
    parser.add_argument("--answers", type=Path, default=ANSWERS, help="outcomes (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="print the table of --answers again")
    given = parser.parse_args()
    if not given.table:
        if not given.model.is_dir():
            raise SystemExit(f"There is no model in {given.model}. Get it with: python recipes/smollm2.py")
        if given.data is None or not (given.data / "test.jsonl").is_file():
            raise SystemExit("Give --data, a folder with test.jsonl of github.com/openai/grade-school-math.")
        if given.problems % given.part:
            raise SystemExit(f"--problems {given.problems} is no multiple of --part {given.part}.")
        go_on(
            given.model.resolve(), given.data, given.problems, given.tokens, given.part,
            given.work.resolve(), given.answers,
        )  # fmt: skip
    print(table(read_json_lines(given.answers)))


if __name__ == "__main__":
    main()
