"""Judging one response: its programs run in the sandbox, and a verdict is all that is kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tether.llm.sandbox import Execution, Sandbox
from tether.llm.tasks import code_harness
from tether.llm.tasks.code_blocks import defines, extract_code
from tether.llm.tasks.code_cases import CallTest, StreamTest, UnitTests
from tether.llm.tasks.code_values import read_results
from tether.llm.tasks.protocol import Verdict

_HARNESS = Path(code_harness.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True)
class CodeJudge:
    """What responses are judged by, besides their tests.

    >>> from tether.llm.tasks.code_cases import CallTest
    >>> with Sandbox(1) as sandbox:
    ...     tests = UnitTests([CallTest.of("f(1)", 2)], entry="f")
    ...     CodeJudge(sandbox).verdict("def f(x): return x + 1", tests).correct
    True
    """

    sandbox: Sandbox
    """An open one."""
    partial_credit: bool = False
    """Whether the reward is the share of tests passed."""
    format_reward: float = 0.0
    """Added for a code block."""
    time_limit: float = 5.0
    """Seconds for all calls of a problem, or for one input."""
    total_time_limit: float = 60.0
    """Seconds for all inputs of a problem together."""
    memory_limit: int = 512 * 2**20
    """Bytes."""

    def verdict(self, response: str, tests: UnitTests) -> Verdict:
        """Run a response's code on all tests of a problem, one program at a time."""
        has_block, code = extract_code(response, tests.entry)
        statuses: set[str] = set()
        count = 0
        if code.strip():
            runs = self._calls(code, tests) if tests.calls else self._streams(code, tests)
            for status, passed in runs:
                statuses.add(status)
                count += passed
        share = count / len(tests.tests)
        correct = share == 1.0 and statuses == {"ok"}
        parts = {"block": float(has_block), "passed": share}
        parts.update({status: float(status in statuses) for status in ("timeout", "memory", "killed")})
        reward = share if self.partial_credit else float(correct)
        return Verdict(reward + self.format_reward * has_block, correct, parts)

    def _calls(self, code: str, tests: UnitTests) -> Iterator[tuple[str, int]]:
        """How the one program ended that makes all calls, and how many tests it passed."""
        arguments = (tests.preamble, _source(code, tests), tests.calls, tests.entry)
        done = self._run(f"{_HARNESS}\n\nmain({', '.join(map(repr, arguments))})\n")
        results = iter(read_results(done.stdout, len(tests.calls)))
        yield (
            done.status,
            sum(
                test.accepts([next(results) for _ in test.calls])
                for test in tests.tests
                if isinstance(test, CallTest)
            ),
        )

    def _streams(self, code: str, tests: UnitTests) -> Iterator[tuple[str, int]]:
        """How a program ended for each input, and whether it was right, up to the first time-out."""
        source = f"{tests.preamble}\n{code}" if tests.preamble else code
        left = self.total_time_limit
        for test in tests.tests:
            assert isinstance(test, StreamTest)
            if left <= 0:
                yield "timeout", 0
                return
            done = self._run(source, test.stdin, min(self.time_limit, left))
            yield done.status, done.ok and test.accepts(done.stdout)
            if done.status == "timeout":
                return
            left -= done.seconds

    def _run(self, source: str, stdin: str = "", time_limit: float | None = None) -> Execution:
        return self.sandbox.run(source, stdin, time_limit or self.time_limit, self.memory_limit)


def _source(code: str, tests: UnitTests) -> str:
    """The code; a response that only continues a stub is put behind it."""
    entry = tests.entry or ""
    continues = defines(tests.preamble, entry) and not defines(code, entry)
    return f"{tests.preamble}{code}" if continues else code
