"""A trust region whose size knows how stale the data are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.settings import TROLLSettings, check_choice, check_kl_bound

LagGrowth = Literal["constant", "linear", "power", "geometric"]
"""How a bound grows with the lag n: not; by (1 + rate n); by (1 + n)^rate; by (1 + rate)^n."""

_FACTORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "constant": lambda lag, rate: torch.ones_like(lag),
    "linear": lambda lag, rate: 1 + rate * lag,
    "power": lambda lag, rate: (1 + lag) ** rate,
    "geometric": lambda lag, rate: (1 + rate) ** lag,
}


@dataclass(frozen=True)
class LagBound:
    """The bound on KL(new || sampler) of a token that was sampled `lag` optimizer steps ago, in nats.

    A network that is n updates ahead of its sampler has moved on purpose: a bound made for fresh data would
    project most of that away. `project_tokens` takes one of these in place of a number. The default is the
    constant.

    Raises:
        InvalidInputError: a bound, rate or limit out of range, or an unknown growth.

    Example:
        >>> import torch
        >>> LagBound(0.05, "linear", rate=0.5).at(torch.tensor([0, 2, 16])).tolist()
        [0.05, 0.1, 0.45]
        >>> LagBound(0.05, "power", rate=0.5, largest=0.15).at(torch.tensor([0, 3, 15])).tolist()
        [0.05, 0.1, 0.15]
    """

    kl_bound: float = TROLLSettings.kl_bound
    """At lag 0."""
    growth: LagGrowth = "constant"
    rate: float = 0.0
    """See `LagGrowth`; without effect on the constant."""
    largest: float = math.inf
    """Never more than this."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_kl_bound(self.kl_bound)
        check_choice("growth", self.growth, get_args(LagGrowth))
        if not 0 <= self.rate < math.inf:
            raise InvalidInputError(
                f"rate must be a number from 0, got {self.rate!r}: a bound does not shrink with the lag."
            )
        if not self.largest >= self.kl_bound:
            raise InvalidInputError(
                f"largest must be at least kl_bound={self.kl_bound}, got {self.largest!r}; math.inf for no "
                "limit."
            )

    def at(self, lag: Tensor) -> Tensor:
        """The bounds of tokens with these lags, of the same shape, float64."""
        return (self.kl_bound * _FACTORS[self.growth](lag.double(), self.rate)).clamp_max(self.largest)
