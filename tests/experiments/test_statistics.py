from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.errors import InvalidInputError
from tether.experiments.statistics import (
    Curve,
    align_curves,
    block_curve,
    bootstrap_interval,
    improvement_interval,
    interquartile_mean,
    mean_curve,
    permutation_p_value,
    proportion_interval,
)

SCORES = np.array([0.31, 0.52, 0.48, 0.77, 0.55, 0.61, 0.50])


@pytest.mark.parametrize("statistic", [np.mean, np.median, interquartile_mean])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_bootstrap_interval_equals_scipys_percentile_bootstrap(statistic: Any, level: float) -> None:
    ours = bootstrap_interval(SCORES, statistic, level=level, resamples=3000, seed=5)
    theirs = scipy.stats.bootstrap(
        (SCORES,),
        statistic,
        confidence_level=level,
        n_resamples=3000,
        method="percentile",
        rng=np.random.default_rng(5),
        vectorized=True,
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert ours.value == pytest.approx(float(statistic(SCORES)))


def test_bootstrap_interval_of_two_runs_is_known_exactly() -> None:
    # Means of two draws from {0, 1}: 0, 1/2, 1 with chances 1/4, 1/2, 1/4; a 40 % interval is the middle one.
    assert bootstrap_interval([0.0, 1.0], level=0.95).low == 0.0
    narrow = bootstrap_interval([0.0, 1.0], level=0.4)
    assert (narrow.low, narrow.value, narrow.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("runs", "coverage"), [(3, 0.76), (5, 0.84), (10, 0.90)])
def test_intervals_from_few_runs_are_as_narrow_as_documented(runs: int, coverage: float) -> None:
    rng = np.random.default_rng(0)
    intervals = [bootstrap_interval(rng.normal(size=runs), resamples=500) for _ in range(1500)]
    covered = np.mean([interval.low <= 0.0 <= interval.high for interval in intervals])
    assert covered == pytest.approx(coverage, abs=0.03)


def test_bootstrap_is_repeatable_and_the_seed_matters() -> None:
    assert bootstrap_interval(SCORES, seed=1) == bootstrap_interval(SCORES, seed=1)
    assert bootstrap_interval(SCORES, seed=1, resamples=99) != bootstrap_interval(
        SCORES, seed=2, resamples=99
    )


@pytest.mark.parametrize("scores", [[], [np.nan, 1.0], [np.inf], 3.0, np.zeros((2, 2))])
def test_scores_without_a_meaning_are_refused(scores: Any) -> None:
    with pytest.raises(InvalidInputError):
        bootstrap_interval(scores)


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_a_level_is_a_fraction(level: float) -> None:
    with pytest.raises(InvalidInputError, match="level"):
        bootstrap_interval(SCORES, level=level)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=23))
def test_interquartile_mean_equals_scipys_trimmed_mean(values: list[float]) -> None:
    assert float(interquartile_mean(values)) == pytest.approx(scipy.stats.trim_mean(values, 0.25), abs=1e-9)


def test_interquartile_mean_along_an_axis() -> None:
    values = np.random.default_rng(0).normal(size=(5, 9))
    np.testing.assert_allclose(
        interquartile_mean(values, axis=-1), scipy.stats.trim_mean(values, 0.25, axis=-1)
    )


@pytest.mark.parametrize(("successes", "count"), [(0, 10), (7, 10), (10, 10), (123, 400)])
def test_proportion_interval_equals_scipys_wilson(successes: int, count: int) -> None:
    ours = proportion_interval(successes / count, count, level=0.9)
    theirs = scipy.stats.binomtest(successes, count).proportion_ci(0.9, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_proportion_intervals_hold_what_they_are_of() -> None:
    every = [proportion_interval(share, count) for share in (0.0, 0.5, 1.0) for count in range(1, 500)]
    assert all(one.low <= one.value <= one.high for one in every)


def test_a_sampled_p_value_is_the_same_in_any_order_of_runs_and_methods() -> None:
    rng = np.random.default_rng(0)
    scores, other = rng.normal(0.7, 0.1, 9), rng.normal(0.6, 0.1, 12)  # 293,930 ways to deal them out
    orders = [(rng.permutation(scores), rng.permutation(other)) for _ in range(4)]
    values = {permutation_p_value(*pair) for pair in [*orders, *((b, a) for a, b in orders)]}
    assert len(values) == 1
    exact = scipy.stats.permutation_test(
        (scores, other), lambda a, b, axis: a.mean(axis) - b.mean(axis), n_resamples=np.inf, vectorized=True
    ).pvalue
    assert values.pop() == pytest.approx(exact, abs=0.005)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6), st.lists(st.integers(0, 4), min_size=1, max_size=6)
)
def test_probability_of_improvement_is_mann_whitneys_u_over_all_pairs(
    left: list[int], right: list[int]
) -> None:
    expected = scipy.stats.mannwhitneyu(left, right).statistic / (len(left) * len(right))
    assert improvement_interval(left, right, resamples=2).value == pytest.approx(expected)


def test_improvement_interval_equals_the_full_enumeration_of_resamples() -> None:
    left, right = [1.0, 3.0], [0.0, 2.0]
    every = [
        improvement_interval(a, b, resamples=1).value
        for a, b in product(product(left, repeat=2), product(right, repeat=2))
    ]
    low, high = np.quantile(every, [0.1, 0.9])
    interval = improvement_interval(left, right, level=0.8, resamples=20_000)
    assert (interval.value, interval.low, interval.high) == (0.75, low, high)


# ---------------------------------------------------------------------- curves


def test_mean_curve_takes_the_steps_all_runs_have() -> None:
    band = mean_curve([Curve([1, 2, 4], [1.0, 2.0, 4.0]), Curve([2, 3, 4, 5], [4.0, 0.0, 8.0, 0.0])])
    assert band.x.tolist() == [2.0, 4.0]
    assert band.mean.tolist() == [3.0, 6.0]


def test_the_band_at_a_point_is_the_bootstrap_of_its_values() -> None:
    values = np.random.default_rng(3).normal(size=(5, 4))
    band = mean_curve([Curve(np.arange(4), row) for row in values], resamples=1000, seed=7)
    for point in range(4):
        interval = bootstrap_interval(values[:, point], resamples=1000, seed=7)
        assert (band.low[point], band.high[point]) == pytest.approx((interval.low, interval.high))


def test_one_run_has_no_width() -> None:
    band = mean_curve([Curve([0, 1], [0.5, 0.7])])
    assert band.low.tolist() == band.mean.tolist() == band.high.tolist() == [0.5, 0.7]


def test_a_common_grid_interpolates_and_never_extrapolates() -> None:
    x, y = align_curves([Curve([0, 10], [0.0, 1.0]), Curve([2, 6, 20], [0.0, 4.0, 4.0])], grid=3)
    assert x.tolist() == [2.0, 6.0, 10.0]
    assert y.tolist() == pytest.approx(np.array([[0.2, 0.6, 1.0], [0.0, 4.0, 4.0]]))
    with pytest.raises(InvalidInputError, match=r"No grid of 1 points .*from 2 to 10"):
        align_curves([Curve([0, 10], [0.0, 1.0]), Curve([2, 20], [0.0, 4.0])], grid=1)


def test_interpolation_passes_over_values_that_are_not_finite() -> None:
    _, y = align_curves([Curve([0, 1, 2], [0.0, np.nan, 2.0])], grid=3)
    assert y.tolist() == [[0.0, 1.0, 2.0]]


def test_a_value_that_is_not_finite_leaves_a_gap_there_only() -> None:
    band = mean_curve([Curve([0, 1, 2], [1.0, np.inf, 3.0]), Curve([0, 1, 2], [3.0, 2.0, 5.0])])
    assert np.isnan(band.mean).tolist() == [False, True, False]
    assert np.isnan(band.low).tolist() == [False, True, False]
    assert band.mean[[0, 2]].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("curves", "grid", "message"),
    [
        ([], None, "No curves"),
        ([([0, 1], [0, 1]), ([2, 3], [0, 1])], None, "no x in common"),
        ([([0, 1], [0, 1]), ([2, 3], [0, 1])], 10, "No grid"),
        ([([0, 1], [np.nan, np.nan])], 10, "without a finite value"),
    ],
)
def test_curves_that_cannot_be_put_together_say_why(curves: Any, grid: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        mean_curve([Curve(x, y) for x, y in curves], grid)


@pytest.mark.parametrize(("x", "y"), [([0, 1], [0]), ([1, 1], [0, 1]), ([2, 1], [0, 1])])
def test_a_curve_that_goes_backwards_or_lacks_points_is_refused(x: list[float], y: list[float]) -> None:
    with pytest.raises(InvalidInputError):
        Curve(np.asarray(x), np.asarray(y))


def test_blocks_reduce_whole_cycles_and_drop_the_unfinished_one() -> None:
    curve = Curve(np.arange(1, 9), np.array([1.0, 5.0, 3.0, np.nan, 2.0, np.inf, np.nan, 7.0]))
    largest = block_curve(curve, 3, np.max)
    assert (largest.x.tolist(), largest.y.tolist()) == ([3.0, 6.0], [5.0, 2.0])
    assert np.isnan(block_curve(Curve([1, 2], [np.nan, 1.0]), 1).y).tolist() == [True, False]


@pytest.mark.parametrize("size", [0, 3])
def test_blocks_larger_than_the_curve_are_refused(size: int) -> None:
    with pytest.raises(InvalidInputError, match=f"Blocks of {size}"):
        block_curve(Curve([1, 2], [0.0, 1.0]), size)
