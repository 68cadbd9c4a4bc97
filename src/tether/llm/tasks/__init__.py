"""Verifiable tasks: one file a task, a plain dict of them, and what a trainer needs of one.

>>> task = make_task("arithmetic", digits=2)
>>> problem = task.problems("validation", limit=1)[0]
>>> task.verify("not a number", problem.answer).reward
0.0
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tether.llm.tasks.arithmetic import ArithmeticTask
from tether.llm.tasks.chained import ChainedTask
from tether.llm.tasks.code import CodeTask
from tether.llm.tasks.custom import CustomTask
from tether.llm.tasks.gsm8k import GSM8KTask
from tether.llm.tasks.math import MathTask
from tether.llm.tasks.options import bind_options
from tether.llm.tasks.protocol import Problem, Prompt, Split, Task, Verdict
from tether.llm.tasks.reasoning_gym import ReasoningGymTask
from tether.llm.tasks.training import reward_function, to_dataset
from tether.llm.tasks.word_problems import WordProblemsTask
from tether.names import look_up

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": ArithmeticTask,
    "chained": ChainedTask,
    "gsm8k": GSM8KTask,
    "math": MathTask,
    "amc": functools.partial(MathTask, benchmark="amc"),
    "aime": functools.partial(MathTask, benchmark="aime"),
    "reasoning_gym": ReasoningGymTask,
    "code": CodeTask,
    "custom": CustomTask,
    "word_problems": WordProblemsTask,
}
"""Every task by name."""


def make_task(name: str, /, **options: Any) -> Task:
    """Build a task from its name and options, as a configuration file gives them.

    Args:
        name: A key of `TASKS`, or where your own is: ``"package.module:name"``.
        **options: The task's own keywords.

    Raises:
        ConfigError: The name or an option is unknown, and the message lists what there is; or an option is of
            another type than the task's signature says.

    >>> make_task("chained", terms=3).max_response_tokens
    30
    >>> make_task("chaned")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tether.errors.ConfigError: Unknown task 'chaned'. Did you mean 'chained'? Known: aime, amc, ...
    """
    factory = look_up(name, TASKS, "task")
    task: Task = factory(**bind_options(name, factory, options))
    return task


__all__ = [
    "TASKS",
    "ArithmeticTask",
    "ChainedTask",
    "CodeTask",
    "CustomTask",
    "GSM8KTask",
    "MathTask",
    "Problem",
    "Prompt",
    "ReasoningGymTask",
    "Split",
    "Task",
    "Verdict",
    "WordProblemsTask",
    "make_task",
    "reward_function",
    "to_dataset",
]
