"""The front page: short, its links lead somewhere, its badges and versions are those of the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Pages that are read beside the code; those under docs/ are checked while the site is built.
PAGES = ["README.md", "CONTRIBUTING.md", "ROADMAP.md", "SECURITY.md", "recipes/README.md"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings_that_exist(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    broken = []
    for link in links:
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert not broken


def test_a_heading_that_does_not_exist_would_be_found() -> None:
    assert "cite" in anchors(ROOT / "README.md")
    assert "cited" not in anchors(ROOT / "README.md")


def test_the_front_page_is_read_at_a_glance() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_badges_and_versions_are_those_of_the_package() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    low, high = (int(minor) for minor in re.findall(r"3\.(\d+)", project["requires-python"]))
    assert f"python-3.{low}_to_3.{high - 1}-" in text
    assert f"license-{project['license'].replace('-', '--')}-" in text
    extras = set(re.findall(r"tether-rl\[(\w+)\]", text))
    assert extras <= set(project["optional-dependencies"])


def test_as_many_rivals_as_the_front_page_says() -> None:
    from tether.losses import LOSSES

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(LOSSES) - 1} rivals in the same harness" in text
