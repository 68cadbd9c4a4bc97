"""What the house promises of itself: each default once, files and functions of one screen, nothing twice."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tether"
sys.path.insert(0, str(ROOT / "docs"))

import module_picture  # noqa: E402

MOST_LINES, MOST_OF_A_FUNCTION, MOST_ALIKE = 400, 60, 10
# A rival with a bound of its own, from its own paper.
OF_RIVALS = {"losses/trm.py"}


def places(pattern: str) -> list[str]:
    """The files of the package in which a pattern occurs, once for each time it does."""
    return [
        name
        for file in sorted(SOURCE.rglob("*.py"))
        if (name := file.relative_to(SOURCE).as_posix()) not in OF_RIVALS
        for _ in re.findall(pattern, file.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(
    "declaration",
    [
        r"kl_bound: float = 0\.05",
        r"alpha: float = 1\.0",
        r"top_k: int = 64",
        r"mass: float = 1 - 1e-5",
        r'support: \w+ = "exact"',
        r'region: \w+ = "token"',
    ],
)
def test_a_default_of_troll_is_written_down_once(declaration: str) -> None:
    assert places(declaration) == ["settings.py"]


@pytest.mark.parametrize(
    "refusal",
    [
        "positive number of nats",
        "alpha must be finite and not negative",
        "integer of at least 1, got {",
        r"mass must lie in",
    ],
)
def test_a_range_of_troll_is_checked_once(refusal: str) -> None:
    assert places(re.escape(refusal)) == ["settings.py"]


def test_the_objective_of_troll_is_written_down_once() -> None:
    assert places(r"\+ (\w+\.)?(troll_)?alpha \* ") == ["losses/troll.py"]


# ---------------------------------------------------------------------- sizes, repetitions, circles


def sources() -> Iterator[tuple[str, str]]:
    """Name and text of each file of the package."""
    for file in sorted(SOURCE.rglob("*.py")):
        yield file.relative_to(SOURCE).as_posix(), file.read_text(encoding="utf-8")


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring, of a function or of a field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if is_text(function.body[0]) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def code_lines(text: str) -> list[tuple[int, str]]:
    """Numbered lines of code, white space folded, without imports, docstrings and comments."""
    passed_over: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text(node):
            passed_over.update(range(node.lineno, node.end_lineno + 1))
    folded = ((number, " ".join(line.split())) for number, line in enumerate(text.splitlines(), start=1))
    return [
        (number, line)
        for number, line in folded
        if line and not line.startswith("#") and number not in passed_over
    ]


def repeated_blocks(texts: Iterator[tuple[str, str]], length: int) -> list[str]:
    """Places where so many lines of code in a row stand that stood before."""
    first: dict[tuple[str, ...], str] = {}
    found = []
    for name, text in texts:
        lines = code_lines(text)
        for start in range(len(lines) - length + 1):
            block = tuple(line for _, line in lines[start : start + length])
            place = f"{name}:{lines[start][0]}"
            if first.setdefault(block, place) != place:
                found.append(f"{place} repeats {first[block]}")
    return found


def test_no_file_is_longer_than_one_sitting() -> None:
    lengths = {name: len(text.splitlines()) for name, text in sources()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_no_two_test_modules_have_one_name() -> None:
    """pytest collects either, and stops at the other."""
    alone = {"verl", "vllm_engine", "site"}  # each collected by itself
    modules = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name not in alone]
    assert len({path.name for path in modules}) == len(modules)


def test_nothing_under_version_control_is_a_link() -> None:
    """A link may lead out of the checkout, to a place that one machine alone has."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no checkout, or no git to ask")
    listed = subprocess.run(
        [git, "-c", "safe.directory=*", "ls-files", "--stage"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{name}:{node.name}": lines_of_body(node)
        for name, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in long.items() if length > MOST_OF_A_FUNCTION} == {}


def test_no_block_of_ten_lines_stands_twice() -> None:
    assert repeated_blocks(sources(), MOST_ALIKE) == []


def test_a_repeated_block_would_be_found_however_it_is_indented() -> None:
    body = "\n".join(f"a{number} = {number}  # of one place" for number in range(MOST_ALIKE))
    inside = "if x:\n" + "\n\n".join(f"    {line}" for line in body.splitlines())
    found = repeated_blocks(iter([("one.py", body), ("other.py", inside)]), MOST_ALIKE)
    assert found == ["other.py:2 repeats one.py:1"]


def test_modules_import_each_other_in_no_circle() -> None:
    imports = grimp.build_graph("tether", cache_dir=None)
    graph = nx.DiGraph(
        (module, other)
        for module in imports.modules
        for other in imports.find_modules_directly_imported_by(module)
    )
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_the_picture_of_the_modules_is_up_to_date() -> None:
    page = module_picture.PAGE.read_text(encoding="utf-8")
    assert module_picture.with_picture(page) == page, "make picture"


def test_a_module_in_no_room_and_a_room_without_modules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match=r"tether\.attic is in no room"):
        module_picture.room_of("tether.attic")
    monkeypatch.setitem(module_picture.ROOMS["ops"], "attic", ("ops.attic",))
    with pytest.raises(LookupError, match=r"No module is in .*attic"):
        module_picture.picture()
