"""A task in the form TRL's trainers take: a dataset and a reward function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tether.errors import ConfigError, DataError, InvalidInputError, MissingDependencyError
from tether.llm.tasks.protocol import BatchTask, Split, Task, Verdict

if TYPE_CHECKING:
    from datasets import Dataset

PARTS = "reward_parts/"
"""What the names of a verdict's parts begin with where TRL logs them."""

Completion = str | list[dict[str, Any]]
"""A response as TRL hands it over: text, or the messages that continue a conversation."""


def to_dataset(task: Task, split: Split, limit: int | None = None, seed: int = 0) -> Dataset:
    """Turn a split of a task into the dataset TRL's trainers read.

    Args:
        task: Any task.
        split: ``"train"``, ``"validation"`` or ``"test"``.
        limit: How many problems; None takes the task's default.
        seed: Which problems, and their order.

    Returns:
        A dataset with columns ``"prompt"`` (text or messages) and ``"answer"`` (text).

    Raises:
        MissingDependencyError: `datasets` is not installed.
        DataError: The split is empty or the task's data cannot be read.

    >>> from tether.llm.tasks import ArithmeticTask
    >>> to_dataset(ArithmeticTask(digits=1), "train", limit=1)[0]
    {'prompt': '9-4=', 'answer': '5'}
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingDependencyError("A dataset needs `datasets`. Install tether-rl[llm].") from error
    problems = task.problems(split, limit, seed)
    if not problems:
        raise DataError(
            f"Task {task.name!r} has no problems in its {split} split; there is nothing to learn."
        )
    return Dataset.from_dict(
        {
            "prompt": [problem.prompt for problem in problems],
            "answer": [problem.answer for problem in problems],
        }
    )


def reward_function(task: Task) -> Callable[..., list[float]]:
    """Give TRL's trainers a reward function that checks responses with `task`.

    The result takes ``(prompts, completions, completion_ids=None, *, answer, **columns)`` and returns one
    reward a completion. Completions are strings or, for conversations, lists of messages of which the
    last one's content counts. It carries the name ``<task>_reward``, under which TRL logs it; the verdicts'
    parts are logged beside it, as ``reward_parts/<name>``.

    Raises:
        DataError: (from the result) the dataset has no column ``"answer"``.
        InvalidInputError: (from the result) completions and answers differ in number.

    >>> from tether.llm.tasks import ArithmeticTask
    >>> reward_function(ArithmeticTask())(["374+258="] * 2, ["632", "633"], answer=["632", "632"])
    [1.0, 0.0]
    """

    def reward(
        prompts: list[Any],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> list[float]:
        if "answer" not in columns:
            raise DataError(
                f"The dataset has no column 'answer', which task {task.name!r} checks responses "
                "against; it has "
                f"{', '.join(sorted(columns)) or 'none besides the prompt'}. Build it with to_dataset."
            )
        answers = columns["answer"]
        if len(answers) != len(completions):
            raise InvalidInputError(
                f"{len(completions)} completions came with {len(answers)} answers; give one answer a "
                "completion."
            )
        texts = [completion_text(completion) for completion in completions]
        verdicts = verify_all(task, texts, answers)
        log = columns.get("log_metric")
        if log is not None:
            for name, mean in mean_parts(verdicts).items():
                log(PARTS + name, mean)
        return [verdict.reward for verdict in verdicts]

    reward.__name__ = f"{task.name}_reward"
    return reward


def mean_parts(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The mean of each named part over the verdicts that have it.

    >>> mean_parts([Verdict(1.0, True, {"boxed": 1.0}), Verdict(0.0, False, {"boxed": 0.0})])
    {'boxed': 0.5}
    """
    values: dict[str, list[float]] = {}
    for verdict in verdicts:
        for name, value in verdict.parts.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def verify_all(task: Task, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
    """Check responses against their answers, together where the task is faster that way.

    Raises:
        ConfigError: The task gives a reward that is no finite number, which no trainer can learn from.

    >>> from tether.llm.tasks import ArithmeticTask
    >>> [verdict.correct for verdict in verify_all(ArithmeticTask(), ["3", "4"], ["3", "5"])]
    [True, False]
    """
    if isinstance(task, BatchTask) and _verifies_together(type(task)):
        verdicts = task.verify_many(responses, answers)
    else:
        verdicts = [task.verify(text, answer) for text, answer in zip(responses, answers, strict=True)]
    for text, verdict in zip(responses, verdicts, strict=True):
        if not _is_finite(verdict.reward):
            raise ConfigError(
                f"Task {task.name!r} gave the reward {verdict.reward!r} to the response {text!r:.200}. Mend "
                "its verify: it must give a finite number to whatever a model writes."
            )
    return verdicts


def _is_finite(reward: object) -> bool:
    try:
        return math.isfinite(reward)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):  # None, a text, an integer beyond all floats
        return False


def _verifies_together(kind: type) -> bool:
    """Whether `verify_many` is as new as `verify`: a subclass may have replaced `verify` alone."""
    defining = (vars(cls) for cls in kind.__mro__ if {"verify", "verify_many"} & vars(cls).keys())
    return "verify_many" in next(defining, {"verify_many"})


@contextmanager
def closing(task: Task) -> Iterator[None]:
    """Give back what a task holds beside memory (a sandbox, a checking process) when the block ends."""
    try:
        yield
    finally:
        close = getattr(task, "close", None)
        if close is not None:
            close()


def completion_text(completion: Completion) -> str:
    """Give the text of a response that is text or a list of messages.

    Raises:
        InvalidInputError: The completion is neither, or its last message has no text.

    >>> completion_text([{"role": "assistant", "content": "632"}])
    '632'
    """
    if isinstance(completion, str):
        return completion
    if completion and isinstance(completion[-1].get("content"), str):
        return str(completion[-1]["content"])
    raise InvalidInputError(
        f"A completion must be text or messages ending in text content, but it is {completion!r:.200}."
    )
