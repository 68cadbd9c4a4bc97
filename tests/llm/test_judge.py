"""Checks in a process of their own: bounded in time and memory, in order, and gone with who asked."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tether.errors import (
    InvalidInputError,
    JudgeFailedError,
    JudgeTimeoutError,
    MissingDependencyError,
)
from tether.llm.tasks.judge import Judge

CHECKS = Path(__file__).with_name("judged_functions.py")
SECONDS = 1.0
# What a loaded machine may add to a limit; far below what the hostile calls would take without one.
SLACK = 20.0


@pytest.fixture
def judge() -> Iterator[Callable[..., Judge]]:
    """Judges of the functions beside this file, closed at the end."""
    made: list[Judge] = []

    def make(name: str, seconds: float = SECONDS, **options: object) -> Judge:
        made.append(Judge(f"{CHECKS}:{name}", seconds=seconds, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended but is not yet waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def gone(*processes: int) -> bool:
    deadline = time.monotonic() + SLACK
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, processes))


@pytest.mark.parametrize(
    "value", [None, True, 0.1, -math.inf, "é\ud800\n\u2028", [1, {"a": [2**70, []]}], "7" * 100_000]
)
def test_values_arrive_as_they_were(judge: Callable[..., Judge], value: object) -> None:
    assert judge("same").ask(value) == value


def test_not_a_number_arrives_as_such(judge: Callable[..., Judge]) -> None:
    assert math.isnan(judge("same").ask(math.nan))


def test_hostile_calls_cost_their_limit_and_the_others_are_answered_in_order(
    judge: Callable[..., Judge],
) -> None:
    calls = [["spin"], [1], ["sleep"], ["deaf"], [2], ["spin"], [3]]
    with judge("obey") as obeying:
        server = obeying.ask("server")
        started = time.monotonic()
        outcomes = obeying.ask_many(calls)
        took = time.monotonic() - started
        assert [outcome.failure or outcome.value for outcome in outcomes] == [
            *("timeout", 1, "timeout", "timeout", 2, "timeout", 3)
        ]
        assert took < 4 * SECONDS + SLACK
        assert obeying.ask("server") == server, "a call that is stopped must not cost another start"
        with pytest.raises(JudgeTimeoutError, match=r"obey took longer than 1 s"):
            obeying.ask("spin")


@pytest.mark.parametrize("crash", ["abort", "exit", "memory", "recursion", "kill"])
def test_a_crash_is_an_outcome_and_the_next_call_works(judge: Callable[..., Judge], crash: str) -> None:
    obeying = judge("obey", seconds=SLACK, memory_limit=2**28)
    server = obeying.ask("server")
    outcomes = obeying.ask_many([[crash], [4]])
    assert [outcome.failure for outcome in outcomes] == ["crash", None]
    assert outcomes[1].value == 4
    assert obeying.ask("server") == server
    with pytest.raises(JudgeFailedError, match="gave no verdict"):
        outcomes[0].get()


def test_an_exception_is_told_with_its_line(judge: Callable[..., Judge]) -> None:
    line = 1 + CHECKS.read_text().splitlines().index('    raise KeyError("no such piece")')
    (outcome,) = judge("obey").ask_many([["raise"]])
    assert outcome.failure == "raised"
    assert outcome.reason.endswith(f"KeyError: 'no such piece' ({CHECKS}, line {line}).")
    with pytest.raises(JudgeFailedError, match="KeyError"):
        outcome.get()
    assert judge("obey").ask_many([["leave"]])[0].failure == "raised"


def test_what_a_call_or_an_import_prints_is_not_taken_for_an_answer(judge: Callable[..., Judge]) -> None:
    assert judge("obey").ask_many([["print"], [5], ["read"]]) == judge("same").ask_many(
        [["printed"], [5], [""]]
    )


def test_waiting_for_the_import_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(2)\ndef f(x): return x\n")
    with Judge(f"{tmp_path / 'slow.py'}:f", seconds=1) as slow:
        assert slow.ask(6) == 6


def test_a_setup_is_made_once_in_the_server(judge: Callable[..., Judge]) -> None:
    counting = judge("make_adder", setup=[10])
    assert [counting.ask(1), counting.ask(2)] == [[11, 1], [12, 1]]
    assert judge("make_adder", setup=[20]).ask(1) == [21, 1]


def test_a_call_changes_nothing_for_the_next(judge: Callable[..., Judge]) -> None:
    assert [judge("remember").ask(n) for n in range(3)] == [[0], [1], [2]]


def test_judges_of_one_function_share_a_server_that_ends_with_the_last() -> None:
    first, second = (Judge(f"{CHECKS}:obey", setup=None, memory_limit=2**n) for n in (28, 30))
    server = first.ask("server")
    assert second.ask("server") == server
    first.close()
    assert second.ask("server") == server
    second.close()
    assert gone(server)
    assert second.ask(7) == 7
    second.close()


def test_any_thread_may_ask_and_end(judge: Callable[..., Judge]) -> None:
    asked = judge("obey", seconds=SLACK)
    servers: dict[int, object] = {}

    def ask(number: int) -> None:
        servers[number] = (asked.ask("server"), asked.ask(number))

    for group in (range(1), range(1, 9)):
        threads = [threading.Thread(target=ask, args=(number,)) for number in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    server = asked.ask("server")
    assert servers == {number: (server, number) for number in range(9)}


def test_an_interrupted_call_leaves_no_answer_behind(judge: Callable[..., Judge]) -> None:
    asked = judge("obey", seconds=SLACK)
    asked.start()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            asked.ask_many([["nap"], [8]])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert asked.ask(9) == 9


def test_a_server_that_was_killed_is_replaced(judge: Callable[..., Judge]) -> None:
    asked = judge("obey", seconds=SLACK)
    server = asked.ask("server")
    os.kill(server, signal.SIGKILL)
    assert asked.ask(1) == 1
    assert asked.ask_many([["kill server"]])[0].failure == "crash"
    assert asked.ask(2) == 2


def test_what_a_call_started_ends_with_it(judge: Callable[..., Judge], tmp_path: Path) -> None:
    told = tmp_path / "process"
    with pytest.raises(JudgeTimeoutError):
        judge("start_another").ask(str(told))
    assert gone(int(told.read_text()))


TRAINER = """
import json, os, sys, threading, time
from tether.llm.tasks.judge import Judge
judge = Judge(sys.argv[1] + ":obey", seconds=600)
found = {}
thread = threading.Thread(target=lambda: found.update(server=judge.ask("server")))
thread.start(); thread.join()
if sys.argv[2] == "forked" and os.fork() == 0:
    time.sleep(600)  # keeps the pipes of its parent open
threading.Thread(target=judge.ask, args=("spin",), daemon=True).start()
print(json.dumps(found), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["alone", "forked"])
def test_server_and_call_end_with_a_trainer_that_is_killed(state: str) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(CHECKS), state],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    try:
        server = json.loads(trainer.stdout.readline())["server"]
        children = Path(f"/proc/{server}/task/{server}/children")
        deadline = time.monotonic() + SLACK
        while not children.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        (call,) = map(int, children.read_text().split())
        assert alive(server)
        trainer.kill()  # this process alone, not its group
        trainer.wait()
        assert gone(server, call)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its fork, where it has one
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.stdout.close()


def test_a_call_ends_with_its_server(judge: Callable[..., Judge]) -> None:
    asked = judge("obey", seconds=5)
    server = asked.ask("server")
    thread = threading.Thread(target=asked.ask_many, args=([["spin"]],))
    thread.start()
    children = Path(f"/proc/{server}/task/{server}/children")
    while not children.read_text():
        time.sleep(0.02)
    (call,) = map(int, children.read_text().split())
    asked._shared()._process.kill()  # type: ignore[union-attr]
    assert gone(server, call)
    thread.join()


FORKING = """
import os, sys, threading
from tether.llm.tasks.judge import Judge
judge = Judge(sys.argv[1] + ":obey", seconds=600)
server = judge.ask("server")
thread = threading.Thread(target=judge.ask, args=("nap",))  # holds the lock at the moment of the fork
thread.start()
child = os.fork()
if child == 0:
    other = judge.ask("server")
    assert other != server and judge.ask(1) == 1
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
thread.join()
assert judge.ask("server") == server
"""


def test_a_fork_of_the_trainer_has_a_server_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING, str(CHECKS)], check=True, timeout=120)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("math:no_such_name", "AttributeError: .*no_such_name"),
        ("math:pi", "TypeError: math:pi is a float, not a function"),
        ("needs.py:f", r"ImportError: install zeta \(.*needs\.py, line 2\)"),
        ("dies.py:f", "last words"),
    ],
)
def test_a_function_that_cannot_be_had_says_why(tmp_path: Path, function: str, reason: str) -> None:
    (tmp_path / "needs.py").write_text("\nraise ImportError('install zeta')\n")
    (tmp_path / "dies.py").write_text("import os\nprint('last words', flush=True)\nos._exit(3)\n")
    place = f"{tmp_path}/{function}" if ".py:" in function else function
    with pytest.raises(MissingDependencyError, match=f"cannot be used: {reason}"):
        Judge(place).start()


def test_wrong_limits_and_arguments_are_refused(judge: Callable[..., Judge]) -> None:
    for seconds in (0, -1, math.nan, math.inf):
        with pytest.raises(InvalidInputError, match="time limit"):
            Judge("math:sqrt", seconds=seconds)
    with pytest.raises(InvalidInputError, match="memory limit is 0"):
        Judge("math:sqrt", memory_limit=0)
    with pytest.raises(InvalidInputError, match="JSON cannot hold the arguments"):
        judge("same").ask({1, 2})
