"""Programming problems with unit tests, run in the sandbox and judged outside it."""

from __future__ import annotations

import functools
import json
import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

from tether.errors import ConfigError, DataError
from tether.llm.sandbox import Sandbox
from tether.llm.tasks.code_cases import UnitTests
from tether.llm.tasks.code_generated import draw_problem
from tether.llm.tasks.code_harness import OUTPUT
from tether.llm.tasks.code_judge import CodeJudge
from tether.llm.tasks.code_one_liners import FUNCTIONS, draw_one_liner
from tether.llm.tasks.code_rows import problem_of_row
from tether.llm.tasks.data import DataTask, Located, read_hub, read_jsonl
from tether.llm.tasks.generated import after_examples, check_examples, draw_distinct, spread
from tether.llm.tasks.protocol import Problem, Split, Verdict, check_request

_log = logging.getLogger(__name__)

INSTRUCTION = "Answer with one Python code block (```python ... ```)."
Unjudgeable = Literal["skip", "refuse"]
"""What to do with a row whose tests cannot be judged outside the sandbox."""


class CodeTask(DataTask[Problem]):
    """Give a model programming problems and reward it when its code passes their tests.

    By default the problems come from a generator: a few steps on a list of integers. JSONL files and hub
    data sets in the forms of MBPP, HumanEval, APPS and Eurus are read as well; docs/tasks.md names the
    fields. Code runs in `tether.llm.sandbox` alone. What a test expects stays outside: the sandboxed
    process evaluates calls, or reads its input, and what it gives is compared here. So nothing a response
    does to its own process, be it leaving early with code 0 or replacing Python's functions, is worth
    anything.

    Args:
        path: None for generated problems; a JSONL file, or a folder with ``train.jsonl`` and
            ``test.jsonl``; or ``"hub:<name>"``, optionally ``"hub:<name>:<configuration>"``, whose splits
            are called train and test.
        steps: Steps of a generated problem before it returns something; 0 for functions that one line is
            enough for, of numbers, lists and text.
        instruction: Appended to every problem.
        partial_credit: Whether the reward is the share of tests passed. False rewards all or nothing.
        format_reward: Added to the reward of a response with a code block, right or wrong.
        time_limit: Seconds for all calls of a problem, or for one input. After a time-out, the problem's
            other inputs are not tried; they count as failed.
        total_time_limit: Seconds for all inputs of a problem together, by default 12 times `time_limit`;
            inputs not reached count as failed.
        memory_limit: Bytes.
        workers: Programs that run at a time; by default one a usable processor.
        unjudgeable: Whether a row whose tests cannot be judged outside is skipped, with a warning that
            counts them, or refused.
        examples: Generated problems shown with their solutions before each problem, as turns of its
            conversation, up to 8: what a pretrained model needs that was taught no conversation. The same
            ones always, of the training split; without an `instruction` their solutions are bare code, of one
            line where that is enough.

    Raises:
        ConfigError: Settings out of range; `examples` for problems of a `path`.
        DataError: (from `problems`) data that is missing, empty or malformed, naming file and line.
        MissingDependencyError: (from `verify`) nothing here can isolate a program.

    >>> with CodeTask() as task:
    ...     problem = task.problems("train", limit=1)[0]
    ...     task.verify(problem.metadata["solution"], problem.answer).correct
    True
    """

    name = stream = "code"
    chat = True

    def __init__(
        self,
        path: str | Path | None = None,
        steps: int = 2,
        instruction: str = INSTRUCTION,
        partial_credit: bool = False,
        format_reward: float = 0.0,
        time_limit: float = 5.0,
        total_time_limit: float | None = None,
        memory_limit: int = 512 * 2**20,
        workers: int | None = None,
        unjudgeable: Unjudgeable = "skip",
        examples: int = 0,
    ) -> None:
        if not 0 <= steps <= 6:
            raise ConfigError(f"steps is {steps}; the code task takes 0 to 6.")
        if not 0 <= format_reward < 1:
            raise ConfigError(f"format_reward is {format_reward}; give at least 0 and less than 1.")
        total_time_limit = 12 * time_limit if total_time_limit is None else total_time_limit
        if not total_time_limit >= time_limit > 0:
            raise ConfigError(
                f"time_limit is {time_limit} s and total_time_limit {total_time_limit} s; give more than 0, "
                "and at least as much for all inputs together as for one."
            )
        if unjudgeable not in get_args(Unjudgeable):
            raise ConfigError(f"unjudgeable is {unjudgeable!r}; use 'skip' or 'refuse'.")
        check_examples(examples, self.name)
        if examples and path is not None:
            raise ConfigError(
                f"examples is {examples} and path is {path}: only generated problems are shown with their "
                "solutions. Leave one of them out."
            )
        self.path = path
        self.steps = steps
        self.examples = examples
        self.instruction = instruction
        self.partial_credit = partial_credit
        self.format_reward = format_reward
        self.time_limit = time_limit
        self.total_time_limit = total_time_limit
        self.memory_limit = memory_limit
        self.unjudgeable = unjudgeable
        self.max_response_tokens = 768 if path is not None else 192 if steps else 64
        self._sandbox = Sandbox(workers, output_limit=OUTPUT)
        self._opening = threading.Lock()

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """Generate or read the problems of a split; the same arguments always give the same list.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``; no problem is in two of them.
            limit: How many at most; None gives all of a data set, or 8192 and 512 generated ones for
                training and the others.
            seed: Which ones, and their order.

        Raises:
            InvalidInputError: An unknown split, or `limit` below 1.
            DataError: Data that is missing, empty or malformed, or a split without a problem.
        """
        if self.path is not None:
            return super().problems(split, limit, seed)
        check_request(split, limit)
        name = f"{self.name}/{self.steps}"
        found = draw_distinct(self._draw, name, split, limit, seed)
        return after_examples(found, name, self._draws_of_examples())

    def _draws_of_examples(self) -> list[Callable[[random.Random], tuple[str, Problem]]]:
        """Of functions of one line each another one."""
        if self.steps:
            return [self._draw] * self.examples
        return [
            functools.partial(draw_one_liner, instruction=self.instruction, function=function)
            for function in spread(FUNCTIONS, self.examples)
        ]

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        if self.steps == 0:
            return draw_one_liner(rng, self.instruction)
        return draw_problem(rng, self.steps, self.instruction)

    def verify_many(self, responses: Sequence[str], problem_answers: Sequence[str]) -> list[Verdict]:
        """Reward 1 if the code of a response passes every test of its problem, 0 otherwise.

        The code is the last block between triple backquotes that defines the function asked for, or the
        last one; without any block, the whole response. Parts: ``"block"`` is 1 when there is a block,
        ``"passed"`` the share of tests passed, ``"timeout"``, ``"memory"`` and ``"killed"`` are 1 when
        the sandbox had to stop the code. All of the sandbox's workers check at once.

        Raises:
            DataError: An answer that is none of this task's.
            MissingDependencyError: Nothing here can isolate a program; says what to install.
        """
        with self._opening:
            self._sandbox.open()
        tests = {answer: UnitTests.load(answer) for answer in problem_answers}
        pairs = list(zip(responses, problem_answers, strict=True))
        judge = CodeJudge(
            self._sandbox,
            self.partial_credit,
            self.format_reward,
            self.time_limit,
            self.total_time_limit,
            self.memory_limit,
        )
        # Each worker runs and judges one response at a time, so no more outputs are held than workers.
        with ThreadPoolExecutor(self._sandbox.workers, thread_name_prefix="tether-code") as pool:
            return list(pool.map(lambda pair: judge.verdict(pair[0], tests[pair[1]]), pairs))

    def close(self) -> None:
        """Close the sandbox; a later check opens it again."""
        self._sandbox.close()

    def __enter__(self) -> CodeTask:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_one_file(self) -> bool:
        return not str(self.path).startswith("hub:") and super()._is_one_file()

    def _part(self, part: str) -> list[tuple[str, Problem]]:
        text = str(self.path)
        if not text.startswith("hub:"):
            return self._judgeable(read_jsonl(self._file(part), ()))
        name, _, config = text.removeprefix("hub:").partition(":")
        return self._judgeable(read_hub(name, part, (), config or None))

    def _key(self, where: str, row: Problem) -> str:
        """Its text without differences in white space."""
        return " ".join(json.dumps(row.prompt, ensure_ascii=False).split())

    def _problem(self, where: str, row: Problem) -> Problem:
        return row

    def _judgeable(self, rows: Located) -> list[tuple[str, Problem]]:
        problems, skipped = [], []
        for where, row in rows:
            try:
                problems.append((where, problem_of_row(where, row, self.instruction)))
            except DataError as error:
                if self.unjudgeable == "refuse":
                    raise
                skipped.append(str(error))
        if skipped:
            _log.warning(
                "Left out %d of %d rows that cannot be judged; the first: %s",
                len(skipped),
                len(rows),
                skipped[0],
            )
        return problems
