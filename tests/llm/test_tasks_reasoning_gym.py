"""reasoning-gym: every data set works, splits are disjoint, no answer is ever run as code."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from tether.errors import ConfigError, DataError
from tether.llm.tasks import ReasoningGymTask, Split, make_task
from tether.llm.tasks.reasoning_gym import is_plain

# Data sets that give no reference answer (many are right), and one that is made of others.
WITHOUT_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
NAMES = sorted(set(DATASETS) - {"composite"})


def test_problems_repeat_and_splits_share_no_question() -> None:
    task = make_task("reasoning_gym", dataset="chain_sum", min_terms=2, max_terms=3)
    splits = {split: task.problems(split, limit=100) for split in get_args(Split)}
    assert splits["train"] == task.problems("train", limit=100)
    questions = [str(problem.prompt) for problems in splits.values() for problem in problems]
    assert len(questions) == len(set(questions)) == 300
    assert task.problems("train", limit=100, seed=1) != splits["train"]


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_accepts_its_own_answer_and_runs_no_code(name: str, tmp_path: Path) -> None:
    task = ReasoningGymTask(name)
    (problem,) = task.problems("train", limit=1)
    solution = problem.metadata.get("solution")
    assert (solution is None) == (name in WITHOUT_REFERENCE)
    if solution is not None:
        assert task.verify(f"I think <answer>0</answer>, no: {solution}", problem.answer).correct
    file = tmp_path / "written"
    for code in (
        f"open({str(file)!r}, 'w')",
        f"[open({str(file)!r}, 'w')]",
        f"exec(\"open('{file}', 'w')\")",
    ):
        task.verify(f"<answer>{code}</answer>", problem.answer)
        assert not file.exists()


def test_a_scorer_alone_would_have_run_the_code(tmp_path: Path) -> None:
    """The danger is real: without the check, reasoning-gym's own scorer runs an answer."""
    dataset = reasoning_gym.create_dataset("spiral_matrix", seed=0, size=2)
    file = tmp_path / "written"
    dataset.score_answer(f"[open({str(file)!r}, 'w')]", dataset[0])
    assert file.exists()


PLAIN = (
    *("42", "-3.5", "6*(98 - 54) - 34", "x**2 - 3*x + C", "-exp(x)*sin(x) + C", "[[1, 'a'], [0, 1]]"),
    *("ABC CBA", "2*X**(3/2)/3", "(x + 1)**3", "_ _ Q\nQ _ _", "exp(2*x)", "{'a': True}", "2**x", "x**(-1)"),
)
CODE = ("__import__('os')", "open('x')", "().__class__", "x.real", "[x for x in y]", "lambda: 0", "f'{x}'")
ENDLESS = (
    *("9**9**9", "9**(9**9)**9", "9**10000", "9**(99)**(99)**(99)", "9**(9999*9999)", "9**(9999*x - x)"),
    *("((9**99)**99)**99 + (9**9)**9 + (8)**9", "N(pi, 9999999)", "factorial(9999)"),
    *("1" * 31 + "*x", "x" + "+x" * 400),
)


@pytest.mark.parametrize("answer", PLAIN)
def test_plain_values_and_formulas_pass(answer: str) -> None:
    assert is_plain(answer)


@pytest.mark.parametrize("answer", [*CODE, *ENDLESS, "a[0]", "x; y", "S(1)", "x = 1"])
def test_anything_else_is_refused(answer: str) -> None:
    assert not is_plain(answer)


def test_a_refused_answer_is_counted_and_scores_nothing() -> None:
    task = ReasoningGymTask("countdown", partial_credit=True)
    (problem,) = task.problems("test", limit=1)
    refused = task.verify("<answer>open('x')</answer>", problem.answer)
    assert (refused.reward, refused.parts["refused"]) == (0.0, 1.0)
    long = task.verify(f"<answer>{'1+' * 3000}1</answer>", problem.answer)
    assert long.parts["refused"] == 1.0


def test_partial_credit_is_reasoning_gyms_own_score() -> None:
    strict, partial = (ReasoningGymTask("chain_sum", partial_credit=credit) for credit in (False, True))
    (problem,) = strict.problems("train", limit=1)
    answer = problem.metadata["solution"].removeprefix("<answer>").removesuffix("</answer>")
    verbose = f"<answer>it is {answer} </answer>"
    entry_score = len(answer) / len(f"it is {answer}")
    assert partial.verify(verbose, problem.answer).reward == pytest.approx(entry_score)
    assert strict.verify(verbose, problem.answer).reward == 0.0
    assert strict.verify(verbose, problem.answer).parts["score"] == pytest.approx(entry_score)


def test_tags_are_needed_unless_told_otherwise() -> None:
    task = ReasoningGymTask("chain_sum")
    (problem,) = task.problems("train", limit=1)
    answer = problem.metadata["solution"].removeprefix("<answer>").removesuffix("</answer>")
    assert not task.verify(answer, problem.answer).correct
    assert ReasoningGymTask("chain_sum", require_tag=False).verify(f" {answer}\n", problem.answer).correct


def test_wrong_settings_and_small_data_sets_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no data set 'sudoku9'.*sudoku"):
        ReasoningGymTask("sudoku9")
    with pytest.raises(ConfigError, match="refuses the settings of 'chain_sum'"):
        ReasoningGymTask("chain_sum", colour="red")
    with pytest.raises(ConfigError, match="size is not the data set's to choose"):
        ReasoningGymTask("chain_sum", size=3)
    tiny = ReasoningGymTask("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    with pytest.raises(DataError, match=r"chain_sum gave only \d+ distinct"):
        tiny.problems("test", limit=5000)
    with pytest.raises(DataError, match="does not say which problem"):
        tiny.verify("<answer>3</answer>", "3")
