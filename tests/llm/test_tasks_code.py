"""Code: every published form read, and code judged outside its sandbox."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from tether.errors import ConfigError, DataError
from tether.llm.tasks import CodeTask, Problem, Split, Task, reward_function
from tether.llm.tasks.code_cases import CallTest, StreamTest, UnitTests
from tether.llm.tasks.code_judge import extract_code
from tether.llm.tasks.code_rows import problem_of_row
from tether.llm.tasks.code_values import Value
from tether.llm.tasks.protocol import split_of


@pytest.fixture(scope="module")
def task() -> Iterator[CodeTask]:
    with CodeTask(time_limit=3.0) as shared:
        yield shared


@pytest.fixture(scope="module")
def squares() -> str:
    return UnitTests([CallTest.of(f"square({n})", n * n) for n in range(1, 6)], "", "square").dump()


def block(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\nDone."


def text(problem: Problem) -> str:
    assert isinstance(problem.prompt, list)
    return problem.prompt[0]["content"]


# Generated problems.


def test_generated_problems_repeat_and_splits_share_none() -> None:
    task = CodeTask()
    splits = {split: task.problems(split, limit=60) for split in get_args(Split)}
    assert splits["train"] == CodeTask().problems("train", limit=60)
    texts = [text(problem) for problems in splits.values() for problem in problems]
    assert len(set(texts)) == 180
    assert task.problems("train", limit=60, seed=1) != splits["train"]


def test_shipped_solutions_pass_and_doing_nothing_fails(task: CodeTask) -> None:
    problems = task.problems("train", limit=12)
    answers = [problem.answer for problem in problems]
    solved = task.verify_many([problem.metadata["solution"] for problem in problems], answers)
    assert [verdict.reward for verdict in solved] == [1.0] * 12
    idle = task.verify_many([block("def solve(numbers):\n    return numbers")] * 12, answers)
    assert [verdict.reward for verdict in idle] == [0.0] * 12


def test_a_hundred_generated_solutions_agree_with_their_tests() -> None:
    """The generator's own outputs against its solutions' source, here run directly: we wrote both."""
    for steps in (0, 1, 3, 6):
        for problem in CodeTask(steps=steps).problems("validation", limit=33):
            namespace: dict[str, Any] = {}
            exec(extract_code(problem.metadata["solution"])[1], namespace)
            for test in UnitTests.load(problem.answer).tests:
                assert isinstance(test, CallTest)
                assert test.accepts([Value(eval(test.calls[0], namespace))])  # noqa: S307


def test_functions_of_one_line_share_no_problem_and_their_solutions_pass(task: CodeTask) -> None:
    short = CodeTask(steps=0)
    splits = {split: short.problems(split, limit=200) for split in get_args(Split)}
    assert len({text(problem) for problems in splits.values() for problem in problems}) == 600
    kinds = {text(problem).partition(" and returns")[0] for problem in splits["test"]}
    assert len(kinds) == 4
    problems = splits["train"][:12]
    answers = [problem.answer for problem in problems]
    solved = task.verify_many([problem.metadata["solution"] for problem in problems], answers)
    assert [verdict.reward for verdict in solved] == [1.0] * 12
    constant = task.verify_many([block("def solve(*given):\n    return 0")] * 12, answers)
    assert [verdict.reward for verdict in constant] == [0.0] * 12


@pytest.mark.parametrize(
    ("asked", "part", "instead"),
    [
        ("is at least", "<= n", "< n"),
        ("is at least", "n <", "n <="),
        ("the sum of a and b is greater", ">", ">="),
        ("how many numbers", ">", ">="),
        ("that are less", "<", "<="),
        ("divisible by", " and .*", ""),
        ("starts with", " or .*", ""),
        ("starts with", "return .* or ", "return "),
        ("the first", r"text\[.*", "text"),
        ("without the letter", r"text\..*", "text"),
        ("replaced by", r"text\..*", "text"),
    ],
)
def test_what_is_nearly_a_function_of_one_line_is_wrong(asked: str, part: str, instead: str) -> None:
    problems = [one for one in CodeTask(steps=0).problems("train", limit=300) if asked in text(one)]
    assert problems
    for problem in problems:
        solution = extract_code(problem.metadata["solution"])[1]
        namespace: dict[str, Any] = {}
        exec(re.sub(part, instead, solution), namespace)
        tests = [test for test in UnitTests.load(problem.answer).tests if isinstance(test, CallTest)]
        assert not all(test.accepts([Value(eval(test.calls[0], namespace))]) for test in tests)  # noqa: S307


@pytest.mark.parametrize(("steps", "instruction"), [(0, ""), (0, "Show a code block."), (2, "")])
def test_examples_are_solved_problems_of_the_training_split(
    task: CodeTask, steps: int, instruction: str
) -> None:
    shown = CodeTask(steps=steps, instruction=instruction, examples=4)
    plain = CodeTask(steps=steps, instruction=instruction)
    prompts = [problem.prompt for problem in shown.problems("test", limit=5)]
    turns = prompts[0][:-1]
    assert [prompt[:-1] for prompt in prompts] == [turns] * 5
    assert [prompt[-1:] for prompt in prompts] == [problem.prompt for problem in plain.problems("test", 5)]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 4
    asked = [turn["content"] for turn in turns[::2]]
    assert len(set(asked)) == 4
    assert {split_of(text.removesuffix(f"\n\n{instruction}")) for text in asked} == {"train"}
    for solution in (turn["content"] for turn in turns[1::2]):
        compile(extract_code(solution)[1], "solution", "exec")
        assert extract_code(solution)[0] == bool(instruction)
        assert ("\n" in solution) == bool(steps or instruction)


# Judging.


@pytest.mark.parametrize(
    "response",
    [
        " def square(n): return n ** 2\n",
        "  def square(n):\n      return n ** 2",
        " x = 2\ndef square(n): return n ** x",
    ],
)
def test_code_that_goes_on_in_the_middle_of_a_line_begins_there(
    task: CodeTask, squares: str, response: str
) -> None:
    """As a pretrained model answers after "Answer:", which ends without a space."""
    assert task.verify(response, squares).correct


def test_lines_of_spaces_in_a_programs_strings_stay(task: CodeTask, squares: str) -> None:
    spaces = block('def square(n):\n    text = """\n  \n"""\n    return n ** 2 if len(text) == 4 else 0')
    assert task.verify(spaces, squares).correct


def test_right_wrong_and_partly_right_code(task: CodeTask, squares: str) -> None:
    right = task.verify(block("def square(n): return n ** 2"), squares)
    assert (right.reward, right.correct, right.parts["passed"], right.parts["block"]) == (1.0, True, 1.0, 1.0)
    partly = task.verify(block("def square(n): return 4 if n == 2 else 1"), squares)
    assert (partly.reward, partly.correct, partly.parts["passed"]) == (0.0, False, 0.4)
    raising = task.verify(block("def square(n):\n    if n > 2: raise ValueError\n    return n * n"), squares)
    assert raising.parts["passed"] == 0.4
    assert task.verify("```python\n```", squares).reward == 0.0
    assert task.verify("", squares).parts["passed"] == 0.0


def test_partial_credit_and_format_reward_are_separate(squares: str) -> None:
    with CodeTask(partial_credit=True, format_reward=0.2) as task:
        response = "def square(n): return 4 if n == 2 else 1"
        assert task.verify(response, squares).reward == pytest.approx(0.4)
        assert task.verify(block(response), squares).reward == pytest.approx(0.6)


def test_the_sandboxs_limits_are_reported(task: CodeTask, squares: str) -> None:
    assert task.verify(block("while True: pass"), squares).parts["timeout"] == 1.0
    assert task.verify(block("import os; os.abort()"), squares).parts["killed"] == 1.0


def test_programs_that_read_and_print_are_judged_by_their_output(task: CodeTask) -> None:
    tests = [StreamTest("1 2\n", "3\n"), StreamTest("5 5\n", "10")]
    answer = UnitTests(tests).dump()
    assert task.verify(block("a, b = map(int, input().split())\nprint(a + b, ' ')"), answer).correct
    assert task.verify(block("print(3)"), answer).parts["passed"] == 0.5
    late = block("a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)")
    assert not task.verify(late, answer).correct


def test_many_responses_are_judged_in_order_through_the_trainers_reward(task: CodeTask, squares: str) -> None:
    codes = [f"def square(n): return n * n + {n % 2}" for n in range(6)]
    rewards = reward_function(task)(["?"] * 6, [block(code) for code in codes], answer=[squares] * 6)
    assert rewards == [1.0, 0.0] * 3
    assert isinstance(task, Task)


# Published forms.


MBPP = {
    "text": "Write a function to add.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "test_setup_code": "import math",
}
HUMAN_EVAL = {
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Add up."""\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(xs)\n",
    "test": "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n"
    "    assert candidate([]) == 0, 'empty'\n    assert True\n",
}
APPS = {
    "question": "Double a number.",
    "input_output": json.dumps({"inputs": ["3\n", "0\n"], "outputs": ["6\n", "0\n"]}),
}
APPS_CALLS = {
    "question": "Double a number.",
    "input_output": json.dumps({"fn_name": "double", "inputs": [[3], [0]], "outputs": [6, 0]}),
}
APPS_CALLS_LISTED = {
    "question": "Divide, with the rest.",
    "starter_code": "def divide(a, b):\n\t",
    "input_output": json.dumps(
        {"fn_name": "divide", "inputs": [[7, 2], [4, 2]], "outputs": [[[3, 1]], [[2, 0]]]}
    ),
}
APPS_CLASS = {
    "question": "Double a number.",
    "starter_code": "class Solution:\n    def double(self, n: int) -> int:\n        ",
    "input_output": json.dumps({"fn_name": "double", "inputs": [[3], [0]], "outputs": [6, 0]}),
}
EURUS = {
    "prompt": [{"role": "system", "content": "Code."}, {"role": "user", "content": "Double."}],
    "reward_model": {"ground_truth": json.dumps({"inputs": ["3"], "outputs": ["6"]})},
}
OWN = {
    "prompt": "Halve.",
    "entry": "half",
    "tests": [{"call": "half(3)", "expected": 1.5}, {"call": "half(1)", "expected": 0.51, "tolerance": 0.02}],
}


@pytest.mark.parametrize(
    ("row", "good", "bad"),
    [
        (MBPP, "def add(a, b): return a + b", "def add(a, b): return a - b"),
        (HUMAN_EVAL, "def total(xs: List[int]): return sum(xs)", "def total(xs): return 3"),
        (HUMAN_EVAL, "    return sum(xs)", "    return 0"),
        (APPS, "print(2 * int(input()))", "print(6)"),
        (APPS_CALLS, "def double(n): return n + n", "def double(n): return 6"),
        (APPS_CALLS_LISTED, "divide = divmod", "def divide(a, b): return a // b, 0"),
        (APPS_CALLS_LISTED, "def divide(a, b): return [a // b, a % b]", "def divide(a, b): return a // b"),
        (
            APPS_CLASS,
            "class Solution:\n    def double(self, n): return 2 * n",
            "class Solution:\n    def double(self, n): return n",
        ),
        (EURUS, "print(2 * int(input()))", "print(input())"),
        (OWN, "half = lambda n: n / 2", "half = lambda n: n // 2"),
    ],
)
def test_rows_of_every_published_form_are_judged(
    task: CodeTask, row: dict[str, Any], good: str, bad: str
) -> None:
    problem = problem_of_row("row 1", row, "Answer in Python.")
    assert task.verify(block(good), problem.answer).correct
    assert not task.verify(block(bad), problem.answer).correct


def test_a_prompt_says_which_function_is_called() -> None:
    def asked(row: dict[str, Any]) -> str:
        return text(problem_of_row("row 1", row, "Answer in Python."))

    assert asked(APPS_CALLS_LISTED) == (
        "Divide, with the rest.\n\nBegin with this code.\n\n```python\ndef divide(a, b):\n```\n\n"
        "Answer in Python."
    )
    assert asked(APPS_CALLS) == "Double a number.\n\nThe function is called double.\n\nAnswer in Python."
    named = {**APPS_CALLS, "question": "Write double(n)."}
    assert asked(named) == "Write double(n).\n\nAnswer in Python."
    eurus = {**EURUS, "reward_model": {"ground_truth": APPS_CALLS["input_output"]}}
    assert problem_of_row("row 1", eurus, "").prompt[-1]["content"] == (
        "Double.\n\nThe function is called double."
    )


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("[[1, 2]]", "(1, 2)", True),
        ("[[1, 2]]", "[1, 2]", True),
        ("[1, 2]", "(1, 2)", True),
        ("[[[1, 2], [3, 4]]]", "[(1, 2), (3, 4)]", True),
        ("[5]", "5", True),
        ("[5]", "[5]", True),
        ("5", "[5]", False),
        ("[[1, 2]]", "1", False),
        ("[1, 2]", "1", False),
        ('["ab"]', "['a', 'b']", False),
        ("[]", "()", True),
        ("[[]]", "[]", True),
        ("[null]", "None", True),
    ],
)
def test_a_published_call_gives_its_value_or_the_only_element(
    task: CodeTask, expected: str, found: str, same: bool
) -> None:
    data = {"fn_name": "f", "inputs": [[]], "outputs": [json.loads(expected)]}
    problem = problem_of_row("row 1", {"question": "Do f.", "input_output": data}, "")
    assert task.verify(block(f"def f(): return {found}"), problem.answer).correct is same
    if "solution" in problem.metadata:
        assert task.verify(problem.metadata["solution"], problem.answer).correct


def test_only_inputs_of_the_tests_are_shown_to_the_model() -> None:
    shown = text(problem_of_row("row 1", MBPP, ""))
    assert "add(1, 2)" in shown
    assert "3" not in shown


def test_files_are_divided_and_unjudgeable_rows_counted_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**MBPP, "text": f"Task {n}."} for n in range(40)]
    unjudgeable = {**MBPP, "text": "Bad", "test_list": ["assert add(1, 2).equals(3)"]}
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, [*rows, unjudgeable])))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[30:])))
    task = CodeTask(tmp_path, instruction="")
    with caplog.at_level(logging.WARNING):
        parts = {split: {text(p).split(".")[0] for p in task.problems(split)} for split in get_args(Split)}
    assert parts["train"] | parts["validation"] == {f"Task {n}" for n in range(30)}
    assert parts["test"] == {f"Task {n}" for n in range(30, 40)}
    assert "Left out 1 of 41 rows" in caplog.text
    with pytest.raises(DataError, match=r"train\.jsonl:41: the assertion"):
        CodeTask(tmp_path, unjudgeable="refuse").problems("train")
    (tmp_path / "one.jsonl").write_text(json.dumps(unjudgeable))
    with pytest.raises(DataError, match="no problem that can be judged"):
        CodeTask(tmp_path / "one.jsonl").problems("train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "row 1: no tests"),
        ({"prompt": "x", "tests": "none"}, "'tests' must be a list"),
        ({"prompt": "x", "test_list": ["assert ("]}, "'test_list' is malformed"),
        *(
            (
                {"prompt": "x", "entry": "f", "tests": [{"call": "f(1)", "expected": 2, "tolerance": wrong}]},
                f"row 1: the tolerance {wrong!r} of a test is no distance",
            )
            for wrong in (-0.1, float("nan"), float("inf"), "0.1", True)
        ),
        (
            {"text": "x", "test_list": ["assert f(1) == 1", "assert g(1) == 1"]},
            "do not all call one function",
        ),
        ({"prompt": "x", "entry_point": "f", "test": "def other(): pass"}, "defines no function check"),
        ({"question": "x", "input_output": "{"}, "'input_output' is malformed"),
        ({"question": "x", "input_output": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"prompt": "x", "reward_model": {"style": "rule"}}, "'reward_model' is malformed"),
        ({"test_list": ["assert f(1) == 1"]}, "'test_list' is malformed"),
    ],
)
def test_malformed_rows_say_what_is_wrong(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        problem_of_row("row 1", row, "")


def test_senseless_settings_and_foreign_answers_are_refused(task: CodeTask) -> None:
    for options in (
        {"steps": -1}, {"steps": 7}, {"format_reward": 1.0}, {"unjudgeable": "ignore"}, {"examples": 9},
        {"examples": 1, "path": "rows.jsonl"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(options))):
            CodeTask(**options)  # type: ignore[arg-type]
    for answer in ("42", "{", json.dumps({"kind": "calls", "tests": [], "preamble": "", "entry": None})):
        with pytest.raises(DataError, match="holds no tests"):
            task.verify("x", answer)
