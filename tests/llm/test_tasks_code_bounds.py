"""What judging may cost: time after a time-out, memory of a batch, and one answer's harm to the others."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from tether.errors import ConfigError
from tether.llm.sandbox import Execution, Sandbox, available_backend
from tether.llm.tasks import CodeTask
from tether.llm.tasks.code_cases import CallTest, StreamTest, UnitTests
from tether.llm.tasks.code_harness import OUTPUT

SQUARES = UnitTests([CallTest.of(f"square({n})", n * n) for n in range(1, 6)], "", "square").dump()
ECHO = UnitTests([StreamTest(str(n), str(n)) for n in range(5)]).dump()


def block(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Execution]:
    """Every execution, in the order they ended."""
    available_backend()  # whose trial is one more, the first time
    executions: list[Execution] = []
    run = Sandbox.run

    def recording(self: Sandbox, *arguments: Any, **named: Any) -> Execution:
        executions.append(run(self, *arguments, **named))
        return executions[-1]

    monkeypatch.setattr(Sandbox, "run", recording)
    return executions


@pytest.mark.parametrize(("partial_credit", "reward"), [(True, 0.4), (False, 0.0)])
def test_inputs_after_a_time_out_are_not_tried_and_count_as_failed(
    ended: list[Execution], partial_credit: bool, reward: float
) -> None:
    code = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    with CodeTask(time_limit=1.0, partial_credit=partial_credit) as task:
        verdict = task.verify(block(code), ECHO)
    assert [done.status for done in ended] == ["ok", "ok", "timeout"]
    assert (verdict.reward, verdict.parts["passed"], verdict.parts["timeout"]) == (reward, 0.4, 1.0)
    assert not verdict.correct


def test_all_inputs_share_a_total_time_limit(ended: list[Execution]) -> None:
    with CodeTask(time_limit=1.0, total_time_limit=1.0, partial_credit=True) as task:
        verdict = task.verify(block("import time\ntime.sleep(0.6)\nprint(input())"), ECHO)
    assert 1 <= len(ended) <= 2
    assert sum(done.seconds for done in ended) < 2.5
    assert verdict.parts["timeout"] == 1.0
    assert verdict.reward <= 0.2
    with pytest.raises(ConfigError, match="total_time_limit 1"):
        CodeTask(time_limit=2.0, total_time_limit=1.0)


def test_all_calls_share_one_time_limit_and_those_before_it_count(ended: list[Execution]) -> None:
    code = "import time\ndef square(n):\n    if n > 3: time.sleep(600)\n    return n * n"
    with CodeTask(time_limit=1.0, partial_credit=True) as task:
        verdict = task.verify(block(code), SQUARES)
    assert [done.status for done in ended] == ["timeout"]
    assert (verdict.reward, verdict.correct, verdict.parts["timeout"]) == (0.6, False, 1.0)


FLOODS = [
    "import os\nos.write(2, b'y' * (2**20 - 1000))\nprint('x' * (2**20 - 1000))",
    "import os\nos.write(1, b'\\xff' * 2**21)",
    "import os\nos.write(1, '\\U0001f600'.encode() + b'x' * 2**21)",
    "print('3\\n' * 2**19)",
]


def peak_of_batch(programs: int, workers: int) -> int:
    """Bytes Python holds at most, beyond those before, while a batch of flooding programs is judged."""
    with CodeTask(workers=workers, time_limit=20.0) as task:
        answer = UnitTests([StreamTest("", "3\n" * 2**19)]).dump()
        task.verify(block("print(3)"), answer)
        responses = [block(FLOODS[n % len(FLOODS)]) for n in range(programs)]
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            task.verify_many(responses, [answer] * programs)
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()


def test_a_batch_holds_the_outputs_of_its_workers_alone() -> None:
    """Per worker: the bytes of two streams, and as text, four bytes a character at worst, one text twice."""
    workers = 2
    per_worker = 2 * OUTPUT + 3 * 4 * OUTPUT
    assert peak_of_batch(24, workers) < workers * per_worker


def test_a_batch_of_hostile_answers_leaves_the_others_verdicts_alone() -> None:
    hostile = [
        "import os\nos.write(3, b'[' * 900_000 + b'\\n')\ndef square(n): return 0",
        "import os\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, b'[NaN]\\n' * 5)\n    except OSError: pass",
        "def square(n): return {k * (2**61 - 1) for k in range(3_000)}",
        "def square(n): return [[]] * 10**6",
        "def square(n):\n    x = 1\n    for _ in range(10**5): x = [x]\n    return x",
        "def square(n): return 1 << 10**6",
        "def square(n): return '\\ud800' * 1000",
        "\x00",
        "\ud800",
        "(" * 10_000,
        "x = " + "-" * 200_000 + "1",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "while True: print('x' * 10**6)",
        "```python\n" * 1000,
        "",
    ]
    right = "def square(n): return n * n"
    codes = [code for bad in hostile for code in (bad, right)]
    with CodeTask(time_limit=10.0) as task:
        verdicts = task.verify_many([block(code) for code in codes], [SQUARES] * len(codes))
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0] * len(hostile)


def test_the_size_of_one_result_fails_its_own_call_only() -> None:
    code = "def square(n): return 'x' * 10**7 if n == 3 else n * n"
    with CodeTask(partial_credit=True) as task:
        assert task.verify(block(code), SQUARES).reward == 0.8


def test_judging_a_long_response_takes_well_below_two_seconds_beside_the_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = Execution("error", "", "", 0.1, 1)
    monkeypatch.setattr(Sandbox, "run", lambda self, *arguments: done)
    with CodeTask() as task:
        for unit in (" ", "`", "\n", "```python\n", "def ", "(", "\\", "'''", "\ud800", "~~~ "):
            response = "```python\n" + unit * (100_000 // len(unit))
            started = time.process_time()
            assert task.verify(response, SQUARES).reward == 0.0
            assert time.process_time() - started < 2.0
