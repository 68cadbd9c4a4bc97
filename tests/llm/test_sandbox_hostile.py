"""Hostile programs: every one contained, nothing of the host read or changed, the pool alive afterwards.

The programs are in `benchmarks.hostile`, so that `python -m benchmarks.sandbox hostile` can run them as well.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from benchmarks.hostile import HOSTILE, Hostile
from benchmarks.hostile.host import MEMORY, Host, escape, host, run

from tether.llm.sandbox import Backend, Program, Sandbox
from tether.llm.sandbox.backends import BACKENDS

EVERY_BACKEND = [
    pytest.param(name, marks=pytest.mark.skipif(missing, reason="bubblewrap is not installed"))
    for name in BACKENDS
    for missing in [name == "bubblewrap" and shutil.which("bwrap") is None]
]
# With every change: what ends by itself, and every fifth of those that last until they are stopped.
LASTING = [name for name, one in HOSTILE.items() if "timeout" in one.statuses]
SHORT = {name: one for name, one in HOSTILE.items() if name not in LASTING or name in LASTING[::5]}


@pytest.fixture
def against(tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path) as one:
        yield one


def check(backend: Backend, against: Host, programs: Mapping[str, Hostile], seconds: float) -> None:
    with Sandbox(workers=2, backend=backend) as sandbox:
        executions = run(sandbox, against, programs, seconds)
        assert sandbox.run("print(6 * 7)").stdout == "42\n"
    escapes = {name: escape(programs[name], done, seconds) for name, done in executions.items()}
    assert {name: found for name, found in escapes.items() if found} == {}
    assert against.harm() == []


def test_there_are_programs_of_every_kind() -> None:
    assert len(HOSTILE) >= 120
    assert len(SHORT) >= 90


def test_an_escape_is_seen(against: Host) -> None:
    programs = {"word": Hostile("print('ESCAPED')"), "end": Hostile("", ("error",)), "fine": Hostile("")}
    with Sandbox(workers=1, backend="namespaces") as sandbox:
        done = run(sandbox, against, programs, 10.0)
    assert escape(programs["word"], done["word"], 10.0) == "ESCAPED\n"
    assert "ended with ok" in str(escape(programs["end"], done["end"], 10.0))
    assert escape(programs["fine"], done["fine"], 10.0) is None
    assert against.harm() == []
    against.canary.write_text("changed")
    assert against.harm() == ["the canary was changed"]


def test_hostile_programs_are_contained_and_the_pool_lives(against: Host) -> None:
    check("namespaces", against, SHORT, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("repetition", range(3))
def test_every_hostile_program_is_contained(backend: Backend, repetition: int, against: Host) -> None:
    check(backend, against, HOSTILE, 3.0)


@pytest.mark.slow
def test_500_mixed_programs_end_in_five_minutes_with_right_verdicts(against: Host) -> None:
    rng = random.Random(0)
    names = [rng.choice(list(HOSTILE)) if number % 5 == 0 else "" for number in range(500)]
    programs = [
        Program(against.fill_in(HOSTILE[name].code), time_limit=2.0, memory_limit=MEMORY)
        if name
        else Program("print(int(input()) ** 2)", stdin=str(number), time_limit=20.0)
        for number, name in enumerate(names)
    ]
    started = time.monotonic()
    with Sandbox(workers=2) as sandbox:
        executions = sandbox.run_many(programs)
    seconds = time.monotonic() - started
    for number, (name, done) in enumerate(zip(names, executions, strict=True)):
        if name:
            assert escape(HOSTILE[name], done, 2.0) is None, name
        else:
            assert (done.status, done.stdout) == ("ok", f"{number**2}\n")
    assert against.harm() == []
    assert seconds < 300
