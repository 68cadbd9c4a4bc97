"""The root finder against closed forms and scipy's Brent method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

from tether.projection import solve
from tether.projection.solve import solve_increasing


def solved(*arguments: Any, **keywords: Any) -> Tensor:
    """The roots, all of them found."""
    x, converged = solve_increasing(*arguments, **keywords)
    assert bool(converged.all())
    return x


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class _Counted:
    """A function that knows how often it was evaluated."""

    def __init__(self, function, slope) -> None:
        self.function, self.slope, self.calls = function, slope, 0

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.function(x), self.slope(x)


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 3.0, 6.0])
def test_roots_of_powers_equal_the_closed_form(power: float) -> None:
    bound = _tensor(1e-6, 1e-3, 0.05, 1.0, 7.0)
    high = torch.full_like(bound, 10.0)
    x = solved(lambda x: (x**power, power * x ** (power - 1)), bound, high * 1e-9, high, high / 3)
    torch.testing.assert_close(x, bound ** (1 / power), rtol=1e-11, atol=0)


def test_a_root_thirty_orders_of_magnitude_below_the_bracket_takes_few_evaluations() -> None:
    function = _Counted(lambda x: x**2, lambda x: 2 * x)
    bound, high = _tensor(0.05), _tensor(1e30)
    x = solved(function, bound, _tensor(1e-3), high, high * 0.2)
    torch.testing.assert_close(x, bound.sqrt(), rtol=1e-11, atol=0)
    assert function.calls <= 12


def test_a_function_that_saturates_is_solved_next_to_its_plateau() -> None:
    """1 - exp(-x) = b has the root -log(1 - b); its slope there is 1 - b, nearly nothing."""
    bound = _tensor(0.5, 0.99, 1 - 1e-6)
    high = torch.full_like(bound, 1e3)
    x = solved(lambda x: (-torch.expm1(-x), torch.exp(-x)), bound, high * 1e-9, high, high * 0.5)
    torch.testing.assert_close(-torch.expm1(-x), bound, rtol=1e-12, atol=0)
    torch.testing.assert_close(x, -torch.log1p(-bound), rtol=1e-5, atol=0)


@pytest.mark.parametrize("start", [float("nan"), -1.0, 0.0, 1e9, float("inf")])
def test_a_useless_first_guess_is_ignored(start: float) -> None:
    two = _tensor(2.0)
    x = solved(lambda x: (x**2, 2 * x), two, two * 1e-6, two, _tensor(start))
    torch.testing.assert_close(x, two.sqrt(), rtol=1e-12, atol=0)


def test_divergences_along_a_tilt_agree_with_brent_to_1e_9() -> None:
    generator = torch.Generator().manual_seed(1)
    u = torch.rand(40, 9, dtype=torch.float64, generator=generator) * 6
    log_q = torch.randn(40, 9, dtype=torch.float64, generator=generator).log_softmax(-1)

    def divergence_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
        log_pi = (log_q + x[:, None] * u).log_softmax(-1)
        mean = (log_pi.exp() * u).sum(-1)
        variance = (log_pi.exp() * (u - mean[:, None]) ** 2).sum(-1)
        return (log_pi.exp() * (log_pi - log_q)).sum(-1), x * variance

    high = torch.full((40,), 5.0, dtype=torch.float64)
    at_high = divergence_and_slope(high)[0]
    bound = at_high * torch.rand(40, dtype=torch.float64, generator=generator).clamp(0.01, 0.99)
    x = solved(divergence_and_slope, bound, high * 1e-6, high, high * (bound / at_high).sqrt())
    value = divergence_and_slope(x)[0]
    assert float((value / bound - 1).abs().max()) < 1e-10
    for row in range(40):

        def excess(s: float, row: int = row) -> float:
            s_all = torch.full((40,), s, dtype=torch.float64)
            return float(divergence_and_slope(s_all)[0][row] - bound[row])

        assert x[row].item() == pytest.approx(brentq(excess, 1e-9, 5.0, xtol=1e-14), rel=1e-9)


def test_rounding_that_hides_the_root_never_costs_the_bound() -> None:
    """A function known to three digits only jumps over the bound; the answer stays below it."""
    bound = _tensor(0.0505, 0.1234567, 0.9)
    high = torch.full_like(bound, 2.0)

    def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x**2 * 1000).floor() / 1000, 2 * x

    x, converged = solve_increasing(quantised, bound, high * 1e-3, high, high * 0.9)
    value = quantised(x)[0]
    assert converged.tolist() == [False, False, True]  # only .9 is one of its values
    assert bool((value <= bound).all())
    assert bool((bound - value < 1.001e-3).all())


def test_no_row_costs_more_than_sixty_evaluations() -> None:
    function = _Counted(lambda x: torch.where(x < 0.3, 0.0, 1.0), torch.zeros_like)
    x, converged = solve_increasing(function, _tensor(0.5), _tensor(1e-9), _tensor(1.0), _tensor(0.5))
    assert function.calls <= 60
    assert 0.3 - 1e-9 < x.item() < 0.3
    assert not converged.item()


def test_rows_that_cannot_converge_are_told_from_those_that_did() -> None:
    """A function that jumps over the bound, one that says NaN, one with a root, together."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        jump = torch.where(x < 0.3, 0.01, 1.0)
        return torch.stack((jump[0], x[1] * torch.nan, x[2] ** 2)), torch.stack((x[0] * 0, x[1], 2 * x[2]))

    bound, high = _tensor(0.05, 0.05, 0.05), _tensor(1.0, 1.0, 1.0)
    x, converged = solve_increasing(function, bound, high * 1e-6, high, high * 0.5)
    assert converged.tolist() == [False, False, True]
    assert bool((x[:2] < 0.3).all())  # what is known to be inside, not what was tried last
    torch.testing.assert_close(x[2] ** 2, bound[2], rtol=1e-12, atol=0)


def test_rows_are_solved_independently_of_their_neighbours() -> None:
    bound = _tensor(1e-4, 0.05, 3.0)
    high = _tensor(10.0, 10.0, 1e20)
    low, start = high * 1e-25, high / 7
    solve_one = lambda x: (x.expm1() ** 2, 2 * x.expm1() * x.exp())  # noqa: E731
    together = solved(solve_one, bound, low, high, start)
    apart = [solved(solve_one, bound[[i]], low[[i]], high[[i]], start[[i]]).item() for i in range(3)]
    assert together.tolist() == apart


def test_a_coarse_tolerance_is_met_with_fewer_evaluations() -> None:
    def run(tolerance: float | None) -> tuple[float, int]:
        function = _Counted(lambda x: x.expm1() ** 3, lambda x: 3 * x.expm1() ** 2 * x.exp())
        x = solved(function, _tensor(0.3), _tensor(1e-6), _tensor(9.0), _tensor(3.0), tolerance=tolerance)
        return abs(function.function(x).item() / 0.3 - 1), function.calls

    (coarse_error, coarse_calls), (fine_error, fine_calls) = run(1e-2), run(None)
    assert coarse_error <= 1e-2
    assert fine_error <= 1e-12
    assert coarse_calls < fine_calls


def test_a_fixed_number_of_evaluations_reaches_the_same_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators cannot stop early; the same code runs there without asking whether it could."""
    bound = torch.logspace(-4, 1, 50, dtype=torch.float64)
    high = torch.full_like(bound, 50.0)

    def run() -> tuple[Tensor, int]:
        function = _Counted(lambda x: x * x.exp().clamp_max(1e300), lambda x: (1 + x) * x.exp())
        return solved(function, bound, high * 1e-12, high, high * 0.3), function.calls

    stopped_early, calls = run()
    monkeypatch.setattr(solve, "may_ask", lambda tensor: False)
    fixed, all_calls = run()
    assert calls < all_calls == solve._FIXED_ITERATIONS
    torch.testing.assert_close(fixed, stopped_early, rtol=1e-9, atol=0)
