"""What a machine lacks is said at once, with the remedy, before any test runs; nothing is skipped for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import machine
from scripts import REPOSITORY

# With too few open files and no OpenGL. Both are said, and no test is run.
POORER = """
import ctypes.util, resource, sys, pytest
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
ctypes.util.find_library = lambda name: None
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/episodic/test_prodmp.py"]))
"""


def test_all_that_is_missing_is_said_before_the_first_test() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", POORER], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    said = answer.stdout + answer.stderr
    assert answer.returncode == pytest.ExitCode.USAGE_ERROR, said
    assert "ulimit -n 256" in said
    assert "libegl1" in said
    assert "passed" not in said


def test_only_what_the_asked_tests_need_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere, here = machine.NEEDS[""], (lambda: "install it",)
    monkeypatch.setattr(machine, "NEEDS", {"": everywhere, "tests/llm": here})
    for asked in ("tests", "tests/llm", "tests/llm/test_train.py::test_it", "."):
        assert machine.missing([asked]) == ["install it"], asked
    for asked in ("tests/ops", "src/tether/projection"):
        assert machine.missing([asked]) == []


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_installed", lambda name: name not in ("cvxpy", "scipy"))
    message = machine.packages("test", "dev")()
    assert message is not None
    assert message.startswith("Not installed: cvxpy, scipy. pip install")
    monkeypatch.undo()
    assert machine.packages("test", "dev")() is None


@pytest.mark.parametrize("check", [machine.open_files, machine.disk, machine.loopback, machine.shared_memory])
def test_this_machine_has_what_these_tests_ran_with(check: object) -> None:
    assert check() is None  # type: ignore[operator]


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "FREE_BYTES", 2**80)
    message = machine.disk()
    assert message is not None
    assert "TMPDIR" in message
