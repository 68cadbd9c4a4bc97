"""The page of published settings: it says what the presets have, and they have what was published."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tether.episodic.presets import preset

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_settings", DOCS / "published_settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves(config: Any, path: str = "") -> set[str]:
    """The dotted names of all settings."""
    found = set()
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), path + field.name
        found |= leaves(value, f"{name}.") if dataclasses.is_dataclass(value) else {name}
    return found


def test_the_page_is_what_the_presets_have(published: ModuleType) -> None:
    assert (DOCS / "episodic_published.md").read_text(encoding="utf-8") == published.page()


def test_published_presets_differ_from_what_was_published_in_nothing(published: ModuleType) -> None:
    for name in published.PUBLISHED:
        for path, wanted, ours, _ in published.rows(name):
            assert (ours, type(ours)) == (wanted, type(wanted)), f"{name}: {path}"


def test_every_setting_that_changes_a_run_is_on_the_page(published: ModuleType) -> None:
    of_the_run = {"algo", "seed", "num_workers", "evaluate_every", "evaluation_episodes", "checkpoint_every",
                  "keep_checkpoints", "policy.init_std", "learner_threads"}  # fmt: skip
    assert leaves(preset("metaworld-paper")) - of_the_run == set(published.SETTINGS)
