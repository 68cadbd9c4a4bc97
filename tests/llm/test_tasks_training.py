"""A task as TRL's trainers take it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tether.errors import ConfigError, DataError, InvalidInputError
from tether.llm.tasks import (
    ArithmeticTask,
    ChainedTask,
    GSM8KTask,
    Problem,
    Split,
    Task,
    Verdict,
    reward_function,
    to_dataset,
)

DATA = Path(__file__).parent / "data" / "gsm8k"


def test_a_dataset_holds_the_problems_in_order() -> None:
    problems = ArithmeticTask().problems("validation", limit=10, seed=3)
    dataset = to_dataset(ArithmeticTask(), "validation", limit=10, seed=3)
    assert dataset.column_names == ["prompt", "answer"]
    assert list(dataset["prompt"]) == [problem.prompt for problem in problems]
    assert list(dataset["answer"]) == [problem.answer for problem in problems]


def test_conversations_survive_the_dataset() -> None:
    first = to_dataset(GSM8KTask(DATA), "test")[0]
    assert first["prompt"] == GSM8KTask(DATA).problems("test")[0].prompt
    assert first["prompt"][0]["role"] == "user"


def test_rewards_follow_the_completions_as_text_or_messages() -> None:
    reward = reward_function(ChainedTask(terms=3))
    texts = ["1+1=2;2+1=3;#3", "#4"]
    arguments = {
        "completion_ids": [[1], [2]],
        "answer": ["3", "3"],
        "trainer_state": None,
        "difficulty": [0, 1],
    }
    assert reward(["", ""], texts, **arguments) == [1.0, 0.0]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert reward(prompts=[[], []], completions=messages, **arguments) == [1.0, 0.0]
    assert reward.__name__ == "chained_reward"


def test_a_dataset_without_answers_is_refused() -> None:
    with pytest.raises(DataError, match=r"no column 'answer'.*it has difficulty"):
        reward_function(ArithmeticTask())(["1+1="], ["2"], difficulty=[1])


def test_answers_must_match_completions_in_number_and_kind() -> None:
    reward = reward_function(ArithmeticTask())
    with pytest.raises(InvalidInputError, match="2 completions came with 1 answers"):
        reward(["1+1="] * 2, ["2", "2"], answer=["2"])
    with pytest.raises(InvalidInputError, match="text or messages"):
        reward(["1+1="], [[]], answer=["2"])


@pytest.mark.parametrize(("response", "reward"), [("strict", 0.0), ("kind", 0.5)])
def test_a_subclass_that_replaces_verify_alone_is_asked_by_it(response: str, reward: float) -> None:
    class Kind(GSM8KTask):
        def verify(self, response: str, problem_answer: str) -> Verdict:
            return Verdict(0.5 * (response == "kind"), False)

    assert reward_function(Kind(DATA))(["?"], [response], answer=["4"]) == [reward]


def test_an_answer_that_cannot_be_judged_in_time_leaves_the_others_of_its_batch() -> None:
    reward = reward_function(GSM8KTask(DATA, seconds=2))
    texts = [r"\boxed{18}", r"\boxed{9^{9^{9^{9^9}}}}", r"\boxed{\frac{36}{2}}", r"\boxed{17}"]
    assert reward(["?"] * 4, texts, answer=["18"] * 4) == [1.0, 0.0, 1.0, 0.0]


class Echo:
    name = "echo"
    chat = False
    max_response_tokens = 4
    reward: Any = 0.5

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        return [Problem("say a", "a")] if split == "train" else []

    def verify(self, response: str, problem_answer: str) -> Verdict:
        return Verdict(self.reward if response == "b" else 0.5, response == problem_answer)


@pytest.mark.parametrize("reward", [math.nan, -math.inf, np.float32("nan"), None, 10**400])
def test_a_reward_that_is_no_finite_number_stops_and_is_named(reward: Any) -> None:
    task = Echo()
    task.reward = reward
    with pytest.raises(
        ConfigError, match=r"Task 'echo' gave the reward .* to the response 'b'\. Mend its verify"
    ):
        reward_function(task)(["say a"] * 2, ["a", "b"], answer=["a"] * 2)


@pytest.mark.parametrize("reward", [True, -2, np.float32(0.5)])
def test_every_finite_number_is_a_reward(reward: Any) -> None:
    task = Echo()
    task.reward = reward
    assert reward_function(task)(["say a"], ["b"], answer=["a"]) == [reward]


def test_a_task_of_ones_own_needs_only_the_protocol() -> None:
    task: Task = Echo()
    assert isinstance(task, Task)
    assert reward_function(task)(["say a"], ["a"], answer=["a"]) == [0.5]
    assert to_dataset(task, "train").num_rows == 1
    with pytest.raises(DataError, match="no problems in its test split"):
        to_dataset(task, "test")
