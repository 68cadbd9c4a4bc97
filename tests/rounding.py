"""How far apart two right answers may lie, in multiples of what the reference itself rounds by.

Another processor, matrix library or number of threads adds the same numbers in another order. A tolerance
that one machine gave fails on the next, so the tests use two kinds of tolerance alone:

- in float64, where a claim is one of algebra, 1e-12 to 1e-6 of the values: thousands of roundings, and what
  the documentation promises. Numbers worked out by hand are compared with pytest's own 1e-6, which in
  float32 is eight roundings of a formula of a few operations;
- elsewhere a stated multiple of `rounding_of` or `unit_of`, or of the tolerance of a solver that either side
  uses, never a number of its own.

The multiple is 16 where no better reason is given: the largest of many errors varies by a factor of four
from one order of summation to another, and a formula that loses digits loses them by the hundred.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUMMED_ANOTHER_WAY = 16


def unit_of(values: Tensor | float, dtype: torch.dtype = torch.float32, *, terms: int = 1) -> float:
    """One rounding in `dtype` of the largest finite value, for each of the `terms` that are added to it."""
    values = torch.as_tensor(values, dtype=torch.float64).detach()
    largest = float(torch.where(values.isfinite(), values, 0.0).abs().max())
    return torch.finfo(dtype).eps * terms * largest


def rounding_of(rough: Tensor, exact: Tensor) -> float:
    """The largest error of a reference: `rough` in its own precision, `exact` the same formula in float64.

    At least one rounding of the largest value: a reference that happens to be exact binds nobody else.
    """
    assert exact.dtype == torch.float64, exact.dtype
    return max(error_of(rough, exact), unit_of(exact, rough.dtype))


def error_of(found: Tensor, exact: Tensor) -> float:
    """The largest difference; what is infinite must be so in both."""
    found, exact = found.detach().double().cpu(), exact.detach().cpu()
    assert torch.equal(found.isfinite(), exact.isfinite())
    return float(torch.where(exact.isfinite(), found - exact, 0.0).abs().max())
