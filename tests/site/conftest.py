"""A headless browser, or a reason why there is none; the built site; a report."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("TETHER_SITE", ROOT / "build" / "site"))
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium of this system, driven by playwright."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make test-site"
    )
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        without = pytest.fail if "CI" in os.environ else pytest.skip
        without("No browser here. On Debian and Ubuntu: apt-get install chromium")
    # Root, as in containers, has no sandbox to run it in; only our own pages are opened.
    options = {"executable_path": found, "args": ["--no-sandbox"]}
    with playwright.sync_playwright() as started, started.chromium.launch(**options) as chromium:
        yield chromium


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the built site."""
    if not (SITE / "index.html").is_file():
        pytest.skip(f"No site in {SITE}. Build it: make docs")
    return SITE
