"""MATH and its benchmarks: rows in every published form, disjoint splits, answers compared by meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import datasets
import pytest

from tether.errors import ConfigError, DataError
from tether.llm.tasks import MathTask, Problem, Split, make_task
from tether.llm.tasks.protocol import split_of

DATA = Path(__file__).parent / "data" / "math"


@pytest.fixture(scope="module")
def task() -> MathTask:
    return MathTask(DATA)


@pytest.fixture(scope="module")
def lenient() -> MathTask:
    return MathTask(DATA, require_boxed=False)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def question(problem: Problem) -> str:
    assert isinstance(problem.prompt, list)
    return problem.prompt[0]["content"]


def test_each_benchmark_reads_its_own_file() -> None:
    for name, file in (("math", "test"), ("amc", "amc_test"), ("aime", "aime_test")):
        rows = [json.loads(line) for line in (DATA / f"{file}.jsonl").read_text().splitlines()]
        task = make_task(name, path=DATA)
        assert task.name == name
        problems = task.problems("test")
        assert {question(p).rpartition("\n\n")[0] for p in problems} == {
            row["problem"].strip() for row in rows
        }


def test_a_number_as_answer_loses_its_point_zero() -> None:
    answers = {problem.answer for problem in make_task("amc", path=DATA).problems("test")}
    assert answers == {"142", "144", "81"}


def test_an_answer_may_stand_in_the_solutions_box(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [{"problem": "1+1?", "solution": r"We add: \boxed{\frac{4}{2}}."}])
    (split,) = [split for split in get_args(Split) if split_of("1+1?") == split]
    problems = MathTask(file).problems(split)
    (problem,) = problems
    assert problem.answer == r"\frac{4}{2}"
    assert problem.metadata["solution"].startswith("We add")


def test_training_leaves_out_the_benchmark_whatever_its_white_space(tmp_path: Path) -> None:
    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(100)]
    write(tmp_path / "train.jsonl", rows)
    write(
        tmp_path / "test.jsonl", [{**row, "problem": row["problem"].replace(" ", "  ")} for row in rows[:40]]
    )
    task = MathTask(tmp_path, instruction="")
    parts = {
        split: {" ".join(question(p).split()) for p in task.problems(split)} for split in get_args(Split)
    }
    assert parts["train"] | parts["validation"] == {row["problem"] for row in rows[40:]}
    assert not parts["train"] & parts["validation"]
    assert len(parts["test"]) == 40


def test_the_hub_is_asked_for_the_right_data(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        return [{"problem": f"{name} {n}?", "answer": "1"} for n in range(30)]

    monkeypatch.setattr(datasets, "load_dataset", load)
    make_task("aime").problems("test")
    MathTask().problems("train")
    assert asked == [
        ("HuggingFaceH4/aime_2024", "train"),
        ("HuggingFaceH4/MATH-500", "test"),
        ("DigitalLearningGmbH/MATH-lighteval", "train"),
    ]


def test_an_unreachable_hub_and_rows_without_answer_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"no route.*path to JSONL"):
        MathTask().problems("test")
    write(tmp_path / "test.jsonl", [{"problem": "Why?", "answer": None}])
    with pytest.raises(DataError, match=r"test\.jsonl:1: no answer \(the row has: problem, answer\)"):
        MathTask(tmp_path).problems("test")
    with pytest.raises(ConfigError, match="Unknown benchmark 'imo'"):
        MathTask(benchmark="imo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="box_reward is 1"):
        MathTask(box_reward=1.0)


@pytest.mark.parametrize(
    ("given", "answer", "correct"),
    [
        (r"\frac{2}{4}", r"\frac12", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        (r"(3, \frac{\pi}{3})", r"\left( 3, \frac{\pi}{2} \right)", False),
        (r"\text{Evelyn}", r"\text{Evelyn}", True),
        (r"\text{Navin}", r"\text{Evelyn}", False),
        (r"x^2+3x", r"3x + x^2", True),
        ("[2,4)", "(2,4)", False),
        ("5, 3, 7", "3, 5, 7", True),
        ("52_{8}", "52_8", True),
        ("52_9", "52_8", False),
        ("52", "52_8", True),
        (r"15\text{ cm}^3", r"15\mbox{ cm}^2", False),
        (r"15\text{ cm}^2", r"15\mbox{ cm}^2", True),
    ],
)
def test_boxed_answers_are_compared_by_meaning(
    task: MathTask, given: str, answer: str, correct: bool
) -> None:
    verdict = task.verify(f"So it is $\\boxed{{{given}}}$.", answer)
    assert (verdict.correct, verdict.reward) == (correct, float(correct))


def test_a_bare_expression_counts_only_where_allowed(task: MathTask, lenient: MathTask) -> None:
    assert not task.verify(r"3\sqrt{13}", r"3\sqrt{13}").correct
    assert lenient.verify(r"3\sqrt{13}", r"3\sqrt{13}").correct
    assert lenient.verify(r"We find $x = 4$, so the answer is $3\sqrt{13}$.", r"3\sqrt{13}").correct
    assert not lenient.verify(r"3\sqrt{14}", r"3\sqrt{13}").correct
    assert not lenient.verify("  ", "3").correct


def test_the_reward_for_a_box_is_separate() -> None:
    task = MathTask(box_reward=0.1)
    assert task.verify(r"\boxed{4}", "5").reward == pytest.approx(0.1)
    assert task.verify(r"\boxed{5}", "5").reward == pytest.approx(1.1)
    assert task.verify("5", "5").reward == 0
    assert task.verify(r"\boxed{4}", "5").parts == {"correct": 0.0, "boxed": 1.0}
