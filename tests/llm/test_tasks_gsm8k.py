"""GSM8K: data read or refused by file and line, answers checked by meaning and in time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import datasets
import pytest

from tether.errors import DataError, InvalidInputError, MissingDependencyError, TetherWarning
from tether.llm.tasks import GSM8KTask, Problem, Split
from tether.llm.tasks.math_answers import MathVerifier, last_boxed

DATA = Path(__file__).parent / "data" / "gsm8k"


@pytest.fixture(scope="module")
def task() -> GSM8KTask:
    return GSM8KTask(DATA)


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    with MathVerifier(seconds=10) as shared:
        yield shared


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def read_all(path: Path) -> list[Problem]:
    task = GSM8KTask(path, instruction="")
    return [problem for split in get_args(Split) for problem in task.problems(split)]


def question(problem: Problem) -> str:
    assert isinstance(problem.prompt, list)
    return problem.prompt[0]["content"]


def row(number: int, answer: str = "#### 3") -> dict[str, str]:
    return {"question": f"Question {number}?", "answer": answer}


def test_problems_are_the_files_rows_as_conversations(task: GSM8KTask) -> None:
    rows = {entry["question"]: entry["answer"] for entry in rows_of(DATA / "test.jsonl")}
    problems = task.problems("test")
    assert len(problems) == len(rows)
    for problem in problems:
        assert isinstance(problem.prompt, list)
        (message,) = problem.prompt
        asked, _, instruction = message["content"].rpartition("\n\n")
        assert message["role"] == "user"
        assert r"\boxed{}" in instruction
        assert rows[asked].endswith(f"#### {problem.answer}")


def test_the_first_real_answer_is_18(task: GSM8KTask) -> None:
    (ducks,) = [p for p in task.problems("test") if "ducks" in question(p)]
    assert ducks.answer == "18"
    assert task.verify(r"16 - 3 - 4 = 9 eggs, so \$\boxed{18}", ducks.answer).correct


def test_train_and_validation_divide_the_training_file_and_leave_out_test_questions(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [row(number) for number in range(300)])
    write_rows(tmp_path / "test.jsonl", [row(number) for number in range(290, 330)])
    task = GSM8KTask(tmp_path, instruction="")
    parts = {split: {question(p) for p in task.problems(split)} for split in get_args(Split)}
    assert parts["train"] | parts["validation"] == {f"Question {number}?" for number in range(290)}
    assert not parts["train"] & parts["validation"]
    assert parts["test"] == {f"Question {number}?" for number in range(290, 330)}
    assert 10 <= len(parts["validation"]) <= 50


def test_one_file_is_divided_into_three_splits(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "all.jsonl", [row(number) for number in range(200)])
    prompts = [question(problem) for problem in read_all(file)]
    assert len(prompts) == len(set(prompts)) == 200


def test_limit_and_seed_choose_and_repeat(task: GSM8KTask) -> None:
    everything = task.problems("test", seed=1)
    assert task.problems("test", limit=2, seed=1) == everything[:2]
    assert {p.answer for p in everything} == {p.answer for p in task.problems("test", seed=2)}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", r"data\.jsonl is empty"),
        ("\n  \n", r"data\.jsonl is empty"),
        (json.dumps(row(1)) + '\n{"question": "Why?"}', r"data\.jsonl:2: no text in field 'answer'"),
        (
            json.dumps(row(1)) + '\n\n{"question": "Why?", "answer": null}',
            r"data\.jsonl:3: no text in field 'answer'",
        ),
        ("{broken", r"data\.jsonl:1: not JSON"),
        ("[1, 2]", r"data\.jsonl:1: a list, not an object"),
        (json.dumps(row(1, "It is 3.")), r"data\.jsonl:1: the answer does not end in '#### <number>'"),
        (json.dumps(row(1, "It is three. #### three")), r"data\.jsonl:1: the answer does not end in"),
    ],
)
def test_malformed_data_is_refused_by_file_and_line(tmp_path: Path, lines: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(lines)
    with pytest.raises(DataError, match=message):
        read_all(file)


def test_missing_undecodable_and_too_small_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file .*nowhere\.jsonl"):
        GSM8KTask(tmp_path / "nowhere.jsonl").problems("train")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9"}')
    with pytest.raises(DataError, match="not UTF-8"):
        GSM8KTask(tmp_path / "latin.jsonl").problems("train")
    one_row = write_rows(tmp_path / "one.jsonl", [row(1)])
    with pytest.raises(DataError, match="has no problem"):
        read_all(one_row)


def test_the_hub_is_read_by_name_and_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str, split: str) -> list[dict[str, str]]:
        assert (name, config) == ("openai/gsm8k", "main")
        return rows_of(DATA / f"{split}.jsonl")

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert GSM8KTask().problems("train") == GSM8KTask(DATA).problems("train")
    assert GSM8KTask().problems("test") == GSM8KTask(DATA).problems("test")


def test_an_unreachable_hub_and_a_row_without_answer_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"no route.*give the task a path"):
        GSM8KTask().problems("test")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"question": "Why?"}])
    with pytest.raises(DataError, match="test row 0: no text in field 'answer'"):
        GSM8KTask().problems("test")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{18}", "18"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{}", ""),
        ("18", None),
        (r"\boxed{18", None),
    ],
)
def test_the_last_complete_box_counts(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("inside", "answer", "correct"),
    [
        ("18", "18", True),
        (r"\$18", "18", True),
        ("18.00", "18", True),
        (r"\frac{36}{2}", "18", True),
        ("1,800", "1800", True),
        ("18.5", "18", False),
        ("81", "18", False),
        ("", "18", False),
        ("eighteen", "18", False),
    ],
)
def test_answers_are_compared_by_value(
    verifier: MathVerifier, inside: str, answer: str, correct: bool
) -> None:
    assert verifier.check(f"\\boxed{{{inside}}}", answer).correct is correct


def test_an_answer_outside_a_box_counts_only_when_allowed() -> None:
    response = "They have 18 apples, so the answer is 18."
    assert GSM8KTask(DATA).verify(response, "18").parts["boxed"] == 0.0
    assert not GSM8KTask(DATA).verify(response, "18").correct
    assert GSM8KTask(DATA, require_boxed=False).verify(response, "18").correct
    assert not GSM8KTask(DATA, require_boxed=False).verify("   ", "18").correct


def test_checking_works_in_other_threads(verifier: MathVerifier) -> None:
    results: dict[int, bool] = {}

    def check(number: int) -> None:
        results[number] = verifier.check(rf"\boxed{{{number}.0}}", str(number)).correct

    threads = [threading.Thread(target=check, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: True for number in range(8)}


def test_an_endless_check_is_ended_counts_as_wrong_and_the_next_one_works() -> None:
    with MathVerifier(seconds=1.0) as verifier:
        assert verifier.check(r"\boxed{5}", "5").correct
        started = time.monotonic()
        assert not verifier.check(r"\boxed{9^{9^{9^{9^9}}}}", "5").correct
        assert time.monotonic() - started < 3.0
        assert verifier.check(r"\boxed{5}", "5").correct


def test_a_time_limit_must_be_positive() -> None:
    with pytest.raises(InvalidInputError, match="time limit is 0"):
        MathVerifier(seconds=0)


def test_a_missing_math_verify_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('none here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        MathVerifier() as verifier,
        pytest.raises(MissingDependencyError, match=r"math-verify: .*none here.*Install tether-rl\[llm\]"),
    ):
        verifier.check(r"\boxed{x}", "5")


def test_a_row_without_a_number_is_skipped_by_choice(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(40)]
    rows[3]["answer"] = "no number"
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.warns(TetherWarning, match=r"1 of 40 rows .*rows\.jsonl:4: the answer does not end"):
        kept = GSM8KTask(file, bad_rows="skip").problems("train")
    assert not any(problem.prompt[0]["content"].startswith("3+1?") for problem in kept)
