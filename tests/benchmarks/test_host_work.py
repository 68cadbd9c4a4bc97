"""The profile of a GPU and its host: in small, on a CPU, which has no GPU to be busy."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import host_work


def test_what_spans_cover_is_counted_once() -> None:
    assert host_work.covered([(4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (5.0, 5.5)]) == 5.0
    assert host_work.covered([]) == 0.0


def test_a_dry_run_measures_every_contestant(tmp_path: Path) -> None:
    output = tmp_path / "found.jsonl"
    host_work.main(["--dry-run", "--output", str(output)])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["contestant"] for line in lines] == [*host_work.CONTESTANTS] * len(host_work.RATES)
    assert all(len(line["milliseconds"]) == host_work.REPEATS for line in lines)
    assert all(min(line["milliseconds"]) > 0 for line in lines)


def test_the_kept_profile_is_of_what_it_measures() -> None:
    lines = [json.loads(line) for line in host_work.RESULTS.read_text().splitlines()]
    assert {line["contestant"] for line in lines} == {*host_work.CONTESTANTS}
    exact = [line for line in lines if line["contestant"] == "exact in one pass"]
    assert exact
    assert all(line["busy_milliseconds"] <= min(line["milliseconds"]) for line in exact)
    # A GPU that its host keeps at work is busy all the time, and slower where a profiler watches.
    assert all(line["busy_milliseconds"] <= 1.15 * min(line["milliseconds"]) for line in lines)
