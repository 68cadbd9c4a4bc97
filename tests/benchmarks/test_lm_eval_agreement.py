"""Beside lm-evaluation-harness: what is asked, what counts as agreement, and which reason is given."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import load_script
from tether.llm.tasks import make_task

agreement = load_script("benchmarks/lm_eval_agreement.py")


def tether_row(problem: int, text: str, reference: str) -> dict[str, Any]:
    """As `tether llm eval` keeps it, judged by the task."""
    with_task = make_task("gsm8k", require_boxed=False)
    verdict = with_task.verify(text, reference)
    with_task.close()
    said = {"text": text, "correct": verdict.correct, "parts": dict(verdict.parts)}
    return {"problem": problem, "reference": reference, "greedy": said, "samples": []}


def samples(problem: int, text: str, read: dict[str, tuple[str, bool]]) -> list[dict[str, Any]]:
    """As lm-evaluation-harness logs them: one a filter."""
    return [
        {
            "doc_id": problem, "filter": name, "resps": [[text]], "filtered_resps": [found],
            "exact_match": float(right),
        }
        for name, (found, right) in read.items()
    ]  # fmt: skip


CASES = [
    # text, what the harness said, reference, what it read in the last number and in the box
    (r"so \boxed{18}", r"so \boxed{18}", "18", ("18", True), ("18", True)),
    ("so it is 18.00", "so it is 18.00", "18", ("18.00", False), ("[invalid]", False)),
    (r"\boxed{5} of 7", r"\boxed{5} of 7", "5", ("7", False), ("5", True)),
    ("it is 4", "it is 3", "4", ("3", False), ("[invalid]", False)),
    ("so 1200 * 6 = ", "so 1200 * 6 = ", "6", ("6", True), ("[invalid]", False)),
]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    ours = [tether_row(place, text, answer) for place, (text, _, answer, *_) in enumerate(CASES)]
    theirs = [
        sample
        for place, (_, text, _, number, box) in enumerate(CASES)
        for sample in samples(place, text, {"last number": number, "box": box})
    ]
    found: list[dict[str, Any]] = agreement.compare(ours, theirs)
    return found


def test_right_answers_are_counted_by_reading(rows: list[dict[str, Any]]) -> None:
    printed = agreement.table(rows).splitlines()
    assert printed[0] == "5 problems; the same response to 4, another to 1."
    assert "| last number | 4 | 2 | 1 | 1 of 5 |" in printed
    assert "| box | 2 | 2 | 2 | 5 of 5 |" in printed


def test_each_difference_has_its_reason(rows: list[dict[str, Any]]) -> None:
    writing, box, response, cut = (agreement.reason(row, "last number") for row in rows[1:])
    assert writing.startswith("the same number as 18 in other writing: lm-evaluation-harness read '18.00'")
    assert box == "for 5 lm-evaluation-harness read '7'; the last box holds '5'"
    assert response == "another response from character 6 on, judged alike"
    assert cut == (
        "lm-evaluation-harness read '6'; Tether reads no 6 at the end of 'so 1200 * 6 = ', there is no box"
    )
    assert agreement.table(rows).count("| Tether |") == 3


def test_answers_to_other_problems_are_no_comparison(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(SystemExit, match="Tether answered 1 problems, lm-evaluation-harness 0"):
        agreement.compare([tether_row(0, "4", "4")], [])


def test_other_words_are_refused() -> None:
    class Template:
        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            return f"<user>{messages[0]['content']}"

    [problem, *_] = make_task("code").problems("test", 1, 0)
    sample = {"doc_id": 0, "arguments": {"gen_args_0": {"arg_0": "<user>" + problem.prompt[0]["content"]}}}
    agreement.same_prompts([problem], [sample], Template())
    sample["arguments"]["gen_args_0"]["arg_0"] += " "
    with pytest.raises(SystemExit, match="Problem 0 was asked in other words"):
        agreement.same_prompts([problem], [sample], Template())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"question": f"How much is {n} and 2?", "answer": f"#### {n + 2}"} for n in range(20)]
    for part, kept in (("train", rows[:10]), ("test", rows[10:])):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    return tmp_path


def test_the_task_file_asks_tethers_problems_in_tethers_words(data: Path, tmp_path: Path) -> None:
    problems = make_task("gsm8k", path=data).problems("test", 3, 0)
    agreement.write_task(tmp_path / "task", problems, 40, ["<|im_end|>"])
    task = yaml.safe_load((tmp_path / "task" / "tether_gsm8k.yaml").read_text())
    assert task["generation_kwargs"] == {"until": ["<|im_end|>"], "do_sample": False, "max_gen_toks": 40}
    asked = [json.loads(line) for line in (tmp_path / "task" / "problems.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in asked] == [problem.answer for problem in problems]
    assert all(row["question"].endswith("within \\boxed{}.") for row in asked)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness: make lm-eval-agreement"
)
@pytest.mark.skipif(not agreement.MODEL.is_dir(), reason="needs SmolLM2: python recipes/smollm2.py")
def test_both_commands_are_asked_the_same_and_answer_it(data: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    options = (agreement.MODEL, data, 6, 12, 3, tmp_path / "work", answers)
    agreement.go_on(*options)
    rows = agreement.read_json_lines(answers)
    assert [row["problem"] for row in rows] == list(range(6))
    assert all("lm_eval_text" not in row for row in rows)
    agreement.run = None  # what is done is not asked again
    agreement.go_on(*options)
    with pytest.raises(SystemExit, match="holds another measurement"):
        agreement.go_on(agreement.MODEL, data, 9, 13, *options[4:])
