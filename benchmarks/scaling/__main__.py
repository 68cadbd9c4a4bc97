"""Print every table, or put them into the page."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import benchmarks.scaling
from benchmarks.scaling.tables import TABLES

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with its tables replaced.

    Raises:
        ValueError: a table without a place.
    """
    for name, text in tables.items():
        place = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(page):
            raise ValueError(f"docs/scaling.md has no place marked <!-- table: {name} -->.")
        page = place.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)  # type: ignore[misc]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(
        description=benchmarks.scaling.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    tables = {name: make() for name, make in TABLES.items()}
    if parser.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    for name, text in tables.items():
        print(f"{name}\n\n{text}\n")


if __name__ == "__main__":
    main()
