"""The benchmark harness: its statistics on numbers known by hand, and one run of all it can do in seconds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from benchmarks.bench import __main__ as bench
from benchmarks.bench import bars, correctness, report, timing, training_step
from benchmarks.bench.bars import Finding
from benchmarks.bench.contestants import tether_clip
from benchmarks.bench.memory import peak_bytes
from benchmarks.bench.shapes import TINY
from benchmarks.bench.workload import KL_BOUND, make_workloads

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
OF_VERL = {"benchmarks.verl_payload"}  # in whose environment it is run


def test_every_benchmark_finds_what_it_imports() -> None:
    """Many are run once in months, by hand."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py"))
    names = {".".join(path.with_suffix("").parts) for path in files} - OF_VERL
    assert len(names) > 40
    for name in names:
        importlib.import_module(name)


@pytest.mark.parametrize(("name", "trainer"), [("TROLL", "TROLLTrainer"), ("clip", "GRPOTrainer")])
def test_the_whole_step_is_that_of_the_quickstart(name: str, trainer: str) -> None:
    made = training_step._trainer(name, 1)
    assert type(made).__name__ == trainer
    assert (made.args.generation_batch_size, made.args.steps_per_generation) == (512, 8)


def test_ratios_are_paired_by_turn_and_their_interval_holds_the_median() -> None:
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0]
    times = {"a": [1.1 * t for t in drifting], "b": drifting}
    paired = timing.ratio(times, "a", "b")
    assert paired.median == pytest.approx(1.1)
    assert paired.low == pytest.approx(1.1)  # the drift is in both
    assert paired.high == pytest.approx(1.1)
    noisy = timing.ratio({"a": [1.0, 2.0, 3.0, 4.0, 5.0], "b": [1.0] * 5}, "a", "b")
    assert noisy.low < noisy.median == 3.0 < noisy.high


def test_every_turn_runs_contestants_forwards_and_backwards() -> None:
    calls: list[str] = []
    times = timing.run_in_turns({n: lambda n=n: calls.append(n) for n in "abc"}, 2, CPU)
    assert "".join(calls) == "abc" + "abccba" * 2
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_what_does_not_fit_is_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    def too_large() -> None:
        raise torch.OutOfMemoryError("tried to allocate 160 GiB")

    times = timing.run_in_turns({"small": lambda: None, "large": too_large}, 1, CPU)
    assert list(times) == ["small"]
    assert "left out: large does not fit on the device (tried to allocate 160 GiB)" in capsys.readouterr().out


def test_a_bar_is_met_by_a_median_at_its_limit_and_not_above() -> None:
    def finding(median: float) -> Finding:
        return Finding("a", "b", "here", timing.Ratio(median, 0.0, 9.0), 1.0, 1.0, bar=bars.TROLL_FEW)

    assert finding(1.05).verdict("cpu") == "met"
    assert finding(1.06).verdict("cpu") == finding(1.05).verdict("cuda") == "MISSED"


@pytest.mark.parametrize("regime", ["peaked", "uniform"])
def test_workloads_violate_as_often_as_they_say(regime: str) -> None:
    """Judged by dense float64: the divergence on the support and one outcome for the rest."""
    for rate, work in make_workloads(TINY, regime, (0.0, 0.1, 1.0), CPU).items():  # type: ignore[arg-type]
        new = (work.hidden.double() @ work.weight.double().T).softmax(-1).detach()
        old = (work.old_hidden.double() @ work.weight.double().T).softmax(-1).detach()
        held = torch.zeros_like(new, dtype=torch.bool)
        for row, ids in enumerate(work.old.ids):
            held[row, ids[ids >= 0].long()] = True
        buckets = [torch.cat((x * held, (x * ~held).sum(-1, keepdim=True)), -1) for x in (new, old)]
        kl = torch.where(buckets[0] > 0, buckets[0] * (buckets[0] / buckets[1]).log(), 0.0).nansum(-1)
        expected = -(-rate * TINY.tokens // 1) / TINY.tokens
        assert float((kl > KL_BOUND).double().mean()) == work.violating == pytest.approx(expected)


def test_a_wrong_gradient_stops_the_benchmark() -> None:
    work = make_workloads(TINY, "peaked", (0.1,), CPU)[0.1]
    assert correctness.check({"clip": (tether_clip, correctness.dense_clip)}, work)["clip"] < 1e-5
    with pytest.raises(
        SystemExit, match=r"clip on tiny in torch.float32: its gradient is off by .* means nothing"
    ):
        correctness.check({"clip": (lambda w: 1.01 * tether_clip(w), correctness.dense_clip)}, work)


def test_the_command_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["main_shapes", "old_policy", "root_search"]
    monkeypatch.setattr("sys.argv", ["bench", "--quick", "--output", str(tmp_path), "--only", *names])
    bench.main()
    parts = json.loads((tmp_path / "cpu.json").read_text())["sections"]
    assert list(parts) == names
    findings = [finding for part in parts.values() for finding in part["findings"]]
    pairs = {(f["ours"], f["against"]) for f in findings}
    assert ("TROLL", "clip") in pairs
    assert ("with top-K", "plain") in pairs
    assert ("Newton", "published") in pairs
    assert all(f["ratio"]["low"] <= f["ratio"]["median"] <= f["ratio"]["high"] for f in findings)
    table = (tmp_path / "cpu.md").read_text().splitlines()
    assert len(table) == 2 + len(findings)
    assert "gradients are off by" in capsys.readouterr().out


def test_a_section_measured_again_replaces_what_it_found_before(tmp_path: Path) -> None:
    def finding(median: float) -> Finding:
        return Finding("a", "b", "here", timing.Ratio(median, 1.0, 9.0), 1.0, 2.0, bar=bars.OLD_PASS)

    for section, value in (("one", 2.0), ("two", 3.0), ("one", 4.0)):
        report.write(section, [finding(value)], CPU, tmp_path, "command")
    rows = (tmp_path / "cpu.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[3] for row in rows] == ["4.000", "3.000"]
    assert all("| MISSED |" in row for row in rows)


def test_another_head_leaves_what_was_found_with_the_first(tmp_path: Path) -> None:
    def finding(where: str, median: float) -> Finding:
        return Finding("a", "b", where, timing.Ratio(median, 1.0, 9.0), 1.0, 2.0)

    report.write("one", [finding("large", 2.0), finding("small", 3.0)], CPU, tmp_path, "all of them")
    report.write("one", [finding("small", 4.0)], CPU, tmp_path, "--head small", others_stay=True)
    rows = (tmp_path / "cpu.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[2:4] for row in rows] == [["large", "2.000"], ["small", "4.000"]]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
def test_peak_memory_is_that_of_the_loss_and_not_of_the_libraries() -> None:
    """Dense TROLL on [64, 1024] holds its logits, their log-softmax and gradients: a quarter MiB each."""
    peak = peak_bytes("paper-style", "cpu tiny")
    assert peak is not None
    assert 2 * 2**18 < peak < 64 * 2**18
