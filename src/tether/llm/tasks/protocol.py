"""What a verifiable task is: problems with checkable answers, and the check itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from tether.errors import ConfigError, InvalidInputError

Split = Literal["train", "validation", "test"]
"""The parts a task's problems fall into; no problem is in two of them."""

Prompt = str | list[dict[str, str]]
"""Plain text to be continued, or a conversation of ``{"role": ..., "content": ...}`` messages."""


@dataclass(frozen=True)
class Problem:
    """One problem: what the model reads and the answer a response is checked against.

    >>> Problem(prompt="374+258=", answer="632").answer
    '632'
    """

    prompt: Prompt
    """What the model is given."""
    answer: str
    """The reference answer, in the form the task's `verify` expects."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever else is known; ``"solution"`` is a full correct response where the task has one."""


@dataclass(frozen=True)
class Verdict:
    """What checking one response found.

    >>> Verdict(reward=1.0, correct=True).parts
    {}
    """

    reward: float
    """What reinforcement learning maximises."""
    correct: bool
    """Whether the final answer is right; success rates count this."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components for logs; they do not enter the reward unless the task says so."""


@runtime_checkable
class Task(Protocol):
    """Problems whose responses a program can check.

    A new task is a class with these members, in any module: ``package.module:name`` is its name on the
    command line and in YAML (`examples/own_task.py`). Those of this package are in `tether.llm.tasks.TASKS`.
    """

    name: str
    """The name `make_task` knows it by."""
    chat: bool
    """Whether prompts are conversations, to be rendered by the tokenizer's chat template."""
    max_response_tokens: int
    """A response length, in tokens, that suits the task; a suggestion for the trainer."""

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """The first `limit` problems of a split in the order `seed` gives, all of one that has fewer; None
        takes the default number."""
        ...

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """Check a response, decoded without special tokens, against a problem's answer."""
        ...


@runtime_checkable
class BatchTask(Task, Protocol):
    """A task that checks many responses faster together than one by one."""

    def verify_many(self, responses: Sequence[str], problem_answers: Sequence[str]) -> list[Verdict]:
        """The verdicts `verify` would give, in order."""
        ...


def check_request(split: str, limit: int | None) -> None:
    """Refuse an unknown split or a limit below one.

    Raises:
        InvalidInputError: `split` is not one of train, validation, test, or `limit` is below 1.

    >>> check_request("train", 8)
    """
    if split not in get_args(Split):
        raise InvalidInputError(f"Unknown split {split!r}. Use one of: {', '.join(get_args(Split))}.")
    if limit is not None and limit < 1:
        raise InvalidInputError(
            f"limit is {limit}, but a split needs at least one problem. Use None for all."
        )


def split_of(key: str, *, validation_percent: int = 10, test_percent: int = 10) -> Split:
    """Say which split a problem belongs to, from its identity alone.

    The whole space of problems is partitioned by a hash of `key`, so two splits cannot share a problem
    however many are drawn and whichever seed draws them. Give equivalent problems (37+58 and 58+37) the
    same key.

    Args:
        key: The problem's canonical identity.
        validation_percent: Share of the space, in per cent, kept for validation.
        test_percent: Share of the space, in per cent, kept for the test split.

    Raises:
        ConfigError: The shares are negative or leave nothing to train on.

    >>> split_of("100+374")
    'train'
    """
    if min(validation_percent, test_percent) < 0 or validation_percent + test_percent >= 100:
        raise ConfigError(
            f"validation_percent {validation_percent} and test_percent {test_percent} must be at least 0 and "
            "leave some per cent for training. Lower them."
        )
    bucket = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 100
    if bucket < test_percent:
        return "test"
    return "validation" if bucket < test_percent + validation_percent else "train"


def after_thinking(response: str) -> str:
    r"""What follows a response's thinking, the only place where an answer counts.

    Thinking is what stands between ``<think>`` and ``</think>``. Chat templates may have put the first of
    the two in the prompt, so all before the last ``</think>`` is thinking. Nothing follows thinking that is
    not closed. A response without these tags is its own answer.

    >>> after_thinking(r"<think>Is it \boxed{4}?</think> It is \boxed{5}.")
    ' It is \\boxed{5}.'
    >>> after_thinking(r"<think>Is it \boxed{4}?")
    ''
    """
    closed = response.rfind("</think>")
    if response.rfind("<think>") > closed:
        return ""
    return response if closed < 0 else response[closed + len("</think>") :]
