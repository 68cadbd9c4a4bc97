"""What a comparison says of its runs: against scipy, by hand, and nothing that few seeds cannot carry."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tether.errors import InvalidInputError
from tether.experiments import load_runs, write_report
from tether.experiments.comparison import Entry, compare_methods, comparison_tables, write_comparison
from tether.experiments.statistics import difference_interval, permutation_p_value


@pytest.mark.parametrize(("first", "second"), [(5, 5), (3, 6), (8, 8)])
def test_exact_permutation_p_equals_scipys(first: int, second: int) -> None:
    rng = np.random.default_rng(first)
    left, right = rng.normal(0.3, 1.0, first), rng.normal(0.0, 1.0, second)
    expected = stats.permutation_test(
        (left, right), lambda x, y, axis: abs(x.mean(axis) - y.mean(axis)), vectorized=True,
        n_resamples=np.inf, alternative="greater",
    )  # fmt: skip
    assert permutation_p_value(left, right) == pytest.approx(expected.pvalue, abs=1e-12)


def test_sampled_permutation_p_is_near_the_exact_one() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(0.8, 1.0, 8), rng.normal(0.0, 1.0, 8)
    exact = permutation_p_value(left, right)
    assert permutation_p_value(left, right, resamples=5000) == pytest.approx(exact, abs=0.01)


def test_under_no_difference_five_seeds_are_called_different_as_often_as_promised() -> None:
    """The reason for the permutation test: a 95 % bootstrap interval from five seeds errs far more often."""
    rng = np.random.default_rng(1)
    draws = rng.normal(size=(300, 2, 5))
    wrong = np.mean([permutation_p_value(a, b) < 0.05 for a, b in draws])
    assert wrong < 0.08
    missed = [difference_interval(a, b, resamples=400) for a, b in draws[:150]]
    assert np.mean([not i.low <= 0 <= i.high for i in missed]) > wrong


def test_equal_scores_are_never_different() -> None:
    assert permutation_p_value([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]) == 1.0
    assert permutation_p_value([0.1 + 0.2, 0.3], [0.3, 0.1 + 0.2]) == 1.0


def test_equal_means_of_different_scores_are_never_different() -> None:
    """Their difference is 0 but for rounding, so every arrangement differs by as much."""
    left, right = [0.825, 0.865, 0.8075, 0.8, 0.87], [0.855, 0.835, 0.8175, 0.845, 0.815]
    assert abs(sum(left) - sum(right)) < 1e-12
    assert permutation_p_value(left, right) == permutation_p_value(right, left) == 1.0


def test_scores_that_cannot_be_shuffled_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="not finite"):
        permutation_p_value([1.0, np.nan], [1.0])
    with pytest.raises(InvalidInputError, match=r"must be \[runs\]"):
        difference_interval([[1.0]], [[1.0]])


def evals(*scores: float) -> list[dict[str, float]]:
    return [{"step": 2 * place, "success": score, "problems": 100} for place, score in enumerate(scores)]


@pytest.fixture
def entries(make_run: Callable[..., Path]) -> list[Entry]:
    """Two methods at two points with four seeds: far apart at the first, the same at the second."""
    made = []
    for point, gap in (("1 updates", 0.3), ("8 updates", 0.0)):
        for method, less in (("TROLL", 0.0), ("clip", gap)):
            for seed in range(4):
                final = 0.8 + 0.01 * seed - less
                metrics = [{"kl_mean": 0.1, "tokens": 500.0 * step} for step in (1, 2, 3, 4)]
                path = make_run(
                    f"{method}-{point}-{seed}", metrics, evals(0.4, 0.5, final), label=method, seed=seed
                )
                [run] = load_runs([path])
                made.append(Entry(method, point, run, samples=64))
    return made


def test_methods_are_judged_at_each_point_by_their_last_evaluation(entries: list[Entry]) -> None:
    metric, rows = compare_methods(entries, "clip")
    assert metric == "success"
    far, base, same, _ = rows
    assert (far.method, far.point, far.seeds) == ("TROLL", "1 updates", (0, 1, 2, 3))
    assert far.final.value == pytest.approx(0.815)
    assert far.over_training.value == pytest.approx((0.5 + 0.815) / 2)
    assert far.start == pytest.approx(0.4)
    assert (far.samples, far.tokens, far.unfinished) == (64, 2000, 0)
    assert base.against is None
    assert far.against is not None
    assert far.against.difference.value == pytest.approx(0.3)
    assert far.against.p_value == pytest.approx(2 / 70)
    assert (far.against.better.value, far.against.verdict) == (1.0, "wins")
    assert same.against is not None
    assert same.against.verdict == "ties"
    flipped = compare_methods(entries, "TROLL")[1][1]
    assert flipped.against is not None
    assert flipped.against.verdict == "loses"


def test_three_seeds_are_never_enough_to_call_a_winner(entries: list[Entry]) -> None:
    few = [entry for entry in entries if entry.run.config.seed < 3 and entry.point == "1 updates"]
    row = compare_methods(few, "clip")[1][0]
    assert row.against is not None
    assert row.against.difference.low > 0.2  # the bootstrap would have called it
    assert row.against.verdict == "too few seeds"


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 4), (2, 5), (2, 4), (1, 19), (1, 20)])
def test_so_many_seeds_can_decide_as_let_p_fall_below_the_level(
    first: int, second: int, make_run: Callable[..., Path]
) -> None:
    """Of unequal numbers the best arrangement has no mirror image: 3 of 7 above 4 is one in 35."""
    made = []
    for method, count, final in (("TROLL", first, 0.9), ("clip", second, 0.1)):
        for seed in range(count):
            path = make_run(f"{method}{seed}", [], evals(0.4, final + 0.001 * seed), label=method, seed=seed)
            made.append(Entry(method, "", load_runs([path])[0]))
    against = compare_methods(made, "clip")[1][0].against
    assert against is not None
    assert against.verdict == ("wins" if against.p_value < 0.05 else "too few seeds")


def test_a_seed_twice_is_refused(entries: list[Entry]) -> None:
    with pytest.raises(InvalidInputError, match="seed twice"):
        compare_methods([*entries, entries[0]], "clip")


def test_a_run_that_ends_with_no_number_is_refused_instead_of_counting_with_an_earlier_one(
    make_run: Callable[..., Path], entries: list[Entry]
) -> None:
    path = make_run("diverged", [], evals(0.4, 0.9, np.nan), label="TROLL", seed=4)
    [run] = load_runs([path])
    with pytest.raises(InvalidInputError, match=r"diverged ends with a success of nan.*leave out"):
        compare_methods([*entries, Entry("TROLL", "1 updates", run)], "clip")


def test_an_evaluation_without_a_number_on_the_way_is_passed_over(make_run: Callable[..., Path]) -> None:
    [run] = load_runs([make_run("wavering", [], evals(0.4, np.nan, 0.6), label="TROLL")])
    _, [row] = compare_methods([Entry("TROLL", "", run)], None)
    assert (row.start, row.final.value, row.over_training.value) == (0.4, 0.6, 0.6)


def test_table_json_and_page_show_the_same_verdicts(entries: list[Entry], tmp_path: Path) -> None:
    from rich.console import Console

    metric, rows = compare_methods(entries, "clip")
    console = Console(width=80, record=True, file=io.StringIO())
    for table in comparison_tables(metric, rows, "clip"):
        console.print(table)
    text = console.export_text()
    assert "Success, 1 updates" in text
    assert "wins" in text
    assert "A run: 64 responses, 2.0k tokens, 0:08 of training" in " ".join(text.split())
    data = json.loads(write_comparison(tmp_path / "comparison.json", metric, rows, "clip").read_text())
    assert [row["verdict"] for row in data["rows"]] == ["wins", None, "ties", None]
    assert data["rows"][0]["against"]["p_value"] == pytest.approx(2 / 70)
    folders = [entry.run.path for entry in entries]
    page = write_report(folders, tmp_path / "report", comparison=(metric, rows, "clip")).read_text()
    assert page.count('<td class="right">wins</td>') == 1
    assert page.count("· baseline</span>") == 2, "at each point"
    assert "Against clip" in page
    assert "wins" in page
