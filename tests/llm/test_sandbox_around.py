"""The sandbox where trainers live: in containers, as process 1, beside Tether in the interpreter itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.hostile.files import PROGRAMS

import tether
from tether.llm.sandbox import Sandbox, backends
from tether.llm.sandbox.backends import without_nested

BASE = Path(sys.base_prefix)
PYTHON = Path(os.path.realpath(sys.executable)).name
LIBRARY = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
SOURCE = Path(tether.__file__).parents[1]
SITE = Path(pytest.__file__).parents[1]
# Root, here or in a user namespace of an ordinary user's own.
AS_ROOT = ["unshare"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
SEEN = {
    name: PROGRAMS[name].code.replace("SOURCE", str(SOURCE))
    for name in ("import what is installed", "import after a search", "walk through all files")
}


def environment(**more: str) -> dict[str, str]:
    return {
        "PYTHONPATH": f"{SOURCE}:{SITE}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": "/",
        "PATH": os.environ["PATH"],
        **more,
    }


def told(line: list[str], **more: str) -> str:
    done = subprocess.run(
        line, env=environment(**more), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Nothing of ours can be seen.


def test_nothing_installed_is_seen_from_a_virtual_environment() -> None:
    with Sandbox(workers=1) as sandbox:
        for name, code in SEEN.items():
            done = sandbox.run(code, time_limit=60)
            assert done.status == "ok", (name, done)
            assert "ESCAPED" not in done.stdout, (name, done.stdout)


# The base interpreter's own tree, bound at another place, with Tether and all it needs in its packages, as in
# a container without a virtual environment. `nestedmodule` is in a folder of packages under another name.
IN_THE_INTERPRETER = """
import json, sys, tether
from tether.llm.sandbox import Sandbox
from tether.llm.sandbox.backends import BACKENDS
from tether.llm.sandbox.sandbox import try_backend
assert sys.prefix == sys.base_prefix and tether.__file__.startswith(sys.prefix), tether.__file__
import usermodule, nestedmodule
for backend in BACKENDS:
    if try_backend(backend) == "the program bwrap is not installed":
        continue
    with Sandbox(1, backend=backend) as sandbox:
        for name, code in json.loads(sys.argv[1]).items():
            done = sandbox.run(code, time_limit=60)
            assert done.ok and "ESCAPED" not in done.stdout, (backend, name, done)
        for module in ("usermodule", "nestedmodule", "pluggy"):
            done = sandbox.run(f"import {module}")
            assert done.stderr.endswith(f"ModuleNotFoundError: No module named '{module}'\\n"), done
    with Sandbox(1, backend=backend, readable=[sys.argv[2]]) as sandbox:
        done = sandbox.run(f"import sys; sys.path.append({sys.argv[2]!r}); import usermodule; print('shown')")
        assert done.stdout == "shown\\n", done
    packages = f"{sys.prefix}/{sys.argv[3]}/site-packages"
    with Sandbox(1, backend=backend, readable=[packages + "/shown"]) as sandbox:
        done = sandbox.run(f"import os; print(os.listdir({packages!r}), os.listdir({packages!r} + '/shown'))")
        assert done.stdout == "['shown'] ['module.py']\\n", done
print("nothing seen")
"""


def test_nothing_installed_is_seen_where_tether_is_in_the_base_interpreter(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    user = tmp_path / "home" / LIBRARY / "site-packages"
    for folder in (tmp_path / "python", user):
        folder.mkdir(parents=True)
    (user / "usermodule.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(IN_THE_INTERPRETER)
    shown = tmp_path / "python"
    packages = shown / LIBRARY / "site-packages"
    steps = [
        f"mount --bind {BASE} {shown}",
        f"mount -t tmpfs -o mode=755 none {packages}",
        f"ln -s {SITE}/* {packages}/ && rm -f {packages}/tether {packages}/*tether*",
        f"mkdir {packages}/tether {packages}/shown && touch {packages}/shown/module.py",
        f"mount --bind {SOURCE}/tether {packages}/tether",
        f"mount -t tmpfs -o mode=755 none {shown}/{LIBRARY}/idlelib",
        f"touch {shown}/{LIBRARY}/idlelib/nestedmodule.py",
        f"echo {shown}/{LIBRARY}/idlelib > {packages}/nested.pth",
    ]
    arguments = json.dumps(SEEN), str(user), LIBRARY
    run = [
        "sh",
        "-c",
        " && ".join(steps) + ' && cd / && exec "$@"',
        "sh",
        str(shown / "bin" / PYTHON),
        str(script),
    ]
    line = [*AS_ROOT, "--mount", *run, *arguments]
    assert told(line, PYTHONPATH="", PYTHONUSERBASE=str(tmp_path / "home")) == "nothing seen\n"


def test_folders_of_packages_are_found_at_any_depth(tmp_path: Path) -> None:
    for path in ("a/site-packages/x/dist-packages", "b/c/d/dist-packages", "e"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "e" / "site-packages").symlink_to(tmp_path / "b")
    found = [path.removeprefix(f"{tmp_path}/") for path in backends._folders_of_packages(str(tmp_path))]
    assert sorted(found) == ["a/site-packages", "b/c/d/dist-packages", "e/site-packages"]


def test_what_is_added_is_shown_over_what_is_hidden() -> None:
    default = backends.visible()
    hidden = default.hidden[0]
    assert default.added == []
    assert backends.visible([hidden]).added == [hidden]
    assert backends.visible([default.readable[0]]).added == []
    assert without_nested([*default.readable]) == default.readable


# Containers: process 1, and two alike.

AS_PROCESS_1 = """
import os
from tether.llm.sandbox import Sandbox
from tether.llm.sandbox.backends import BACKENDS
from tether.llm.sandbox.sandbox import try_backend
assert os.getpid() == 1
for backend in BACKENDS:
    reason = try_backend(backend)
    assert reason in (None, "the program bwrap is not installed"), reason
    if reason is None:
        with Sandbox(2, backend=backend) as sandbox:
            done = sandbox.run_many(["print(1)", "import os\\nwhile os.fork() >= 0: pass", "print(2)"])
            assert [one.status for one in done] == ["ok", "error", "ok"], done
print("contained")
"""
CONTAINER = [*AS_ROOT, "--pid", "--fork", "--mount-proc", "--kill-child"]


def test_a_trainer_may_be_process_1() -> None:
    assert told([*CONTAINER, sys.executable, "-c", AS_PROCESS_1]) == "contained\n"


# Trainers alike in everything, down to the user their programs become, which is otherwise drawn at random.
ALIKE = """
import os, sys
from tether.llm.sandbox import Sandbox, sandbox as module
drawn = module.drop_to
module.drop_to = lambda: None if drawn() is None else 61184
fork_bomb = "import os, time\\nwhile True:\\n    try: os.fork()\\n    except OSError: time.sleep(.01)"
# All the processes it may have, which one process of another's would make too many.
normal = "import os, time\\nfor _ in range(31):\\n    if os.fork() == 0: time.sleep(.3); os._exit(0)"
with Sandbox(1, backend="namespaces") as sandbox:
    if sys.argv[1] == "bomb":
        print("ready", flush=True)
        print(sandbox.run(fork_bomb, time_limit=120).status)
    else:
        print([sandbox.run(normal, time_limit=60).status for _ in range(5)])
"""


def test_two_containers_alike_do_not_share_a_limit() -> None:
    line = [*CONTAINER, sys.executable, "-c", ALIKE]
    with subprocess.Popen([*line, "bomb"], env=environment(), stdout=subprocess.PIPE, text=True) as bomb:
        assert bomb.stdout is not None
        assert bomb.stdout.readline() == "ready\n"
        try:
            assert told([*line, "normal"]) == f"{['ok'] * 5}\n"
            assert bomb.poll() is None
        finally:
            bomb.kill()


# Users.

AS_ORDINARY_USER = """
import os
from tether.llm.sandbox import Sandbox
from tether.llm.sandbox import sandbox as module
assert os.geteuid() != 0
assert module.try_backend("namespaces") is None, module.try_backend("namespaces")
with Sandbox(1, backend="namespaces") as sandbox:
    assert sandbox.run("import os; print(os.getuid(), os.fork() >= 0)").status == "ok"
    bomb = "import os\\nwhile True:\\n try: os.fork()\\n except OSError: pass"
    assert sandbox.run(bomb, time_limit=1).status == "timeout"
    child = "if os.fork() == 0: x = b'x' * (40 * 2**20); time.sleep(60)"
    memory = f"import os, time\\nfor _ in range(4):\\n {child}\\ntime.sleep(60)"
    assert sandbox.run(memory, time_limit=30, memory_limit=2**26).status == "memory"
print("contained")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A temporary folder every user can enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_root_and_ordinary_users_can_both_isolate(open_folder: Path) -> None:
    base = Path(sys.base_prefix)
    site = Path(pytest.__file__).parents[1]
    source = Path(tether.__file__).parents[1]
    environment = {
        "PYTHONPATH": f"{source}:{site}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": "/",
        "PATH": os.environ["PATH"],
    }
    script = open_folder / "ordinary.py"
    script.write_text(AS_ORDINARY_USER)
    if os.geteuid() != 0:
        line = [sys.executable, str(script)]
    else:
        # The interpreter may lie where only root can go: show it at a place of its own, to this test alone.
        shown = open_folder / "python"
        shown.mkdir()
        steps = (
            f"mount --bind {base} {shown} && cd / && exec setpriv --reuid=65534 --regid=65534 --clear-groups "
            f"{shown}/bin/{Path(os.path.realpath(sys.executable)).name} {script}"
        )
        line = ["unshare", "--mount", "sh", "-c", steps]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "contained\n", done.stderr
