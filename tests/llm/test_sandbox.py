"""The sandbox as its users meet it: results, limits, the pool, both backends, refusal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tether.errors import ConfigError, InvalidInputError, MissingDependencyError, SandboxError
from tether.llm.sandbox import Program, Sandbox, available_backend
from tether.llm.sandbox import sandbox as module
from tether.llm.sandbox.backends import BACKENDS, Visible, without_nested
from tether.llm.sandbox.syscalls import ALLOWED, compiled_filter


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=2, backend="namespaces") as shared:
        yield shared


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def named(name: str) -> list[str]:
    """Processes of the whole machine that gave themselves a name."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == name:
                found.append(comm.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def naming(name: str) -> str:
    return f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\n"


# What a program gives back.


def test_a_program_reads_writes_and_ends_with_its_code(sandbox: Sandbox) -> None:
    done = sandbox.run("import sys\nprint(input()[::-1])\nprint('é', file=sys.stderr)", stdin="olleh")
    assert (done.status, done.stdout, done.stderr, done.exit_code) == ("ok", "hello\n", "é\n", 0)
    assert 0 < done.seconds < 5
    ended = sandbox.run("print('before'); exit(3)")
    assert (ended.status, ended.stdout, ended.exit_code) == ("error", "before\n", 3)


def test_an_exception_is_an_error_with_its_traceback(sandbox: Sandbox) -> None:
    done = sandbox.run("x = 1\nx / 0")
    assert done.status == "error"
    assert 'File "/tmp/program.py", line 2' in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_much_input_and_output_pass_whole(sandbox: Sandbox) -> None:
    text = "abcdefg\n" * 100_000
    done = sandbox.run("import sys\nsys.stdout.write(sys.stdin.read().upper())", stdin=text, time_limit=20)
    assert done.stdout == text.upper()


def test_input_nobody_reads_does_no_harm(sandbox: Sandbox) -> None:
    assert sandbox.run("print(1)", stdin="x" * 1_000_000).stdout == "1\n"
    assert sandbox.run("import os; os.close(0); print(1)", stdin="x" * 1_000_000).stdout == "1\n"


def test_output_is_kept_up_to_the_limit() -> None:
    with Sandbox(workers=1, output_limit=1000) as small:
        assert small.run("print('x' * 999)").status == "ok"
        over = small.run("print('x' * 1000)")
        assert (over.status, len(over.stdout)) == ("killed", 1000)
        assert "more than 1000 bytes to stdout" in over.detail


def test_undecodable_output_is_replaced(sandbox: Sandbox) -> None:
    assert sandbox.run("import os; os.write(1, b'a\\xffb')").stdout == "a�b"


def test_statuses_of_every_end(sandbox: Sandbox) -> None:
    assert sandbox.run("while True: pass", time_limit=0.3).status == "timeout"
    assert sandbox.run("x = bytes(2**29)", time_limit=20, memory_limit=2**27).status == "memory"
    aborted = sandbox.run("import os; os.abort()")
    assert (aborted.status, aborted.exit_code, aborted.detail) == ("killed", 134, "signal 6")


def test_memory_is_counted_over_all_processes_and_shared_pages_once(sandbox: Sandbox) -> None:
    code = (
        "import os, time\nx = b'x' * (60 * 2**20)\nfor _ in range(6):\n    if os.fork() == 0:\n"
        "        {child}\n        time.sleep({seconds}); os._exit(0)\n"
        "for _ in range(6): os.wait()"
    )
    shared = code.format(child="y = x[5]", seconds=0.5)
    assert sandbox.run(shared, time_limit=30, memory_limit=2**28).status == "ok"
    copied = code.format(child="y = bytearray(x)", seconds=60)
    assert sandbox.run(copied, time_limit=30, memory_limit=2**28).status == "memory"


def test_cpu_time_of_threads_counts_together(sandbox: Sandbox) -> None:
    code = "import signal, resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))"
    assert sandbox.run(code, time_limit=2.5).stdout == "(4, 5)\n"


def test_time_before_the_start_does_not_count(sandbox: Sandbox) -> None:
    assert sandbox.run("import time; time.sleep(.2)", time_limit=5).seconds >= 0.2


# What surrounds a program.


def _its_own_files(sandbox: Sandbox) -> list[str]:
    """What a fresh program finds in its folder: itself, and the interpreter if that lies under /tmp."""
    interpreter = {path.split("/")[2] for path in sandbox.files.readable if path.startswith("/tmp/")}
    return sorted({"program.py", *interpreter})


def test_the_environment_is_fixed_and_repeats(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_TEST_SECRET", "secret")
    names = sandbox.run("import os; print(*sorted(os.environ), os.getcwd(), sorted(os.listdir()))").stdout
    assert names == f"HOME LANG PATH PYTHONHASHSEED TMPDIR /tmp {_its_own_files(sandbox)}\n"
    orders = {sandbox.run("print({str(n) for n in range(50)})").stdout for _ in range(3)}
    assert len(orders) == 1


def test_ordinary_programs_work(sandbox: Sandbox) -> None:
    code = (
        "import asyncio, json, math, random, re, subprocess, sys, tempfile, threading, decimal\n"
        "async def one(): await asyncio.sleep(.01); return 1\n"
        "print(asyncio.run(one()))\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    open(folder + '/a', 'w').write('two')\n    print(open(folder + '/a').read())\n"
        "t = threading.Thread(target=print, args=('three',)); t.start(); t.join()\n"
        "shown = subprocess.run([sys.executable, '-c', 'print(4)'], capture_output=True, text=True).stdout\n"
        "print(shown, end='')\n"
    )
    assert sandbox.run(code, time_limit=30).stdout == "1\ntwo\nthree\n4\n"


def test_a_program_leaves_nothing_for_the_next(sandbox: Sandbox) -> None:
    sandbox.run("open('/tmp/left', 'w').write('x')")
    found = sandbox.run("import os; print(sorted(os.listdir('/tmp')))").stdout
    assert found == f"{_its_own_files(sandbox)}\n"


def test_more_folders_can_be_read_but_not_written(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 7")
    tmp_path.chmod(0o755)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import helper; print(helper.VALUE)\n"
    with Sandbox(workers=1, readable=[tmp_path]) as sandbox:
        assert sandbox.run(code).stdout == "7\n"
        assert "Read-only" in sandbox.run(f"open({str(tmp_path / 'new')!r}, 'w')").stderr


def test_processes_left_behind_are_gone_when_run_returns(sandbox: Sandbox) -> None:
    name = f"left-{os.getpid()}"
    code = naming(name) + (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n"
        "    os._exit(0)\ntime.sleep(.2); print('done')"
    )
    assert sandbox.run(code).stdout == "done\n"
    assert named(name) == []


def test_programs_die_with_a_host_that_is_killed(tmp_path: Path) -> None:
    name = f"orphan-{os.getpid()}"
    program = naming(name) + "import time; time.sleep(600)"
    host = (
        "from tether.llm.sandbox import Sandbox\n"
        f"with Sandbox(1, backend='namespaces') as s: s.run({program!r}, time_limit=600)"
    )
    # Killed, it leaves an empty folder, which pytest clears away.
    process = subprocess.Popen([sys.executable, "-c", host], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert wait_for(lambda: len(named(name)) == 1, 90)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert wait_for(lambda: named(name) == [])


# The pool.


def test_results_come_in_order_whatever_ends_first(sandbox: Sandbox) -> None:
    programs = [Program(f"import time; time.sleep({0.3 - 0.1 * n}); print({n})") for n in range(4)]
    assert [done.stdout for done in sandbox.run_many([*programs[:3], "print(3)"])] == [
        f"{n}\n" for n in range(4)
    ]
    assert sandbox.run_many([]) == []


def test_workers_run_at_the_same_time() -> None:
    with Sandbox(workers=4) as sandbox:
        started = time.monotonic()
        done = sandbox.run_many(["import time; time.sleep(2)"] * 4)
        assert time.monotonic() - started < 6
        assert all(one.ok for one in done)


def test_any_thread_may_run_programs(sandbox: Sandbox) -> None:
    results: dict[int, str] = {}

    def run(number: int) -> None:
        results[number] = sandbox.run(f"print({number})").stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{number}\n" for number in range(5)}


def test_closing_ends_what_runs_and_opening_again_works() -> None:
    sandbox = Sandbox(workers=1, backend="namespaces").open()
    name = f"closed-{os.getpid()}"
    raised: list[BaseException] = []

    def run() -> None:
        try:
            sandbox.run(naming(name) + "import time; time.sleep(600)", time_limit=600)
        except SandboxError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert wait_for(lambda: len(named(name)) == 1)
    sandbox.close()
    thread.join(20)
    assert named(name) == []
    assert "the sandbox was closed" in str(raised[0])
    with pytest.raises(SandboxError, match="not open"):
        sandbox.run("print(1)")
    with sandbox:
        assert sandbox.run("print(1)").stdout == "1\n"


def test_a_start_that_fails_twice_succeeds_the_third_time(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = subprocess.Popen, [BlockingIOError(11, "no process"), OSError(12, "no memory")]

    def popen(*arguments: object, **options: object) -> object:
        if failures:
            raise failures.pop()
        return real(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert sandbox.run("print(1)").stdout == "1\n"
    failures += [OSError(12, "no memory")] * 3
    with pytest.raises(SandboxError, match="no memory"):
        sandbox.run("print(1)")
    assert sandbox.run("print(1)").stdout == "1\n"


def test_descriptors_do_not_leak(sandbox: Sandbox) -> None:
    sandbox.run("print(1)")
    before = len(os.listdir("/proc/self/fd"))
    for code in ("print(1)", "1/0", "while True: pass"):
        sandbox.run(code, time_limit=0.3)
    assert len(os.listdir("/proc/self/fd")) == before


# Backends and refusal.


def test_the_backend_found_here_contains_a_program() -> None:
    assert available_backend() in BACKENDS
    assert module.try_backend("namespaces") is None


def test_bubblewrap_is_asked_for_the_same_isolation(tmp_path: Path) -> None:
    from tether.llm.sandbox.backends import command

    line = command("bubblewrap", 5, 6, Visible(["/usr/lib"], [], []), 1234, root_user=False)
    for option in ("--unshare-user", "--unshare-net", "--unshare-pid", "--unshare-ipc", "--clearenv"):
        assert option in line
    assert line[line.index("--remount-ro") + 1] == "/"
    assert line[line.index("--size") + 1 : line.index("--size") + 4] == ["1234", "--tmpfs", "/tmp"]
    with pytest.raises(ConfigError, match="jail"):
        command("jail", 5, 6, Visible([], [], []), 1, root_user=False)  # type: ignore[arg-type]


def test_where_nothing_isolates_code_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "try_backend", lambda backend: "a program could open a socket")
    with pytest.raises(
        MissingDependencyError, match=r"bubblewrap: a program could .*apt-get install bubblewrap"
    ):
        available_backend()
    with pytest.raises(MissingDependencyError), Sandbox(workers=1):
        raise AssertionError("opened")


def test_a_backend_that_contains_nothing_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    import tether.llm.sandbox.sandbox as module

    real = module.Sandbox._job

    def unconfined(self: Sandbox, program: Program, user: int | None) -> dict[str, object]:
        job = real(self, program, user)
        limits = [limit for limit in job["limits"] if limit[0] != "RLIMIT_NPROC"]
        allow_everything = "BgAAAAAA/38="  # one instruction: return ALLOW
        return {**job, "limits": limits, "filter": allow_everything}

    monkeypatch.setattr(module.Sandbox, "_job", unconfined)
    reason = module.try_backend.__wrapped__("namespaces")
    assert reason is not None
    assert "open a socket" in reason
    assert "start more processes than it may" in reason


def test_a_missing_libseccomp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    compiled_filter.cache_clear()
    with pytest.raises(MissingDependencyError, match="libseccomp"):
        compiled_filter()
    compiled_filter.cache_clear()


def test_the_filter_names_no_call_twice_and_is_whole_instructions() -> None:
    names = [name for group in ALLOWED.values() for name in group]
    assert len(names) == len(set(names))
    assert len(compiled_filter()) % 8 == 0
    assert len(compiled_filter()) // 8 > len(names) // 2


def test_nested_paths_are_left_out() -> None:
    assert without_nested(["/a/b", "/a", "/ab", "/a/b/c"]) == ["/a", "/ab"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"processes": 0}, "processes is 0"),
        ({"file_size": 10}, "file_size is 10"),
        ({"backend": "chroot"}, "Unknown sandbox backend 'chroot'"),
    ],
)
def test_senseless_sandboxes_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sandbox(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": 0}, "time_limit is 0"),
        ({"time_limit": float("nan")}, "time_limit is nan"),
        ({"memory_limit": 100}, "memory_limit is 100"),
        ({"stdin": b"x"}, "must be text"),
    ],
)
def test_senseless_programs_are_refused(sandbox: Sandbox, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        sandbox.run("print(1)", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="int"):
        sandbox.run_many([1])  # type: ignore[list-item]
