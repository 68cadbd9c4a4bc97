"""Programming problems with unit tests, run in the sandbox and judged outside it."""

from __future__ import annotations

import json
import logging
import random
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from tether.errors import ConfigError, DataError
from tether.llm.sandbox import Execution, Program, Sandbox
from tether.llm.tasks import code_harness
from tether.llm.tasks.code_cases import CallTest, StreamTest, load_tests
from tether.llm.tasks.code_generated import draw_problem
from tether.llm.tasks.code_rows import problem_of_row
from tether.llm.tasks.generated import draw_distinct
from tether.llm.tasks.hub import read_hub
from tether.llm.tasks.jsonl import read_jsonl
from tether.llm.tasks.protocol import Problem, Split, Verdict, check_request, split_of

_log = logging.getLogger(__name__)

INSTRUCTION = "Answer with one Python code block (```python ... ```)."
Unjudgeable = Literal["skip", "refuse"]
"""What to do with a row whose tests cannot be judged outside the sandbox."""

_BLOCK = re.compile(
    r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE
)
_HARNESS = Path(code_harness.__file__).read_text(encoding="utf-8")


class CodeTask:
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
        steps: Steps of a generated problem before it returns something.
        instruction: Appended to every problem.
        partial_credit: Whether the reward is the share of tests passed. False rewards all or nothing.
        format_reward: Added to the reward of a response with a code block, right or wrong.
        time_limit: Seconds for all calls of a problem, or for one input.
        memory_limit: Bytes.
        workers: Programs that run at a time; by default one a usable processor.
        unjudgeable: Whether a row whose tests cannot be judged outside is skipped, with a warning that
            counts them, or refused.

    Raises:
        ConfigError: Settings out of range.
        DataError: (from `problems`) data that is missing, empty or malformed, naming file and line.
        MissingDependencyError: (from `verify`) nothing here can isolate a program.

    >>> with CodeTask() as task:
    ...     problem = task.problems("train", limit=1)[0]
    ...     task.verify(problem.metadata["solution"], problem.answer).correct
    True
    """

    name = "code"
    chat = True

    def __init__(
        self,
        path: str | Path | None = None,
        steps: int = 2,
        instruction: str = INSTRUCTION,
        partial_credit: bool = False,
        format_reward: float = 0.0,
        time_limit: float = 5.0,
        memory_limit: int = 512 * 2**20,
        workers: int | None = None,
        unjudgeable: Unjudgeable = "skip",
    ) -> None:
        if not 1 <= steps <= 6:
            raise ConfigError(f"steps is {steps}; the code task takes 1 to 6.")
        if not 0 <= format_reward < 1:
            raise ConfigError(f"format_reward is {format_reward}; give at least 0 and less than 1.")
        if unjudgeable not in get_args(Unjudgeable):
            raise ConfigError(f"unjudgeable is {unjudgeable!r}; use 'skip' or 'refuse'.")
        self.path = path
        self.steps = steps
        self.instruction = instruction
        self.partial_credit = partial_credit
        self.format_reward = format_reward
        self.time_limit = time_limit
        self.memory_limit = memory_limit
        self.unjudgeable = unjudgeable
        self.max_response_tokens = 192 if path is None else 768
        self._sandbox = Sandbox(workers)
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
        check_request(split, limit)
        if self.path is None:
            name = f"{self.name}/{self.steps}"
            return draw_distinct(
                lambda rng: draw_problem(rng, self.steps, self.instruction), name, split, limit, seed
            )
        problems = self._read(split)
        if not problems:
            raise DataError(
                f"The {split} split of {self.path} has no problem that can be judged. Give more rows, or a "
                "folder with train.jsonl and test.jsonl."
            )
        random.Random(f"{self.name}/{split}/{seed}").shuffle(problems)
        return problems[:limit]

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """Reward 1 if the code of the response passes every test of the problem, 0 otherwise.

        The code is the last block between triple backquotes that defines the function asked for, or the
        last one; without any block, the whole response. Parts: ``"block"`` is 1 when there is a block,
        ``"passed"`` the share of tests passed, ``"timeout"``, ``"memory"`` and ``"killed"`` are 1 when
        the sandbox had to stop the code.
        """
        return self.verify_many([response], [problem_answer])[0]

    def verify_many(self, responses: Sequence[str], problem_answers: Sequence[str]) -> list[Verdict]:
        """Check many responses at once, on all of the sandbox's workers.

        Raises:
            DataError: An answer that is none of this task's.
            MissingDependencyError: Nothing here can isolate a program; says what to install.
        """
        with self._opening:
            self._sandbox.open()
        jobs = [_Job(r, a, self) for r, a in zip(responses, problem_answers, strict=True)]
        executions = iter(self._sandbox.run_many([program for job in jobs for program in job.programs]))
        return [job.judge([next(executions) for _ in job.programs]) for job in jobs]

    def close(self) -> None:
        """Close the sandbox; a later check opens it again."""
        self._sandbox.close()

    def __enter__(self) -> CodeTask:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, split: Split) -> list[Problem]:
        if str(self.path).startswith("hub:") or Path(str(self.path)).is_dir():
            tested = self._judgeable(self._rows("test"))
            if split == "test":
                return tested
            held_out = {_key(problem) for problem in tested}
            return [
                problem
                for problem in self._judgeable(self._rows("train"))
                if _key(problem) not in held_out and split_of(_key(problem), test_percent=0) == split
            ]
        problems = self._judgeable(read_jsonl(Path(str(self.path)), ()))
        return [problem for problem in problems if split_of(_key(problem)) == split]

    def _rows(self, part: str) -> list[tuple[str, dict[str, Any]]]:
        text = str(self.path)
        if text.startswith("hub:"):
            name, _, config = text.removeprefix("hub:").partition(":")
            return read_hub(name, part, (), config or None)
        return read_jsonl(Path(text) / f"{part}.jsonl", ())

    def _judgeable(self, rows: list[tuple[str, dict[str, Any]]]) -> list[Problem]:
        problems, skipped = [], []
        for where, row in rows:
            try:
                problems.append(problem_of_row(where, row, self.instruction))
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


class _Job:
    """One response to be checked: the programs to run, and the verdict on what came of them."""

    def __init__(self, response: str, answer: str, task: CodeTask) -> None:
        self._task = task
        self._tests, self._preamble, self._entry = load_tests(answer)
        self._has_block, code = extract_code(response, self._entry)
        if code.strip():
            self.programs = self._programs(code)
        else:
            self.programs = []

    def judge(self, executions: list[Execution]) -> Verdict:
        passed = self._passed(executions) / len(self._tests) if executions else 0.0
        correct = passed == 1.0
        reward = passed if self._task.partial_credit else float(correct)
        parts = {"block": float(self._has_block), "passed": passed}
        for status in ("timeout", "memory", "killed"):
            parts[status] = float(any(done.status == status for done in executions))
        return Verdict(reward + self._task.format_reward * self._has_block, correct, parts)

    def _programs(self, code: str) -> list[Program]:
        limits = {"time_limit": self._task.time_limit, "memory_limit": self._task.memory_limit}
        if isinstance(self._tests[0], StreamTest):
            source = f"{self._preamble}\n{code}" if self._preamble else code
            return [
                Program(source, test.stdin, **limits)  # type: ignore[arg-type]
                for test in self._tests
                if isinstance(test, StreamTest)
            ]
        calls = [test.call for test in self._tests if isinstance(test, CallTest)]
        names = [self._entry or "", "candidate"]
        arguments = ", ".join(repr(value) for value in (self._source(code), calls, names))
        return [Program(f"{_HARNESS}\n\nmain({arguments})\n", **limits)]  # type: ignore[arg-type]

    def _source(self, code: str) -> str:
        """The preamble and the code; a response that only continues the stub is put behind it."""
        stub = self._preamble
        if not stub:
            return code
        continues = self._entry and f"def {self._entry}" not in code and f"def {self._entry}" in stub
        return f"{stub}\n{code}" if not continues else f"{stub}{code}"

    def _passed(self, executions: list[Execution]) -> int:
        if isinstance(self._tests[0], StreamTest):
            return sum(
                done.ok and isinstance(test, StreamTest) and test.accepts(done.stdout)
                for test, done in zip(self._tests, executions, strict=True)
            )
        results = _results(executions[0]) if executions[0].ok else []
        if len(results) != len(self._tests):
            return 0
        return sum(
            isinstance(test, CallTest) and result[:1] == ["value"] and test.accepts(result[-1])
            for test, result in zip(self._tests, results, strict=True)
        )


def extract_code(response: str, entry: str | None = None) -> tuple[bool, str]:
    """Whether a response has a code block, and its code.

    Of several blocks the last that defines `entry` counts, or the last. A block that the response's end
    cuts off counts too. Without a block, the whole response is the code.

    >>> extract_code("So:\\n```python\\nx = 1\\n```\\nThis sets x.")
    (True, 'x = 1')
    """
    blocks = [match[1] for match in _BLOCK.finditer(response)]
    if not blocks:
        return False, response
    defining = [block for block in blocks if entry and f"def {entry}" in block]
    return True, (defining or blocks)[-1]


def _results(done: Execution) -> list[list[Any]]:
    """The results a harness wrote, which may be anything; [] where they are no list of lists."""
    try:
        results = json.loads(done.stdout)
    except (ValueError, RecursionError):
        return []
    if not isinstance(results, list) or not all(isinstance(result, list) and result for result in results):
        return []
    return results


def _key(problem: Problem) -> str:
    """A problem's identity: its text without differences in white space."""
    return " ".join(json.dumps(problem.prompt, ensure_ascii=False).split())
