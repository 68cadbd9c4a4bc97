"""reasoning-gym: whatever a model writes, nothing of it is run, and its scoring ends in time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import reasoning_gym
from benchmarks.reasoning_gym_answers import HOSTILE
from reading_time import grows_linearly
from reasoning_gym.factory import DATASETS

from tether.llm.tasks import ReasoningGymTask
from tether.llm.tasks.judge import Judge
from tether.llm.tasks.protocol import after_thinking
from tether.llm.tasks.reasoning_gym import LONGEST_ANSWER, tagged_answer
from tether.llm.tasks.reasoning_gym_scores import as_text, contradicts, is_harmless, may_run

NAMES = sorted(set(DATASETS) - {"composite"})
EVALUATING = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
}
SECONDS = 2.0


def _problem(name: str) -> tuple[str, str | None]:
    entry = dict(reasoning_gym.create_dataset(name, seed=11, size=1)[0])
    return as_text(entry), None if entry["answer"] is None else str(entry["answer"])


@pytest.fixture(scope="module")
def every_data_set() -> Judge:
    """The task's scorer for all data sets, under the task's time limit."""
    file = Path(__file__).with_name("gym_scoring.py")
    judge = Judge(f"{file}:scorers", seconds=SECONDS, setup=[NAMES])
    judge.start()
    return judge


@pytest.mark.timeout(900)
def test_no_hostile_answer_holds_up_the_next_right_one_in_any_data_set(every_data_set: Judge) -> None:
    hostile = [*(answer for _, answer in HOSTILE), "x" * LONGEST_ANSWER]
    problems = {name: _problem(name) for name in NAMES}
    calls = [(name, problem, answer) for name, (problem, _) in problems.items() for answer in hostile]
    right = [(name, problem, answer) for name, (problem, answer) in problems.items() if answer is not None]
    start = time.monotonic()
    outcomes = every_data_set.ask_many([*calls, *right])
    elapsed = time.monotonic() - start
    stopped = [outcome.failure in ("timeout", "crash") for outcome in outcomes]
    assert any(stopped)  # else these answers would show nothing
    # Beyond what the stopped ones took a call costs a fork, on a slow machine.
    assert elapsed < SECONDS * sum(stopped) + 1.0 * len(outcomes)
    assert {outcome.value for outcome in outcomes[len(calls) :]} == {1.0}
    assert 1.0 not in {outcome.value for outcome in outcomes[: len(calls)]}


@pytest.mark.parametrize("name", ["countdown", "simple_integration"])
def test_an_endless_answer_is_stopped_and_its_batch_goes_on(name: str) -> None:
    task = ReasoningGymTask(name)
    (problem,) = task.problems("train", limit=1)
    responses = [*(f"<answer>{text}</answer>" for text in ("9**9**9", "+".join("x" * 40_000)))]
    start = time.monotonic()
    *hostile, right = task.verify_many([*responses, problem.metadata["solution"]], [problem.answer] * 3)
    assert time.monotonic() - start < 60  # unstopped, the first alone takes hours
    assert [verdict.reward for verdict in hostile] == [0.0, 0.0]
    assert hostile[0].parts["stopped"] == 1.0
    assert right.correct


# ------------------------------------------------------------------ nothing a model wrote is run

_WATCH = """
import sys, reasoning_gym
from reasoning_gym.factory import DATASETS
compiled = []
def watch(event, details):
    source = details[0] if event == "compile" else None
    if isinstance(source, bytes): source = source.decode(errors="replace")
    if isinstance(source, str) and "marker" in source: compiled.append(source)
sys.addaudithook(watch)
for name in sorted(set(DATASETS) - {"composite"}):
    dataset = reasoning_gym.create_dataset(name, seed=11, size=1)
    entry = dataset[0]
    compiled.clear()
    for form in ("{}", "[{}]", "{} + 1", "'{}'", "{{'{}': 1}}", "1 {} 2", '["{}"]', '{{"{}": 1}}'):
        answer = form.format("marker")
        try:
            dataset.score_answer(answer, dict(entry))
        except Exception:
            pass
    if compiled:
        print(name, file=sys.stderr)
"""


def test_the_scorers_that_run_an_answer_are_exactly_the_known_ones() -> None:
    """Python itself reports every text it compiles, so no scorer can run one unseen."""
    watched = subprocess.run([sys.executable, "-c", _WATCH], capture_output=True, text=True, check=True)
    found = {line for line in watched.stderr.splitlines() if line in DATASETS}
    assert found == EVALUATING
    assert found == {name for name in NAMES if may_run(name, DATASETS[name][0].__module__)}


@pytest.mark.parametrize("name", sorted(EVALUATING))
def test_no_answer_is_run_as_code(name: str, every_data_set: Judge, tmp_path: Path) -> None:
    file = tmp_path / "written"
    write = f"open({str(file)!r}, 'w')"
    answers = [write, f"[{write}]", f"x + {write}", repr(write), f"[{write!r}]", f"exec({write!r})"]
    problem, _ = _problem(name)
    outcomes = every_data_set.ask_many([(name, problem, answer) for answer in answers])
    assert [outcome.value for outcome in outcomes] == [None] * len(answers)
    assert not file.exists()


@pytest.mark.parametrize("answer", ["[open({file!r}, 'w')]", '"open({file!r}, chr(119))"'])
def test_a_scorer_alone_would_have_run_the_code(answer: str, tmp_path: Path) -> None:
    """The danger is real: an answer is run, and even a text in quotes is."""
    name = "spiral_matrix" if answer.startswith("[") else "simple_integration"
    dataset = reasoning_gym.create_dataset(name, seed=0, size=2)
    file = tmp_path / "written"
    dataset.score_answer(answer.format(file=str(file)), dataset[0])
    assert file.exists()


HARMLESS = (
    *(
        "42",
        "-3.5",
        "6*(98 - 54) - 34",
        "x**2 - 3*x + C",
        "-exp(x)*sin(x) + C",
        "[[1, 2], [0, 1]]",
        "9**9**9",
    ),
    *("ABC CBA", "2*X**(3/2)/3", "(x + 1)**3", "_ _ Q\nQ _ _", "exp(2*x)", "2**x", "x**(-1)", ".5*x"),
)
HARMFUL = (
    *("__import__('os')", "open('x')", "().__class__", "x.real", "[x for x in y]", "lambda: 0", "f'{x}'"),
    *(
        "'x'",
        '"x"',
        "x; y",
        "x = 1",
        "x.x",
        "1.0.x",
        "(x).exp",
        "ｅval(x)",
        "open(x)",
        "[__name__]",
        "x\\\ny",
    ),
)


@pytest.mark.parametrize("answer", HARMLESS)
def test_words_and_formulas_are_harmless(answer: str) -> None:
    assert is_harmless(answer)


@pytest.mark.parametrize("answer", HARMFUL)
def test_anything_else_is_not(answer: str) -> None:
    assert not is_harmless(answer)


# ------------------------------------------------------------------ reading takes linear time

RESPONSES: dict[str, Callable[[int], str]] = {
    "spaces": lambda size: "<answer>" + " " * size + "1",
    "spaces in tags": lambda size: "<answer>" + " " * size + "</answer>",
    "opening tags": lambda size: "<answer>" * (size // 8),
    "closing tags": lambda size: "</answer>" * (size // 9),
    "closing tags first": lambda size: "</answer>" * (size // 9) + "<answer>",
    "opening tags, then one closing": lambda size: "<answer>" * (size // 8) + "</answer>",
    "one opening, then closing tags": lambda size: "<answer>" + "</answer>" * (size // 9),
    "pairs": lambda size: "<answer> 1 </answer>" * (size // 20),
    "thinking opened": lambda size: "<think>" * (size // 7) + "<answer>1</answer>",
    "thinking closed": lambda size: "</think><answer>1</answer>" * (size // 26),
    "beginnings of tags": lambda size: "<answer" * (size // 7) + "</answer" * (size // 8),
}
ANSWERS: dict[str, Callable[[int], str]] = {
    "spaces": lambda size: "1" + " " * size + "1",
    "digits": lambda size: "1" * size,
    "brackets": lambda size: "(" * size,
    "words": lambda size: "ab " * (size // 3),
    "thousands": lambda size: "1,000" * (size // 5),
    "points": lambda size: "." * size,
    "nan": lambda size: "nan" * (size // 3),
}


@pytest.mark.parametrize("family", RESPONSES)
def test_finding_the_answer_takes_linear_time(family: str) -> None:
    def read(response: str) -> None:
        tagged_answer(after_thinking(response))

    assert grows_linearly(read, RESPONSES[family], 200_000)


@pytest.mark.parametrize("family", ANSWERS)
def test_checking_an_answer_takes_linear_time(family: str) -> None:
    def read(answer: str) -> None:
        is_harmless(answer)
        contradicts(answer, "12")
        contradicts(answer, "4 - 7i")

    assert grows_linearly(read, ANSWERS[family], 12_500)
