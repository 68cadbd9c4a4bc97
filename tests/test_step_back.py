"""The step back: against a dense float64 scan of the line, and within its budget whatever it is given."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ranks import run_two_ranks
from rounding import unit_of
from step_back_policy import BUDGET, Policy
from tether import step_back
from tether.errors import InvalidInputError, TetherError, TetherWarning
from tether.step_back import Statistic, StepBack, StepBackResult
from tether.step_back_search import CONTENT, PASSES, LineSearch


def of_tokens(statistic: Statistic, kl: Tensor) -> float:
    if statistic == "mean":
        return float(kl.mean())
    share = 1.0 if statistic == "max" else float(statistic)
    return float(kl.sort().values[math.ceil(share * len(kl)) - 1])


@pytest.mark.parametrize("statistic", ["mean", "max", 0.9])
@pytest.mark.parametrize("size", [0.01, 0.03, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_step_is_the_largest_that_a_dense_scan_finds_within_the_budget(
    statistic: Statistic, size: float, seed: int
) -> None:
    policy = Policy(seed, size)
    result = policy.enforce(statistic, passes=40)
    scan = [of_tokens(statistic, policy.kl_at(i / 500)) for i in range(501)]
    within = [i / 500 for i, kl in enumerate(scan) if kl <= BUDGET]
    assert result.divergence_before == pytest.approx(scan[-1], rel=1e-9)
    assert result.divergence == pytest.approx(of_tokens(statistic, policy.kl_at(result.fraction)), rel=1e-9)
    if scan[-1] <= BUDGET:
        assert (result.fraction, result.passes) == (1.0, 1)
        return
    assert CONTENT * BUDGET <= result.divergence <= BUDGET
    # To first order the root of the divergence is linear: what is left of the budget says how far it is.
    assert math.sqrt(CONTENT) * 0.9 * max(within) <= result.fraction <= max(within) + 1 / 500


@pytest.mark.parametrize("statistic", ["mean", 0.9])
@pytest.mark.parametrize("size", [0.03, 0.1, 0.3])
def test_four_passes_are_enough_for_ten_times_the_budget(statistic: Statistic, size: float) -> None:
    for seed in range(10):
        policy = Policy(seed, size)
        result = policy.enforce(statistic)
        assert result.passes <= 4
        if result.divergence_before <= 10 * BUDGET:
            assert result.divergence >= CONTENT * min(BUDGET, result.divergence_before)
        assert result.divergence <= BUDGET


@pytest.mark.parametrize("size", [1, 3, 9, 20])
@pytest.mark.parametrize("statistic", ["mean", "max", 0.9])
def test_four_passes_are_enough_where_the_divergence_saturates(statistic: Statistic, size: float) -> None:
    """Hundreds of times the budget away it hardly tells how far that is; little of the update is lost."""
    generator = torch.Generator().manual_seed(0)
    used = []
    for _ in range(20):
        old, change = torch.randn(2, 64, 16, generator=generator, dtype=torch.float64)

        def divergence_at(t: float, old: Tensor = 2 * old, change: Tensor = size * change) -> float:
            new = (old + t * change).log_softmax(-1)
            return of_tokens(statistic, (new.exp() * (new - old.log_softmax(-1))).sum(-1))

        search = LineSearch(BUDGET, divergence_at(1.0))
        for measured in range(1, PASSES):
            if not search.content:
                t = search.propose(last=measured == PASSES - 1)
                search.note(t, divergence_at(t))
        used.append(search.divergence / BUDGET)
    assert min(used) >= 0.2
    assert sorted(used)[1] >= CONTENT  # of all but one


@pytest.mark.parametrize("passes", [2, 3, 4])
def test_the_weights_kept_are_those_measured_last_within_the_budget(passes: int) -> None:
    policy = Policy(0, 0.1)
    bound = StepBack(policy.parameters, BUDGET, passes=passes)
    bound.record()
    with torch.no_grad():
        policy.parameters[1] += policy.step[1]
    seen: list[tuple[float, list[Tensor]]] = []

    def measure() -> Tensor:
        kl = policy.kl()
        seen.append((float(kl.mean()), [parameter.detach().clone() for parameter in policy.parameters]))
        return kl

    result = bound.enforce(measure)
    assert len(seen) == result.passes <= passes
    kept = [weights for kl, weights in seen if kl == result.divergence]
    assert len(kept) == 1
    assert all(torch.equal(a, b) for a, b in zip(kept[0], policy.parameters, strict=True))


def line(
    divergence: Callable[[float], float],
    budget: float = BUDGET,
    passes: int = 4,
    dtype: torch.dtype = torch.float64,
) -> tuple[StepBackResult, float]:
    """A step from 0 to 1 on a line where the divergence is anything; the result, and where it ended."""
    place = nn.Parameter(torch.zeros(3, dtype=dtype))
    bound = StepBack([place], budget, passes=passes)
    bound.record()
    with torch.no_grad():
        place += 1.0
    result = bound.enforce(lambda: torch.tensor([divergence(float(place[0]))], dtype=torch.float64))
    assert bool((place == place[0]).all())
    return result, float(place[0].detach())


NASTY: dict[str, Callable[[float], float]] = {
    "huge": lambda t: 1e30 * t * t,
    "saturated": lambda t: 20 * (1 - math.exp(-1e4 * t * t)),
    "a wall": lambda t: 0.0 if t < 1e-3 else 9.0,
    "rises and falls": lambda t: 1 + math.sin(25 * t),
    "falls": lambda t: 2 - t,
    "constant": lambda t: 1.0,
    "infinite": lambda t: math.inf,
    "infinite beyond a tenth": lambda t: t * t if t < 0.1 else math.inf,
    "not a number": lambda t: math.nan,
    "not a number beyond a tenth": lambda t: t * t if t < 0.1 else math.nan,
    "zero": lambda t: 0.0,
    "negative by rounding": lambda t: -1e-18,
    "on the budget": lambda t: BUDGET,
    "just outside": lambda t: math.nextafter(BUDGET, 1) * t,
}


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("passes", [2, 4, 9])
def test_the_budget_holds_whatever_the_line_is_like(name: str, passes: int) -> None:
    result, place = line(NASTY[name], passes=passes)
    assert place == result.fraction
    assert result.passes <= passes
    assert result.divergence <= BUDGET
    if result.fraction > 0:
        assert result.divergence == max(0.0, NASTY[name](place)) <= BUDGET
    else:
        assert result.divergence == 0.0


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(0, math.inf) | st.just(math.nan), min_size=6, max_size=6),
    passes=st.integers(2, 6),
    budget=st.floats(1e-9, 1e9),
)
def test_no_point_is_kept_that_was_not_measured_within_the_budget(
    values: list[float], passes: int, budget: float
) -> None:
    """Whatever the measurements say, one after the other."""
    told: dict[float, float] = {}

    def divergence(place: float) -> float:
        told[place] = values[len(told)]
        return told[place]

    result, place = line(divergence, budget, passes)
    assert place == result.fraction
    assert result.divergence <= budget
    assert place == 0.0 or told[place] == result.divergence
    assert len(told) == result.passes <= passes  # no point twice


def test_a_step_of_nothing_is_kept_after_one_pass() -> None:
    policy = Policy(0, 0.0)
    assert policy.enforce() == StepBackResult(1.0, 0.0, 0.0, 1)


def test_without_tokens_nothing_was_measured_and_nothing_is_kept() -> None:
    place = nn.Parameter(torch.zeros(2))
    bound = StepBack([place], BUDGET)
    bound.record()
    with torch.no_grad():
        place += 1
    result = bound.enforce(lambda: torch.zeros(0))
    assert (result.fraction, result.divergence) == (0.0, 0.0)
    assert bool((place == 0).all())


@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_the_old_ones_again_and_that_is_said(spoiled: float) -> None:
    policy = Policy(0, 0.1)
    policy.step[1][3, 3] = spoiled
    with pytest.warns(TetherWarning, match="optimizer's state is likely to be spoiled"):
        result = policy.enforce()
    assert (result.fraction, result.divergence, result.passes) == (0.0, 0.0, 0)
    assert math.isnan(result.divergence_before)
    assert all(torch.equal(a, b) for a, b in zip(policy.start, policy.parameters, strict=True))


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_measurement_that_fails_leaves_the_weights_as_they_were(fails_at: int) -> None:
    place = nn.Parameter(torch.zeros(3))
    bound = StepBack([place], BUDGET)
    bound.record()
    with torch.no_grad():
        place += 0.7
    calls = 0

    def measure() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise RuntimeError("out of memory")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="out of memory"):
        bound.enforce(measure)
    assert torch.equal(place.detach(), torch.full((3,), 0.7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [3, 1 << 24])
def test_every_kind_of_parameter_moves_to_the_same_point(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scalars, tensors that are not contiguous, empty ones; in blocks; tied ones once, frozen ones never."""
    monkeypatch.setattr(step_back, "_BLOCK_ELEMENTS", block)
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(5, 4, dtype=dtype).t())
    tensors = [
        nn.Parameter(torch.randn((), dtype=dtype)),
        nn.Parameter(torch.empty(0, 3, dtype=dtype)),
        matrix,
    ]
    frozen = nn.Parameter(torch.randn(2, dtype=dtype), requires_grad=False)
    bound = StepBack([*tensors, matrix, frozen], BUDGET, passes=2)
    bound.record()
    old = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in (*tensors, frozen):
            tensor.add_(1.0)
    new = [tensor.detach().clone() for tensor in tensors]
    told = iter([1.0, 0.01])
    result = bound.enforce(lambda: torch.tensor([next(told)]))
    assert 0 < result.fraction < 1
    wide = torch.promote_types(dtype, torch.float32)
    for start, end, tensor in zip(old, new, tensors, strict=True):
        between = start.to(wide) + result.fraction * (end.to(wide) - start.to(wide))
        largest = (
            unit_of(torch.cat([start.flatten(), end.flatten()]).double(), dtype) if start.numel() else 0.0
        )
        torch.testing.assert_close(tensor.detach().to(wide), between, atol=largest, rtol=0)


def test_the_old_weights_are_those_of_the_latest_record() -> None:
    place = nn.Parameter(torch.zeros(2))
    bound = StepBack([place], BUDGET)
    for start in (0.0, 5.0):
        with torch.no_grad():
            place.fill_(start)
        bound.record()
        for _ in range(2):  # more than one measurement a batch
            with torch.no_grad():
                place += 1
            bound.enforce(lambda: torch.ones(1))
            assert bool((place == start).all())


def test_old_weights_travel_through_a_checkpoint() -> None:
    first, second = Policy(0, 0.1), Policy(0, 0.1)
    written = StepBack(first.parameters, BUDGET)
    assert written.state_dict() == {}
    written.record()
    assert torch.equal(written.recorded(first.parameters[1]), first.start[1])
    assert written.recorded(second.parameters[1]) is None
    read = StepBack(second.parameters, BUDGET)
    read.load_state_dict(written.state_dict())
    results = []
    for policy, bound in ((first, written), (second, read)):
        with torch.no_grad():
            for parameter, step in zip(policy.parameters, policy.step, strict=True):
                parameter += step
        results.append(bound.enforce(policy.kl))
    assert results[0] == results[1]
    assert results[0].fraction < 1
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))
    with pytest.raises(InvalidInputError, match="2 parameters, here 1"):
        StepBack(first.parameters[:1], BUDGET).load_state_dict(written.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0.0}, "budget of a step back must be positive.*got 0.0"),
        ({"budget": math.inf}, "got inf"),
        ({"budget": "0.05"}, "got '0.05'"),
        ({"statistic": "median"}, "'mean', 'max' or a quantile.*got 'median'"),
        ({"statistic": 1.0}, "got 1.0"),
        ({"passes": 1}, "at least 2 passes.*got 1"),
        ({"passes": 2.5}, "got 2.5"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        StepBack([nn.Parameter(torch.zeros(1))], **{"budget": BUDGET, **arguments})


def test_nothing_to_move_and_nowhere_to_go_back_to_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no parameter that needs a gradient"):
        StepBack([torch.zeros(1)], BUDGET)
    with pytest.raises(TetherError, match=r"before record\(\)"):
        StepBack([nn.Parameter(torch.zeros(1))], BUDGET).enforce(lambda: torch.zeros(1))


def test_a_search_between_two_points_never_leaves_them() -> None:
    search = LineSearch(BUDGET, 4.0)
    search.note(0.5, 3.0)
    search.note(0.1, 0.01)
    for _ in range(20):
        t = search.propose()
        assert 0.1 < t < 0.5
        search.note(t, 0.01 if t < 0.2 else 3.0)
    assert 0.1 < search.kept < 0.2


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    output = tmp_path_factory.mktemp("two")
    worker = Path(__file__).with_name("step_back_worker.py")
    run_two_ranks(worker, output, output=output, timeout=120)
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("statistic", ["mean", "max", "0.9"])
def test_two_processes_decide_as_one_with_all_the_tokens(
    together: list[dict[str, list[float]]], statistic: str
) -> None:
    """Each with other tokens, one with more of them; replicated weights and FSDP2's shards alike."""
    policy = Policy(0, 0.1)
    alone = policy.enforce(float(statistic) if statistic == "0.9" else statistic)  # type: ignore[arg-type]
    assert 0 < alone.fraction < 1
    for kind in ("replicated", "sharded"):
        first, second = (numbers[f"{kind} {statistic}"] for numbers in together)
        assert first == second
        fraction, before, after, passes, *weights = first
        assert passes == alone.passes
        assert (fraction, before, after) == pytest.approx(
            (alone.fraction, alone.divergence_before, alone.divergence), rel=1e-9
        )
        expected = torch.cat([parameter.detach().flatten() for parameter in policy.parameters])
        torch.testing.assert_close(
            torch.tensor(weights, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12
        )


def test_weights_spoiled_in_one_process_are_the_old_ones_in_both(
    together: list[dict[str, list[float]]],
) -> None:
    for numbers in together:
        assert numbers["spoiled in one"] == [0.0, 0.0]


@pytest.mark.parametrize(("quantile", "tokens", "rank"), [(0.07, 100, 7), (0.57, 100, 57), (0.99, 10, 10)])
def test_a_decimal_quantile_is_the_rank_that_was_written(quantile: float, tokens: int, rank: int) -> None:
    weight = torch.zeros(1, requires_grad=True)
    step_back = StepBack([weight], budget=1e6, statistic=quantile)
    step_back.record()
    result = step_back.enforce(lambda: torch.arange(1, tokens + 1, dtype=torch.float64))
    assert result.divergence_before == rank
