"""The documentation site without building it: nothing public is left out, undocumented or led astray."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import doctest_fences  # noqa: E402
import method_curves  # noqa: E402
import site_pages  # noqa: E402
import study_tables  # noqa: E402


@pytest.fixture(scope="module")
def navigation() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return loaded


def test_every_page_of_the_navigation_exists_or_is_written(navigation: list[dict[str, Any]]) -> None:
    config = SimpleNamespace(nav=navigation)
    placed = list(site_pages._pages_in(site_pages.on_config(config).nav))
    assert len(placed) == len(set(placed))
    written = site_pages.written_pages()
    for page in placed:
        assert page in written or (ROOT / "docs" / page).is_file(), page
    of_folders = {page for page in placed if page.startswith(("tutorials/", "gallery/"))}
    assert {page.name for page in site_pages.guides()} | set(written) == set(placed) - of_folders
    tutorials = {f"tutorials/{page.name}" for page in (ROOT / "docs" / "tutorials").glob("*.py")}
    assert of_folders == tutorials | {"gallery/index.md"}


def test_every_public_name_of_the_package_is_in_the_reference() -> None:
    described = {module for chapter in site_pages.REFERENCE.values() for module in chapter}
    described |= {f"tether.losses.{name}" for name in site_pages.method_names()}
    for package in ("tether", "tether.losses", "tether.projection", "tether.ops"):
        module = importlib.import_module(package)
        for name in module.__all__:
            home = getattr(getattr(module, name), "__module__", None)
            if home is not None and home.startswith("tether."):
                assert home in described, f"{package}.{name} is defined in {home}, which no page describes"


def test_no_public_name_is_without_a_docstring() -> None:
    assert list(site_pages.undocumented()) == []


def test_a_public_name_without_a_docstring_would_be_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.py"
    functions = ('def said():\n    """Says."""', "def silent():\n    pass", "def _own():\n    pass")
    bare.write_text("\n\n\n".join(['"""Module."""', *functions]) + "\n")
    monkeypatch.setattr(site_pages, "_file_of", lambda module: bare)
    assert {what for _, what in site_pages.undocumented()} == {"silent"}


def test_every_method_has_a_page_with_its_source_and_its_checks() -> None:
    for name in site_pages.method_names():
        page = site_pages.method_page(name)
        assert f"::: tether.losses.{name}.{name}" in page
        checked = page.partition("## Checked against")[2].partition("##")[0]
        assert re.search(r"verl|TRL|equation|float64", checked), name


def test_every_method_says_when_to_take_it() -> None:
    assert set(method_curves.WHEN) == set(site_pages.method_names())
    assert set(method_curves.BESIDE) <= set(method_curves.WHEN)
    unstudied = [name for name, text in method_curves.WHEN.items() if "studied" in text]
    assert [name for name in unstudied if "Nothing yet" not in study_tables.results_of(name)] == []


@pytest.mark.parametrize(
    ("name", "advantage", "ratio", "weight"),
    [
        ("unclipped", 1.0, 2.0, 2.0),  # -r A
        ("ppo_clip", 1.0, 2.0, 0.0),  # outside 1 + 0.2, in the direction of the advantage
        ("ppo_clip", -1.0, 2.0, 2.0),  # outside, but on its way back
        ("ppo_clip", 1.0, 0.5, 0.5),
        ("tis", 1.0, 4.0, 2.0),  # min(r, 2)
        ("kl_penalty", 1.0, 2.0, 1.0),  # r A less the slope of r - 1 - log r
        ("pspo", 1.0, 2.0, 1.8),  # 0.9 r
        ("troll", 1.0, 1.0, 1.0),
    ],
)
def test_curves_are_the_slopes_of_the_losses(
    name: str, advantage: float, ratio: float, weight: float
) -> None:
    assert method_curves.weights(name, advantage, [ratio])[0] == pytest.approx(weight, abs=1e-9)


def test_troll_turns_a_token_back_that_left_the_region() -> None:
    assert method_curves.weights("troll", 1.0, [3.0])[0] < -0.1


def test_examples_are_fenced_wherever_they_stand() -> None:
    text = "Adds:\n\n    >>> [[1, 2][0]]\n    [1]\n\nand ends."
    assert (
        doctest_fences.fenced(text)
        == "Adds:\n\n    ```pycon\n    >>> [[1, 2][0]]\n    [1]\n    ```\n\nand ends."
    )
    assert doctest_fences.fenced("no example") == "no example"


def test_papers_are_found_with_the_files_that_cite_them() -> None:
    page = site_pages.papers_page()
    assert "| [2510.03817](https://arxiv.org/abs/2510.03817) | TROLL |" in page
    assert "`tether/losses/dppo.py`" in page


def test_links_out_of_the_folder_are_checked_and_made_plain() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="studies.md"))
    assert (
        site_pages.on_page_markdown("see [the house](../CONTRIBUTING.md)", page)
        == "see the house (`CONTRIBUTING.md`)"
    )
    method = SimpleNamespace(file=SimpleNamespace(src_uri="methods/troll.md"))
    inside = "see [the studies](../studies.md)"
    assert site_pages.on_page_markdown(inside, method) == inside
    with pytest.raises(SystemExit, match=r"links to \.\./nothing\.md"):
        site_pages.on_page_markdown("[x](../nothing.md)", page)


def test_results_on_a_methods_page_are_those_of_the_kept_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    interval = {"value": 0.5, "low": 0.4, "high": 0.6, "level": 0.95}
    difference = {"value": 0.1, "low": 0.0, "high": 0.2, "level": 0.95}
    row = {
        "point": "8 updates", "method": "dppo divergence=top-k-kl", "seeds": [0, 1], "final": interval,
        "over_training": interval, "verdict": "wins",
        "against": {"difference": difference, "better": interval, "p_value": 0.04},
    }  # fmt: skip
    monkeypatch.setattr(study_tables, "comparisons", lambda: {"b": {"baseline": "clip", "rows": [row]}})
    page = site_pages.method_page("dppo")
    line = (
        "| dppo divergence=top-k-kl | 2 | 50.0 (40.0 to 60.0) | 50.0 (40.0 to 60.0) | +10.0 (+0.0 to +20.0) |"
    )
    assert '???+ note "(b) Staleness, learning rate 3e-4 (1 row)"' in page
    assert f"    | 8 updates {line} 0.50 | wins, p 0.040 |" in page
    assert line in site_pages.written_pages()["study_results.md"]
    assert "Nothing yet" in site_pages.method_page("cispo")


def test_every_study_of_success_is_on_the_page_of_results_with_its_runs() -> None:
    grids = [path.read_text() for path in (ROOT / "benchmarks" / "studies").rglob("*.yaml")]
    names = {text.split("output: runs/studies/")[1].split()[0] for text in grids}
    assert set(study_tables.STUDIES) == names - {"i"}  # (i) is about cost
    begun = {name for name in names if name.startswith(("j-", "k-"))}  # whose later grids have no run yet
    assert names - begun <= set(study_tables.comparisons()) <= names


def test_a_number_that_the_studies_quote_is_made_from_the_kept_runs() -> None:
    """Study (b): TROLL at 64 updates ends at 41.6 %, which ties the clip (p 0.794)."""
    rows = study_tables.comparisons()["b"]["rows"]
    row = next(row for row in rows if row["method"] == "TROLL" and row["point"].startswith("64 updates"))
    quoted = "| TROLL | 84.4 (82.7 to 86.0) | 41.6 (36.3 to 47.6) | ties, -1.7, p 0.794 |"
    assert quoted in (ROOT / "docs" / "studies.md").read_text()
    final, against = row["final"], row["against"]
    shown = f"{100 * final['value']:.1f} ({100 * final['low']:.1f} to {100 * final['high']:.1f})"
    tested = f"{row['verdict']}, {100 * against['difference']['value']:+.1f}, p {against['p_value']:.3f}"
    assert f"{shown} | {tested} |" in quoted
