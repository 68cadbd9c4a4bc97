"""What is said of versions is what was run: the tested ranges, the table in the docs, what is pinned."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import matrix
from tether.integrations.seams import Tested
from tether.integrations.trl_seam import TRANSFORMERS, TRL

FOUND: dict[str, Any] = json.loads(matrix.RESULTS.read_text(encoding="utf-8"))

#: Read, for the plug-in of verl can be imported beside verl alone.
VERL = Tested(
    *re.findall(
        r'Tested\("(verl)", "([0-9.]+)", "([0-9.]+)"\)',
        (matrix.ROOT / "src/tether/integrations/verl/environment.py").read_text(encoding="utf-8"),
    )[0]
)


def pinned(package: str) -> str:
    """The version with which the whole suite runs."""
    file = "constraints-verl.txt" if package == "verl" else "constraints.txt"
    pins = (matrix.ROOT / file).read_text(encoding="utf-8")
    found = re.search(rf"^{package}==(\S+)$", pins, re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_table_is_of_what_was_found() -> None:
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.with_table(page, FOUND) == page, "make test-matrix, or python tests/matrix.py --table"


@pytest.mark.parametrize("tested", [TRL, TRANSFORMERS, VERL], ids=str)
def test_a_tested_range_ends_where_tests_ran_and_passed(tested: Tested) -> None:
    ran = {one["versions"].get(tested.package) for one in FOUND.values() if not one["failed"]}
    assert {tested.oldest, tested.newest} <= ran | {pinned(tested.package)}


@pytest.mark.parametrize("tested", [TRL, TRANSFORMERS, VERL], ids=str)
def test_what_is_pinned_is_within_the_tested_range(tested: Tested) -> None:
    assert tested.covers(pinned(tested.package))


def test_every_environment_pins_torch_and_no_environment_pins_what_it_asks_for() -> None:
    for environment in matrix.ENVIRONMENTS.values():
        lines = matrix.constraints(environment).splitlines()
        assert any(line.startswith("torch==") for line in lines)
        named = {re.split("[=<>]", package)[0] for package in environment.packages}
        assert not named & {line.split("==")[0].lower() for line in lines}


def test_the_tests_of_an_environment_are_there() -> None:
    for environment in matrix.ENVIRONMENTS.values():
        assert [path for path in environment.tests if not (matrix.ROOT / path).is_file()] == []
