"""Every page of the built site, and a report, in a browser: desk and phone, light and dark.

`make test-site` builds the site and runs this; a page is judged by what the browser says of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tether.experiments.report import write_report
from tether.experiments.study_table import load_runs
from tether.kinds import KINDS

WIDTHS = {"phone": 390, "desk": 1280}
SCHEMES = ("light", "dark")
REPORT = "gallery/arithmetic.html"
#: What an accessibility check finds in the theme's and the notebooks' own markup, which is not written here.
NOT_OURS = (
    "md-nav",
    "md-search",
    "md-header",
    "md-toggle",
    "md-skip",
    "md-clipboard",
    "jp-",
    "md-code__nav",
)


@contextmanager
def opened(browser: Any, path: Path, width: str, scheme: str) -> Iterator[tuple[Any, list[str]]]:
    """A page, and what went wrong on it so far."""
    context = browser.new_context(viewport={"width": WIDTHS[width], "height": 844}, color_scheme=scheme)
    page, wrong = context.new_page(), []
    page.on(
        "console",
        lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request", lambda asked: wrong.append(f"asks for {asked.url}") if asked.url[:4] == "http" else None
    )
    page.goto(path.as_uri(), wait_until="load")
    yield page, wrong
    context.close()


def overflow(page: Any) -> int:
    """By how many pixels a page is wider than its window."""
    wide: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return wide


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_without_an_error_and_fits(
    browser: Any, site: Path, width: str, scheme: str
) -> None:
    # A server gives the page of what is not there for any address, so its links are absolute.
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(pages) > 40
    found = {}
    for path in pages:
        with opened(browser, path, width, scheme) as (page, wrong):
            if overflow(page) > 0:
                wrong.append(f"{overflow(page)} pixels too wide")
            if wrong:
                found[path.relative_to(site).as_posix()] = wrong
    assert not found, json.dumps(found, indent=1)[:4000]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("start", ["index.html", "methods/troll.html"])
def test_the_search_finds_a_word_from_the_disk(browser: Any, site: Path, start: str, width: str) -> None:
    with opened(browser, site / start, width, "light") as (page, wrong):
        if width == "phone":
            page.locator("label[for=__search]").first.click()
        page.locator(".md-search__input").click()
        page.keyboard.type("geodesic", delay=20)
        page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
        assert "eodesic" in page.locator(".md-search-result__list").inner_text()
        assert not wrong


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "name", ["index.html", "getting_started.html", "methods/troll.html", "results.html", REPORT]
)
def test_a_page_is_accessible(browser: Any, site: Path, name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, site / name, "desk", scheme) as (page, _):
        if scheme == "dark" and name != REPORT:
            page.wait_for_selector("[data-md-color-scheme=slate]")
        violations = axe.run(page).response["violations"]
    found = [
        f"{violation['id']}: {node['html'][:120]}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
        if not any(part in node["html"] for part in NOT_OURS)
    ]
    assert not found


@pytest.mark.parametrize("width", WIDTHS)
def test_a_reports_figures_can_be_taken_away(browser: Any, site: Path, width: str, tmp_path: Path) -> None:
    with opened(browser, site / REPORT, width, "light") as (page, wrong):
        for ending, starts in ((".svg", "<?xml"), (".csv", "panel,method,run,x,y")):
            with page.expect_download() as download:
                page.locator(f"a[download$='{ending}']").first.click()
            download.value.save_as(tmp_path / f"figure{ending}")
            assert (tmp_path / f"figure{ending}").read_text().startswith(starts)
        page.locator("details.moved summary").first.click()
        assert page.locator("details.moved[open] .bar.new").first.is_visible()
        assert not wrong


def processor_seconds(browser: Any, page_file: Path) -> float:
    """Of the browser, to open a page on a phone; other processes do not lengthen them."""
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    measured = context.new_cdp_session(page)
    measured.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(page_file.as_uri(), wait_until="load")
    metrics = {entry["name"]: entry["value"] for entry in measured.send("Performance.getMetrics")["metrics"]}
    context.close()
    return float(metrics["TaskDuration"])


def test_a_report_with_responses_is_read_within_a_second(browser: Any, site: Path) -> None:
    assert 0 < processor_seconds(browser, site / REPORT) < 1.0


def test_a_report_of_twenty_runs_opens_within_a_second(browser: Any, tmp_path: Path) -> None:
    table = Path(__file__).parents[2] / "benchmarks" / "results" / "studies" / "b.csv"
    runs = load_runs([table], KINDS)[:20]
    assert len(runs) == 20
    page = write_report(runs, tmp_path / "report")
    assert 0 < processor_seconds(browser, page) < 1.0
    with opened(browser, page, "phone", "light") as (shown, wrong):
        assert overflow(shown) <= 0
        assert not wrong
