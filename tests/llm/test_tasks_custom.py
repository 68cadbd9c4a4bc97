"""Custom problems: fields by name, verifiers by name or import path, errors that name the row."""

from __future__ import annotations

import json
import sys
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


CHECKS = """
import math, os, sys, time
from collections import namedtuple
import numpy as np
Verdict = namedtuple("Verdict", "reward correct parts", defaults=[{}])  # importing Tether's takes long
def half(response, answer): return 0.5
def starts(response, answer): return response.startswith(answer)
def told(response, answer): return Verdict(0.25, True, {'length': float(len(response))})
def numpys(response, answer): return np.float32(0.5) if answer else np.bool_(response == "yes")
def broken(response, answer): return 'yes'
def nothing(response, answer): return None
def nan(response, answer): return math.nan
def more(response, answer): return 1.5
def less(response, answer): return -0.1
def huge(response, answer): return Verdict(10**400, True)
def endless(response, answer): return Verdict(math.inf, False)
def partly(response, answer): return Verdict(1.0, True, {'part': math.nan})
def vague(response, answer): return Verdict(1.0, 'yes')
def raises(response, answer):
    return 1 / len(response)
def leaves(response, answer): sys.exit(0)
def hostile(response, answer):
    if response == "sleep": time.sleep(600)
    if response == "memory": bytearray(2**50)
    if response == "recursion": hostile.again = lambda: hostile.again(); hostile.again()
    if response == "end": os._exit(0)
    print("a remark that is no answer")
    return response == answer
VALUE = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_checks.py").write_text(CHECKS)
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


def test_a_file_that_is_missing_or_empty_is_named_in_whole_sentences(tmp_path: Path) -> None:
    """The task looks for its fields itself, so there are none to name here."""
    file = tmp_path / "x.jsonl"
    with pytest.raises(DataError, match=r"Check the path, or create a JSONL file\.$"):
        CustomTask(file).problems("train")
    file.write_text("")
    with pytest.raises(DataError, match=r"is empty\. Give one JSON object a line\.$"):
        CustomTask(file).problems("train")


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
        ("number", "none", "3", 0.0),
        ("math", r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("math", "0.5", "0.5", 0.0),
        ("my_checks:half", "", "", 0.5),
        ("my_checks:starts", "abc", "ab", 1.0),
        ("my_checks:told", "abc", "ab", 0.25),
        ("my_checks:numpys", "yes", "", 1.0),
        ("my_checks:numpys", "yes", "x", 0.5),
    ],
)
def test_verifiers_by_name_and_import_path(
    module: str, verifier: str, response: str, answer: str, reward: float
) -> None:
    assert CustomTask("x.jsonl", verifier=verifier, seconds=60).verify(response, answer).reward == reward


def test_a_verifiers_verdict_and_full_reward_decide_what_is_correct(module: str) -> None:
    told = CustomTask("x.jsonl", verifier="my_checks:told", seconds=60).verify("abc", "")
    assert told == Verdict(0.25, True, {"length": 3.0})
    assert not CustomTask("x.jsonl", verifier="my_checks:half", seconds=60).verify("", "").correct


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("vibes", "Unknown verifier 'vibes'.*exact, normalized, number, math"),
        ("my_checks:missing", "cannot be imported.*missing"),
        ("no_such_module:f", "cannot be imported.*no_such_module"),
        ("my_checks:VALUE", "is a int"),
        (":f", "Unknown verifier"),
        ("__main__:f", "Move it to a module"),
    ],
)
def test_useless_verifiers_are_refused_at_once(module: str, verifier: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CustomTask("x.jsonl", verifier=verifier, seconds=60)


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("broken", "gave 'yes'"),
        ("nothing", "gave None"),
        ("nan", "gave nan"),
        ("more", r"gave 1\.5"),
        ("less", r"gave -0\.1"),
        ("huge", "gave .*reward.*1000"),
        ("endless", "gave .*inf"),
        ("partly", "gave .*nan"),
        ("vague", "gave .*yes"),
        ("raises", r"raised ZeroDivisionError: division by zero \(.*my_checks\.py, line 20\)\. Mend it"),
        ("leaves", r"raised SystemExit: 0 \(.*my_checks\.py, line 21\)"),
    ],
)
def test_a_verifier_that_raises_or_makes_no_sense_stops_and_is_named(
    module: str, verifier: str, message: str
) -> None:
    task = CustomTask("x.jsonl", verifier=f"my_checks:{verifier}", seconds=60)
    with pytest.raises(ConfigError, match=f"Verifier 'my_checks:{verifier}' {message}"):
        task.verify("", "")


@pytest.mark.parametrize("kind", ["sleep", "memory", "recursion", "end"])
def test_a_response_that_stops_the_verifier_counts_as_wrong_and_is_counted(
    module: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = CustomTask("x.jsonl", verifier="my_checks:hostile", seconds=2)
    verdicts = task.verify_many(["a", kind, "b", kind, "c"], ["a", kind, "b", kind, "d"])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert "judged 2 of 5 responses as wrong because it had to be stopped" in caplog.text
    task.close()


def test_a_verifier_may_give_tethers_own_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_checks.py").write_text(
        "from tether.llm.tasks import Verdict\n"
        "def told(response, answer): return Verdict(0.5, True, {'length': 3.0})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    verdict = CustomTask("x.jsonl", verifier="own_checks:told", seconds=60).verify("", "")
    assert verdict == Verdict(0.5, True, {"length": 3.0})


def test_a_verifier_is_not_imported_into_the_trainer(module: str) -> None:
    CustomTask("x.jsonl", verifier="my_checks:half", seconds=60).verify("", "")
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("verifier", "response", "answer", "correct"),
    [
        ("normalized", "-5", "5", False),
        ("normalized", "\u22125", "-5", True),
        ("normalized", "It is -$5.", "it is -5", True),
        ("normalized", "-.5", ".5", False),
        ("normalized", "1.5", "15", False),
        ("normalized", "1/2", "12", False),
        ("normalized", "3-5", "35", False),
        ("normalized", "x+y", "xy", False),
        ("normalized", "a < b", "a > b", False),
        ("normalized", "1,500 men", "1500 men", True),
        ("normalized", "1,5", "15", False),
        ("normalized", "well-known", "wellknown", True),
        ("normalized", "**Paris** – (France)…", "paris france", True),
        ("normalized", "- Paris", "paris", True),
        ("normalized", "$5, or 50%", "5 or 50", True),
        ("number", "12345678901234567", "12345678901234568", False),
        ("number", "7" * 400, "7" * 399 + "8", False),
        ("number", "7" * 400, "7" * 400 + ".0", True),
        ("number", "0.1000000000000000055", "0.1", False),
        ("number", "it is -5", "5", False),
        ("number", "it is \u22125", "-5", True),
        ("number", "from 10-12", "12", True),
        ("number", "3/4", "4", False),
        ("number", r"\frac{3}{4}", "4", False),
        ("number", "2^5", "5", False),
        ("number", "10^5", "5", False),
        ("number", "10^5", "100,000", True),
        ("number", "1.5e5", "5", False),
        ("number", r"1.5 \times 10^{5}", "150000", True),
        ("number", "<think>It is 4.</think> It is 5.", "4", False),
        ("number", "2½", "2", False),
        ("number", "2 ½", "2", False),
        ("number", "between 2 and ½", "2", False),
        ("number", "3²", "3", False),
        ("number", "2⁻¹", "2", False),
        ("number", "1.5 × 10⁵", "10", False),
        ("number", "3⁄4", "4", False),
        ("number", "3² = 9", "9", True),
        ("number", "an area of 5 m²", "5", True),
        ("number", "Ana has ...42 apples.", "42", True),
        ("number", "It is..42.5", "42.5", True),
        ("number", "version 1.2.3", ".3", False),
        ("number", "x.5", ".5", False),
        ("number", "It is .5, or -.5", "-0.5", True),
        ("number", "(.5)", "0.5", True),
        ("number", "- 5", "- 5", True),
        ("number", "<think>Hm.</think>\n\n- 5", "-5", True),
        ("number", "It is - 5.", "5", False),
        ("number", "It is - $5.", "-5", True),
        ("number", "x = − 5", "-5", True),
        ("number", "(- 5)", "5", False),
        ("number", r"$x = \boxed{- 5}$", "-5", True),
        ("number", "**- 5**", "-5", True),
        ("number", "7 - 5", "5", True),
        ("number", "x - 5", "5", True),
        ("number", "(7) - 5", "5", True),
        ("number", "10 - 12", "12", True),
        ("number", "The answers are\n- 4\n- 5", "5", True),
        ("number", "The answer – 5.", "5", True),
        ("number", "Answer - 5", "5", True),
        ("number", "10 apples - 5 apples", "5", True),
        ("number", "10 apples − 5", "5", True),
        ("number", "The 2 of them are − 5", "-5", True),
        ("number", r"It is $10{,}000$.", "10000", True),
        ("number", r"It is $10{,}000$.", "0", False),
        ("number", r"It is $1\,234\,567.5$.", "1,234,567.5", True),
        ("number", "It is 10\u202f000.", "10000", True),
        ("number", "of 10 000, 12", "12", True),
        ("number", r"It is -\$5.", "5", False),
        ("number", r"It is -\$5.", "-5", True),
        ("number", "It is -€5.", "5", False),
        ("number", "It is -€5.", "-5", True),
        ("number", "It is £5.", "5", True),
        ("number", "It is 5 million.", "5,000,000", True),
        ("number", "It is 5 million.", "5", False),
        ("exact", "<think>yes</think>\nyes", "yes", True),
        ("exact", "<think>yes", "yes", False),
        ("math", r"<think>\boxed{4}</think>", "4", False),
    ],
)
def test_named_verifiers_pay_no_look_alike(verifier: str, response: str, answer: str, correct: bool) -> None:
    assert CustomTask("x.jsonl", verifier=verifier, seconds=60).verify(response, answer).correct is correct


def test_a_reference_that_is_no_number_is_refused_where_it_is_read(tmp_path: Path) -> None:
    file = write(
        tmp_path / "x.jsonl", [{"prompt": f"{n}?", "answer": "four" if n == 2 else n} for n in range(9)]
    )
    with pytest.raises(DataError, match=r"x\.jsonl:3: the answer 'four' is no number"):
        CustomTask(file, verifier="number").problems("train")
    with pytest.warns(TetherWarning, match="1 of 9 rows"):
        CustomTask(file, verifier="number", bad_rows="skip").problems("train")


@pytest.mark.parametrize("line", ['{"prompt": "1?", "answer": ' + "7" * 5000 + "}", "[" * 100_000])
def test_json_that_python_refuses_to_read_is_a_broken_row(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"x\.jsonl:1: "):
        CustomTask(tmp_path / "x.jsonl").problems("train")


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
    "half a character": b'{"prompt": "1+1? \\ud83d", "answer": "2"}',
    "half a character in another field": b'{"prompt": "1+1?", "answer": "2", "more": ["\\uDE00"]}',
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
