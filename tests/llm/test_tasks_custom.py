"""Custom problems: fields by name, verifiers by name or import path, errors that name the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from tether.errors import ConfigError, DataError, TetherWarning
from tether.llm.tasks import CustomTask, Split, Verdict, make_task


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def rows(start: int, end: int) -> list[dict[str, Any]]:
    return [{"q": f"Say {n}.", "a": n} for n in range(start, end)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_checks.py").write_text(
        "from tether.llm.tasks import Verdict\n"
        "def half(response, answer): return 0.5\n"
        "def starts(response, answer): return response.startswith(answer)\n"
        "def told(response, answer): return Verdict(0.25, True, {'length': float(len(response))})\n"
        "def broken(response, answer): return 'yes'\n"
        "VALUE = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_checks"


def test_one_file_gives_three_disjoint_splits_of_all_rows(tmp_path: Path) -> None:
    task = make_task(
        "custom",
        path=write(tmp_path / "x.jsonl", rows(0, 300)),
        prompt_field="q",
        answer_field="a",
        chat=False,
    )
    prompts = [problem.prompt for split in get_args(Split) for problem in task.problems(split)]
    assert sorted(map(str, prompts)) == sorted(row["q"] for row in rows(0, 300))
    assert len(task.problems("train")) > 200


@pytest.mark.parametrize("with_validation", [False, True])
def test_a_folder_keeps_its_test_rows_out_of_the_others(tmp_path: Path, with_validation: bool) -> None:
    write(tmp_path / "train.jsonl", rows(0, 100))
    write(tmp_path / "test.jsonl", rows(90, 110))
    if with_validation:
        write(tmp_path / "validation.jsonl", rows(80, 95))
    task = CustomTask(tmp_path, prompt_field="q", answer_field="a")
    answers = {split: {int(p.answer) for p in task.problems(split)} for split in get_args(Split)}
    assert answers["test"] == set(range(90, 110))
    assert answers["train"] | answers["validation"] == set(range(90))
    assert not answers["train"] & answers["validation"]
    if with_validation:
        assert answers["validation"] == set(range(80, 90))


def test_prompts_may_be_conversations_and_answers_any_json(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    write(tmp_path / "train.jsonl", [{"prompt": talk, "answer": {"b": [1], "a": 2}}] * 1)
    write(tmp_path / "test.jsonl", [{"prompt": "Hi", "answer": "yo"}])
    write(tmp_path / "validation.jsonl", [{"prompt": "Ho", "answer": "yo"}])
    (problem,) = CustomTask(tmp_path, instruction="Now.").problems("train")
    assert (problem.prompt, problem.answer) == (talk, '{"a": 2, "b": [1]}')
    (asked,) = CustomTask(tmp_path, instruction="Now.").problems("test")
    assert asked.prompt == [{"role": "user", "content": "Hi\n\nNow."}]
    with pytest.raises(DataError, match=r"train\.jsonl:1: field 'prompt' must hold text, not"):
        CustomTask(tmp_path, chat=False).problems("train")


@pytest.mark.parametrize(
    ("verifier", "response", "answer", "reward"),
    [
        ("exact", "yes\n", "yes", 1.0),
        ("exact", "Yes", "yes", 0.0),
        ("normalized", "It's  PARIS.", "its paris", 1.0),
        ("normalized", "London", "Paris", 0.0),
        ("number", "first 3, then 1,250.5 in all", "1250.50", 1.0),
        ("number", "12", "2", 0.0),
        ("number", "none", "none", 0.0),
        ("math", r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("math", "0.5", "0.5", 0.0),
        ("my_checks:half", "", "", 0.5),
        ("my_checks:starts", "abc", "ab", 1.0),
        ("my_checks:told", "abc", "ab", 0.25),
    ],
)
def test_verifiers_by_name_and_import_path(
    module: str, verifier: str, response: str, answer: str, reward: float
) -> None:
    assert CustomTask("x.jsonl", verifier=verifier).verify(response, answer).reward == reward


def test_a_verifiers_verdict_and_full_reward_decide_what_is_correct(module: str) -> None:
    told = CustomTask("x.jsonl", verifier="my_checks:told").verify("abc", "")
    assert told == Verdict(0.25, True, {"length": 3.0})
    assert not CustomTask("x.jsonl", verifier="my_checks:half").verify("", "").correct


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("vibes", "Unknown verifier 'vibes'.*exact, normalized, number, math"),
        ("my_checks:missing", "cannot be imported.*missing"),
        ("no_such_module:f", "cannot be imported.*no_such_module"),
        ("my_checks:VALUE", "is a int"),
        (":f", "Unknown verifier"),
    ],
)
def test_useless_verifiers_are_refused_at_once(module: str, verifier: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CustomTask("x.jsonl", verifier=verifier)


def test_a_verifier_that_returns_something_else_is_named(module: str) -> None:
    with pytest.raises(ConfigError, match=r"my_checks:broken.* gave 'yes'"):
        CustomTask("x.jsonl", verifier="my_checks:broken").verify("", "")


def test_a_row_without_its_fields_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [{"question": "Why?", "answer": "x"}])
    with pytest.raises(
        DataError, match=r"x\.jsonl:1: nothing in field 'prompt' \(the row has: question, answer\)"
    ):
        CustomTask(file).problems("train")
    with pytest.raises(ConfigError, match="max_response_tokens is 0"):
        CustomTask(file, max_response_tokens=0)


BROKEN = {
    "not JSON": b'{"prompt": "1+1?", "ans',
    "no object": b'["prompt"]',
    "no answer": b'{"prompt": "1+1?"}',
    "not text": b'{"prompt": "\xff\xfe", "answer": "2"}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_is_refused_by_line_or_skipped_by_choice(tmp_path: Path, kind: str) -> None:
    rows = [json.dumps({"prompt": f"{n}+1?", "answer": str(n + 1)}).encode() for n in range(40)]
    rows.insert(5, BROKEN[kind])
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(rows))
    with pytest.raises(DataError, match=r"rows\.jsonl:6"):
        CustomTask(file).problems("train")
    with pytest.warns(TetherWarning, match=r"1 of 4[01] rows are broken and left out .*rows\.jsonl:6"):
        problems = CustomTask(file, bad_rows="skip").problems("train")
    file.write_bytes(b"\n".join(row for row in rows if row != BROKEN[kind]))
    assert problems == CustomTask(file).problems("train")


def test_a_file_of_broken_rows_is_refused_whatever_the_choice(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"{\n{\n")
    with (
        pytest.warns(TetherWarning, match="2 of 2 rows"),
        pytest.raises(DataError, match="holds no sound row"),
    ):
        CustomTask(tmp_path / "rows.jsonl", bad_rows="skip").problems("train")
    with pytest.raises(ConfigError, match="bad_rows is 'ignore'"):
        CustomTask(tmp_path / "rows.jsonl", bad_rows="ignore")


def test_line_ends_that_json_allows_inside_a_text_do_not_cut_a_row(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{n}\u2028+1?\x85", "answer": "2"}, ensure_ascii=False) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    task = CustomTask(tmp_path / "rows.jsonl", chat=False)
    assert all("\u2028+1?\x85" in problem.prompt for problem in task.problems("train"))
