"""The modules of episodic learning import each other in one direction."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tether.episodic

PACKAGE = "tether.episodic"


def imports(folder: Path) -> dict[str, set[str]]:
    """Module of a package -> those of its modules that it imports, anywhere in its text."""
    files = {
        path: ".".join((PACKAGE, *path.relative_to(folder).with_suffix("").parts))
        for path in folder.rglob("*.py")
    }
    names = {path: name.removesuffix(".__init__") for path, name in files.items()}
    graph: dict[str, set[str]] = {}
    for path, name in names.items():
        found = {
            target
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            for target in (node.module, f"{node.module}.{alias.name}")
        }
        graph[name] = found & set(names.values())
    return graph


def test_no_module_imports_what_imports_it() -> None:
    graph = imports(Path(tether.episodic.__path__[0]))
    assert f"{PACKAGE}.adapters" in graph[f"{PACKAGE}.envs.simulation"]  # imports were found at all
    list(TopologicalSorter(graph).static_order())


def test_a_circle_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(f"def f():\n    from {PACKAGE} import second\n")
    (tmp_path / "second.py").write_text(f"from {PACKAGE}.first import f\n")
    with pytest.raises(CycleError):
        list(TopologicalSorter(imports(tmp_path)).static_order())
