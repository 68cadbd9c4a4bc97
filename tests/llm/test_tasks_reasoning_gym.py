"""reasoning-gym: problems repeat, splits are disjoint, and what a right or wrong answer earns."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import get_args

import pytest
import reasoning_gym

from tether.errors import ConfigError, DataError
from tether.experiments.settings_file import options_from_file, read_option
from tether.llm.tasks import ReasoningGymTask, Split, make_task
from tether.llm.tasks import reasoning_gym as module
from tether.llm.tasks.protocol import Problem
from tether.llm.tasks.reasoning_gym import LONGEST_ANSWER, tagged_answer
from tether.llm.tasks.reasoning_gym_scores import contradicts


def _one(task: ReasoningGymTask) -> tuple[Problem, str]:
    (problem,) = task.problems("train", limit=1)
    return problem, problem.metadata["solution"].removeprefix("<answer>").removesuffix("</answer>")


def test_problems_repeat_and_splits_share_no_question() -> None:
    task = make_task("reasoning_gym", dataset="chain_sum", min_terms=2, max_terms=3)
    splits = {split: task.problems(split, limit=100) for split in get_args(Split)}
    assert splits["train"] == task.problems("train", limit=100)
    questions = [str(problem.prompt) for problems in splits.values() for problem in problems]
    assert len(questions) == len(set(questions)) == 300
    assert task.problems("train", limit=100, seed=1) != splits["train"]


def test_a_batch_gets_the_verdicts_of_its_members() -> None:
    task = ReasoningGymTask("chain_sum")
    problems = task.problems("train", limit=3)
    solutions = [problem.metadata["solution"] for problem in problems]
    responses = [solutions[0], "no answer", solutions[1]]
    verdicts = task.verify_many(responses, [problem.answer for problem in problems])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0]
    pairs = zip(responses, problems, strict=True)
    assert verdicts == [task.verify(response, problem.answer) for response, problem in pairs]
    assert task.verify_many([], []) == []


def test_lists_of_a_settings_file_reach_the_data_set(tmp_path: Path) -> None:
    """There they become words: polynomials in a quotation mark were asked for."""
    file = tmp_path / "run.yaml"
    file.write_text("task_options: {dataset: polynomial_multiplication, variables: [a, b]}")
    _, *words = options_from_file(file)
    options = dict(zip(words[::2], map(read_option, words[1::2]), strict=True))
    question, _ = _one(make_task("reasoning_gym", **options))
    (listed, _) = _one(ReasoningGymTask("polynomial_multiplication", variables=["a", "b"]))
    assert question.prompt == listed.prompt


def test_settings_that_are_lists_are_passed_on() -> None:
    task = ReasoningGymTask("calendar_arithmetic", tasks=["is_leap_year"])
    problem, answer = _one(task)
    assert answer in ("Yes", "No")
    assert task.verify(f"<answer>{answer}</answer>", problem.answer).correct
    with pytest.raises(ConfigError, match="something other than plain values"):
        ReasoningGymTask("chain_sum", min_terms=object())


# ------------------------------------------------------------------ which part of a response is the answer

FOUND = {
    "<answer>3</answer>": "3",
    "<answer>\n 3 \t</answer> that is": "3",
    "<answer>3</answer> no <answer>4</answer>": "4",
    "<answer>3</answer> or <answer>4": "3",
    "<answer> <answer>3</answer>": "3",
    "<answer>3</answer> </answer>": "3",
    "</answer><answer>3": None,
    "<answer>3": None,
    "3</answer>": None,
    "<answer></answer>": "",
    "": None,
}


@pytest.mark.parametrize("response", FOUND)
def test_the_last_complete_pair_of_tags_counts(response: str) -> None:
    assert tagged_answer(response) == FOUND[response]


def test_tags_inside_the_thinking_do_not_count() -> None:
    task = ReasoningGymTask("chain_sum")
    problem, answer = _one(task)
    tagged = f"<answer>{answer}</answer>"
    earning = [f"<think>hm, <answer>0</answer></think> {tagged}", f"hm</think>{tagged}"]
    nothing = [f"<think>{tagged}</think> 0", f"<think>hm {tagged}", f"{tagged}</think><answer>0</answer>"]
    verdicts = task.verify_many([*earning, *nothing], [problem.answer] * 5)
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_tags_are_needed_unless_told_otherwise() -> None:
    task = ReasoningGymTask("chain_sum")
    problem, answer = _one(task)
    assert task.verify(answer, problem.answer).parts["tagged"] == 0.0
    assert not task.verify(answer, problem.answer).correct
    assert ReasoningGymTask("chain_sum", require_tag=False).verify(f" {answer}\n", problem.answer).correct


# ------------------------------------------------------------------ what is paid

ANSWERS_TO = {
    # reference: (answers that may be right, answers that cannot be)
    "12": (
        ["12", " 12.0 ", "+12", "24/2", "12.1"],
        ["-12", "12 apples", "13", "nan", "1e999", "", "١٢", "12/0"],
    ),
    "1200": (["1,200"], ["1,2,0,0", "12,00"]),
    "0": (["0", "0.0", "-0"], ["0.001", "", "1"]),
    "0.109375": (["7/64", "0.109"], ["0", "0/1", "0.10"]),
    "True": (["true", " True\n"], ["False", "Yes", "1", "TrueFalse"]),
    "4.0 - 7.0i": (["4-7i", "(4 - 7i)"], ["nan", "NaN+1j", "nanj", "(nan)"]),
    "['1', '2']": (["[1, 2]"], ["[NaN, NaN]"]),
    "banana": (["banana", "nan", "12"], []),
}


@pytest.mark.parametrize("reference", ANSWERS_TO)
def test_an_answer_that_contradicts_the_reference_is_never_right(reference: str) -> None:
    possible, impossible = ANSWERS_TO[reference]
    assert [contradicts(answer, reference) for answer in possible] == [False] * len(possible)
    assert [contradicts(answer, reference) for answer in impossible] == [True] * len(impossible)


EXPLOITS = {
    "coin_flip": ["0", "0/1"],
    "complex_arithmetic": ["nan", "NaN", "nan+nanj"],
    "game_of_life_halting": ["anything", "0", "-"],
    "gsm_symbolic": ["-{}", "The answer is -{}"],
    "spell_backward": ["{}0", "{} and more"],
}


@pytest.mark.parametrize("name", EXPLOITS)
def test_known_ways_to_be_paid_for_wrong_answers_pay_nothing(name: str) -> None:
    """The data set's own scorer gives a full score, or more, for each of them in some problem."""
    raw = reasoning_gym.create_dataset(name, seed=7, size=60)
    for exploit in EXPLOITS[name]:
        assert max(raw.score_answer(exploit.format(entry["answer"]), entry) for entry in raw) >= 1
    task = ReasoningGymTask(name)
    problems = task.problems("train", limit=20)
    cases = [(problem, exploit) for problem in problems for exploit in EXPLOITS[name]]
    answers = [text.format(problem.metadata["solution"][8:-9]) for problem, text in cases]
    verdicts = task.verify_many(
        [f"<answer>{answer}</answer>" for answer in answers], [problem.answer for problem, _ in cases]
    )
    assert [verdict.reward for verdict in verdicts] == [0.0] * len(verdicts)
    own = task.verify_many([p.metadata["solution"] for p in problems], [p.answer for p in problems])
    assert all(verdict.correct for verdict in own)


def test_partial_credit_is_the_share_of_words_in_their_place() -> None:
    """word_sorting gives a word in its place an equal share, and 0.2 at least to a permutation."""
    strict, partial = (ReasoningGymTask("word_sorting", partial_credit=credit) for credit in (False, True))
    problem, answer = _one(strict)
    words = answer.split(", ")
    words[0], words[1] = words[1], words[0]
    response = f"<answer>{', '.join(words)}</answer>"
    share = max(0.2, 1 - 2 / len(words))
    assert partial.verify(response, problem.answer).reward == pytest.approx(share, rel=1e-12)
    assert strict.verify(response, problem.answer).reward == 0.0
    assert strict.verify(response, problem.answer).parts["score"] == pytest.approx(share, rel=1e-12)


def test_what_any_attempt_gets_is_no_partial_credit() -> None:
    """countdown gives 0.01 to anything and 0.05 to any formula."""
    task = ReasoningGymTask("countdown", partial_credit=True)
    problem, _ = _one(task)
    attempt = task.verify("<answer>1 + 1</answer>", problem.answer)
    assert 0 < attempt.parts["score"] <= 0.1
    assert attempt.reward == 0.0


def test_a_refused_answer_is_counted_and_scores_nothing() -> None:
    task = ReasoningGymTask("countdown", partial_credit=True)
    problem, answer = _one(task)
    refused = task.verify("<answer>open('x')</answer>", problem.answer)
    assert (refused.reward, refused.parts["refused"]) == (0.0, 1.0)
    long = f"{answer}{'+1-1' * (LONGEST_ANSWER // 4)}"
    assert task.verify(f"<answer>{long}</answer>", problem.answer).parts["refused"] == 1.0


# ------------------------------------------------------------------ what is refused when the task is made


def test_a_data_set_that_pays_wrong_answers_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"'puzzle24'.*another problem's answer.*docs/tasks\.md"):
        ReasoningGymTask("puzzle24")
    with pytest.raises(ConfigError, match=r"'composite'.*cannot be built"):
        ReasoningGymTask("composite", datasets=[{"name": "puzzle24", "weight": 1}])


def test_partial_credit_that_pays_blind_answers_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"partial_credit is refused for 'game_of_life'.*scores 0\.\d+"):
        ReasoningGymTask("game_of_life", partial_credit=True)
    ReasoningGymTask("game_of_life")


def test_another_version_of_reasoning_gym_is_said_to_be_unexamined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "9.9.9")
    module._warn_of_other_version.cache_clear()
    with caplog.at_level(logging.WARNING):
        module._warn_of_other_version()
    assert "9.9.9 is installed" in caplog.text
    module._warn_of_other_version.cache_clear()


def test_wrong_settings_are_refused_and_small_data_sets_give_all_they_have() -> None:
    with pytest.raises(ConfigError, match=r"no data set 'sudoku9'.*sudoku"):
        ReasoningGymTask("sudoku9")
    with pytest.raises(ConfigError, match="refuses the settings of 'chain_sum'"):
        ReasoningGymTask("chain_sum", colour="red")
    with pytest.raises(ConfigError, match="size is not the data set's to choose"):
        ReasoningGymTask("chain_sum", size=3)
    tiny = ReasoningGymTask("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    few = tiny.problems("test", limit=5000)
    assert 0 < len(few) < 5000
    assert tiny.problems("test", limit=len(few)) == few
    with pytest.raises(DataError, match="does not say which problem"):
        tiny.verify("<answer>3</answer>", "3")
