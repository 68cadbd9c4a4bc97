"""The generated tasks: splits that share nothing, answers that are right, verdicts as worked out by hand."""

from __future__ import annotations

import operator
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tether.errors import ConfigError, DataError, InvalidInputError
from tether.llm.config import TrainConfig
from tether.llm.tasks import (
    TASKS,
    ArithmeticTask,
    ChainedTask,
    CodeTask,
    CustomTask,
    Task,
    WordProblemsTask,
    make_task,
)
from tether.llm.tasks.generated import draw_distinct
from tether.llm.tasks.protocol import Problem, Split, split_of
from tether.llm.tasks.word_problems import _canonical
from tether.llm.trainers import problems_in_training_order

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
GENERATED = [ArithmeticTask(), ArithmeticTask(digits=2), ChainedTask(), ChainedTask(terms=6)]


def terms_of(prompt: str) -> tuple[int, ...]:
    """The signed terms of a prompt in any order: the problem's identity, read off independently."""
    return tuple(sorted(int(term) for term in re.findall(r"[+-]?\d+", prompt)))


def evaluate(prompt: str) -> int:
    """Left-to-right value of a prompt such as ``23+45-17:``."""
    first, *rest = re.findall(r"\d+|[+-]", prompt)
    value = int(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        value = {"+": operator.add, "-": operator.sub}[sign](value, int(number))
    return value


@pytest.mark.parametrize("task", GENERATED, ids=lambda task: f"{task.name}-{task.max_response_tokens}")
def test_splits_share_no_problem_even_in_another_order_or_seed(task: Task) -> None:
    identities = {
        split: {
            terms_of(problem.prompt)
            for seed in range(3)
            for problem in task.problems(split, limit=400, seed=seed)
        }
        for split in SPLITS
    }
    assert all(identities.values())
    assert not identities["train"] & identities["validation"]
    assert not identities["train"] & identities["test"]
    assert not identities["validation"] & identities["test"]


def test_every_problem_of_a_small_space_is_in_exactly_one_split() -> None:
    whole_space = {(a, b) for a in range(1, 10) for b in range(a, 10)}
    found = [terms for split in SPLITS for terms in largest_split(split)]
    assert sorted(found) == sorted(whole_space)


def largest_split(split: Split) -> list[tuple[int, ...]]:
    """The identities of the most problems a split of one-digit sums can give."""
    task, problems = ArithmeticTask(digits=1, operations="+"), []
    for size in range(1, 46):
        try:
            problems = list(task.problems(split, limit=size))
        except DataError:
            break
    return [terms_of(problem.prompt) for problem in problems]


@pytest.mark.parametrize("task", GENERATED, ids=lambda task: f"{task.name}-{task.max_response_tokens}")
def test_answers_and_worked_solutions_are_right(task: Task) -> None:
    for problem in task.problems("train", limit=300):
        assert int(problem.answer) == evaluate(problem.prompt) >= 0
        verdict = task.verify(problem.metadata["solution"], problem.answer)
        assert verdict.correct
        assert verdict.reward == 1.0
        assert set(verdict.parts.values()) == {1.0}
        assert len(problem.metadata["solution"]) < task.max_response_tokens, "no room for the end token"


def test_the_default_chain_takes_20_to_60_characters() -> None:
    lengths = [
        len(problem.metadata["solution"]) + 1 for problem in ChainedTask().problems("train", limit=2000)
    ]
    assert min(lengths) >= 20
    assert max(lengths) <= 60


def test_the_same_arguments_give_the_same_problems_and_another_seed_gives_others() -> None:
    first = ChainedTask().problems("train", limit=50)
    assert first == ChainedTask().problems("train", limit=50)
    assert first[:20] == ChainedTask().problems("train", limit=20)
    assert not {p.prompt for p in first} & {
        p.prompt for p in ChainedTask().problems("train", limit=50, seed=1)
    }


def test_split_shares_follow_the_percentages() -> None:
    splits = [split_of(f"problem {index}", validation_percent=20, test_percent=5) for index in range(20_000)]
    assert splits.count("validation") == pytest.approx(4000, abs=4 * (20_000 * 0.2 * 0.8) ** 0.5)
    assert splits.count("test") == pytest.approx(1000, abs=4 * (20_000 * 0.05 * 0.95) ** 0.5)


@pytest.mark.parametrize(
    ("response", "correct", "well_formed"),
    [
        ("632", True, 1.0),
        (" 632\n", True, 1.0),
        ("0632", True, 1.0),
        ("633", False, 1.0),
        ("-632", False, 1.0),
        ("632 632", False, 0.0),
        ("374+258=632", False, 0.0),
        ("", False, 0.0),
        ("٦٣٢", False, 0.0),
        ("9" * 5000, False, 0.0),
    ],
)
def test_arithmetic_verdicts(response: str, correct: bool, well_formed: float) -> None:
    verdict = ArithmeticTask().verify(response, "632")
    assert (verdict.correct, verdict.reward) == (correct, float(correct))
    assert verdict.parts == {"well_formed": well_formed}


@pytest.mark.parametrize(
    ("response", "correct", "well_formed", "right"),
    [
        ("23+45=68;68-17=51;51+80=131;#131", True, 1, 1),
        ("23+45=67;67-17=50;50+80=130;#130", False, 1, 2 / 3),
        ("23+45=67;67-17=50;50+80=130;#131", True, 1, 2 / 3),
        ("23+45=68;69-17=52;52+80=132;#132", False, 2 / 3, 2 / 3),
        ("23+45=68;68-17=51;#131", True, 2 / 3, 2 / 3),
        ("#131", True, 0, 0),
        ("131", False, 0, 0),
        ("23+45=68;68-17=51;51+80=131;#131#131", False, 1, 1),
        ("23+45=68;68-17=51;51+80=131;#131 or more", False, 1, 1),
        ("", False, 0, 0),
    ],
)
def test_chained_verdicts(response: str, correct: bool, well_formed: float, right: float) -> None:
    verdict = ChainedTask().verify(response, "131")
    assert (verdict.correct, verdict.reward) == (correct, float(correct))
    assert verdict.parts == pytest.approx({"well_formed_steps": well_formed, "correct_steps": right})


def test_of_a_split_with_fewer_problems_than_asked_for_all_are_given() -> None:
    few = ArithmeticTask(digits=1).problems("test", limit=5000)
    assert 0 < len(few) < 200
    assert ArithmeticTask(digits=1).problems("test", limit=len(few)) == few


def test_a_split_without_a_problem_is_refused() -> None:
    with pytest.raises(DataError, match="test split of task 'one' holds no problem"):
        draw_distinct(lambda rng: ("100+374", Problem("", "")), "one", "test", 1, seed=0)


def test_training_goes_through_a_small_split_again_and_again() -> None:
    """As it does with a file's rows."""
    config = TrainConfig(task="arithmetic", steps=64)
    asked = problems_in_training_order(config, ArithmeticTask(digits=1))["prompt"]
    times = Counter(asked)
    assert (len(asked), len(times)) == (512, len(ArithmeticTask(digits=1).problems("train", limit=512)))
    assert max(times.values()) - min(times.values()) <= 1


def test_drawing_passes_over_repeats_and_other_splits() -> None:
    def draw(rng: random.Random) -> tuple[str, Problem]:
        number = rng.randrange(50)
        return str(number), Problem(str(number), str(number))

    drawn = [problem.prompt for problem in draw_distinct(draw, "numbers", "train", 20, seed=0)]
    assert len(set(drawn)) == 20
    assert {split_of(prompt) for prompt in drawn} == {"train"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmetic", {"digits": 0}, "digits is 0"),
        ("arithmetic", {"operations": "*"}, r"operations is '\*'"),
        ("arithmetic", {"terms": 3}, "Its options are: digits, operations"),
        ("chained", {"terms": 2}, "terms is 2"),
        ("word_problems", {"steps": 3}, "steps is 3"),
        ("word_problems", {"largest": 5}, "largest is 5"),
        ("word_problems", {"examples": 9}, "examples is 9; the word_problems task takes 0 to 8"),
        ("word_problems", {"operations": "+^"}, r"operations is '\+\^'"),
        ("word_problems", {"operations": "/", "steps": 2}, "No story of steps=2"),
        ("chess", {}, "Known: aime, amc, arithmetic, chained"),
    ],
)
def test_wrong_names_and_options_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("code", {"partial_credit": "no"}, "'code': partial_credit is 'no'; give true or false"),
        ("code", {"partial_credit": 1}, "partial_credit is 1; give true or false"),
        ("code", {"memory_limit": "1G"}, "memory_limit is '1G'; give a whole number"),
        ("code", {"steps": "x"}, "steps is 'x'; give a whole number"),
        ("code", {"total_time_limit": "x"}, "total_time_limit is 'x'; give a number or None"),
        ("chained", {"terms": 3.5}, r"terms is 3\.5; give a whole number"),
        ("chained", {"terms": True}, "terms is True; give a whole number"),
        ("gsm8k", {"seconds": "abc"}, "seconds is 'abc'; give a number"),
        ("aime", {"instruction": 5}, "'aime': instruction is 5; give text"),
        ("custom", {"path": "x", "verifier": 5}, "verifier is 5; give text"),
        ("custom", {"path": True}, "path is True; give text or a path"),
        ("custom", {"path": "x", "max_response_tokens": 2.5}, r"max_response_tokens is 2\.5; give a whole"),
        ("arithmetic", {"name": "x"}, "'arithmetic': got an unexpected keyword argument 'name'"),
    ],
)
def test_options_of_another_type_are_refused_by_name(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(name, **options)


def test_what_a_command_line_cannot_tell_apart_is_read_as_the_task_means_it() -> None:
    task = make_task("custom", path=2024, chat="False", seconds=3)
    assert isinstance(task, CustomTask)
    assert (task.path, task.chat) == (Path("2024"), False)
    assert make_task("custom", path="007", seconds="3e0", max_response_tokens="08").max_response_tokens == 8
    credit = make_task("code", partial_credit="TRUE", workers=None)
    assert isinstance(credit, CodeTask)
    assert credit.partial_credit is True


def test_options_that_say_no_type_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(size, words: list[str], hidden: Nowhere = None):  # type: ignore[no-untyped-def,name-defined] # noqa: F821
        return size, words, hidden

    monkeypatch.setitem(TASKS, "own", own)
    assert make_task("own", size="false", words="x", hidden=3) == ("false", "x", 3)
    monkeypatch.setitem(TASKS, "own", lambda **options: options)
    assert make_task("own", name="x") == {"name": "x"}


@pytest.mark.parametrize(("split", "limit"), [("holdout", 5), ("train", 0), ("train", -1)])
def test_wrong_requests_are_refused(split: Split, limit: int) -> None:
    with pytest.raises(InvalidInputError):
        ArithmeticTask().problems(split, limit=limit)


def test_bad_split_shares_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave some per cent"):
        split_of("key", validation_percent=60, test_percent=40)


CALCULATIONS = {
    r"has (\d+) \w+ and buys (\d+) more": "a + b",
    r"found (\d+) \w+ on Monday and (\d+) on Tuesday": "a + b",
    r"are (\d+) \w+ on a table and (\d+) on a chair": "a + b",
    r"had (\d+) \w+ and gave away (\d+) of them": "a - b",
    r"had (\d+) \w+ and sold (\d+)": "a - b",
    r"has (\d+) \w+, a friend has (\d+)\.": "a - b",
    r"fills (\d+) \w+ with (\d+) \w+ each\. How many": "a * b",
    r"pays (\d+) dollars for each of (\d+)": "a * b",
    r"shares (\d+) \w+ among (\d+) children": "a / b",
    r"puts (\d+) \w+ into (\d+) \w+, as many in each": "a / b",
    r"has (\d+) \w+, buys (\d+) and gives away (\d+)": "a + b - c",
    r"had (\d+) \w+, lost (\d+) and found (\d+)": "a - b + c",
    r"(\d+) \w+ lie here, (\d+) there and (\d+) in a box": "a + b + c",
    r"fills (\d+) \w+ with (\d+) \w+ each and has (\d+) left": "a * b + c",
    r"fills (\d+) \w+ with (\d+) \w+ each and sells (\d+)": "a * b - c",
}


def read_story(text: str) -> tuple[str, list[int]]:
    """The calculation of a story and its numbers, read off its words."""
    found = [(kind, match) for words, kind in CALCULATIONS.items() if (match := re.search(words, text))]
    assert len(found) == 1, text
    return found[0][0], [int(number) for number in found[0][1].groups()]


@pytest.mark.parametrize("steps", [1, 2])
def test_word_problems_ask_what_their_answer_says(steps: int) -> None:
    task = WordProblemsTask(steps=steps, operations="+-*/", instruction="")
    kinds = set()
    for problem in task.problems("train", limit=300):
        kind, numbers = read_story(problem.prompt[0]["content"])
        kinds.add(kind)
        value = eval(kind, dict(zip("abc", numbers, strict=False)))  # noqa: S307
        assert float(problem.answer) == value > 0
        assert task.verify(problem.metadata["solution"], problem.answer).correct
    assert len(kinds) == {1: 4, 2: 5}[steps]


@pytest.mark.parametrize("steps", [1, 2])
def test_no_calculation_of_a_word_problem_is_in_two_splits(steps: int) -> None:
    """Whatever the story, and whatever the order of numbers that may be exchanged."""
    task, found = WordProblemsTask(steps=steps, operations="+-*/", instruction=""), {}
    for split in SPLITS:
        found[split] = set()
        for problem in task.problems(split, limit=400):
            kind, numbers = read_story(problem.prompt[0]["content"])
            if "*" in kind or "/" in kind:
                ordered = sorted(numbers[:2]) if "*" in kind else numbers[:2]
                found[split].add((kind, *ordered, *numbers[2:]))
            else:
                signs = [1, *(1 if sign == "+" else -1 for sign in re.findall("[+-]", kind))]
                found[split].add(tuple(sorted(s * n for s, n in zip(signs, numbers, strict=True))))
    assert not found["train"] & found["validation"]
    assert not found["train"] & found["test"]
    assert not found["validation"] & found["test"]


@pytest.mark.parametrize("options", [{"examples": 3}, {"examples": 8, "steps": 2, "operations": "+-*/"}])
def test_word_problems_after_examples_of_the_training_split(options: dict[str, Any]) -> None:
    task, plain = WordProblemsTask(**options), WordProblemsTask(**options | {"examples": 0})
    [*shown, asked], *others = [problem.prompt for problem in task.problems("test", limit=20)]
    assert [asked] == plain.problems("test", limit=1)[0].prompt
    assert all(other[:-1] == shown for other in others)
    assert [turn["role"] for turn in shown] == ["user", "assistant"] * options["examples"]
    kinds = set()
    for question, answer in zip(shown[::2], shown[1::2], strict=True):
        kind, numbers = read_story(question["content"])
        kinds.add(kind)
        written, _, value = answer["content"].partition(" = ")
        assert [int(number) for number in re.findall(r"\d+", written)] == numbers
        assert eval(kind, dict(zip("abc", numbers, strict=False))) == int(value)  # noqa: S307
        assert split_of(_canonical(written.replace("/", "//"))) == "train"
    assert len(kinds) == {3: 2, 8: 5}[options["examples"]]


def test_word_problems_have_no_other_operations_than_asked_for() -> None:
    for operations in ("+", "-", "+-", "*"):
        signs = {
            problem.metadata["solution"].split()[1]
            for problem in WordProblemsTask(operations=operations).problems("train", limit=100)
        }
        assert signs == set(operations)


@pytest.mark.parametrize(
    ("response", "correct", "number"),
    [
        ("Ana has 42 apples now.", True, 1.0),
        ("12 + 30 = 42", True, 1.0),
        ("There are 42 apples, 30 of them new.", False, 1.0),
        ("Ana has forty-two.", False, 0.0),
        ("", False, 0.0),
    ],
)
def test_word_problem_verdicts(response: str, correct: bool, number: float) -> None:
    verdict = WordProblemsTask().verify(response, "42")
    assert (verdict.correct, verdict.reward, verdict.parts) == (correct, float(correct), {"number": number})
