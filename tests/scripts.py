"""Recipes and examples: scripts beside the package, whose functions are tested too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[1]


def load_script(path: str | Path) -> ModuleType:
    """A script of the repository as a module, without running its command."""
    script = REPOSITORY / path
    spec = importlib.util.spec_from_file_location(f"script_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module
