"""The settings of the trust region on tokens: each declared, explained and checked here, under one name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard, get_args

from tether.errors import ConfigError, InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

Support = Literal["exact", "bucket", "paper"]
"""Where distributions are compared: on the whole vocabulary; on the ids kept, with all others as one outcome
of their exact mass; or on the ids kept, with the paper's fixed probability for each other id."""
SparseSupport = Literal["bucket", "paper"]
"""Those that need nothing but the ids kept."""
Region = Literal["token", "sequence"]
"""What the bound holds for: each token's divergence, or the mean over a sequence's tokens."""

Anchor = Literal["trainer", "sampler"]
"""Which policy the region is around: the trainer's own when the rollouts began, scored by its network; or
the one that sampled, from what its engine reports, however many versions old and in whatever arithmetic."""


@dataclass(frozen=True)
class TROLLSettings:
    """What can be chosen about TROLL. The defaults are the paper's, but for the support, which is ours.

    Raises:
        InvalidInputError: a value of another type or out of range, with its name and the remedy.

    Example:
        >>> TROLLSettings(kl_bound=0.1).alpha
        1.0
        >>> TROLLSettings(top_k=0)
        Traceback (most recent call last):
        ...
        tether.errors.InvalidInputError: top_k must be an integer of at least 1, got 0; 64 is the paper's.
    """

    kl_bound: float = 0.05
    """Bound on KL(new || old) of each token in nats; infinity switches the trust region off."""
    alpha: float = 1.0
    """Weight of the regression of the network onto its projection."""
    top_k: int = 64
    """Ids kept of each old token distribution, besides the sampled one."""
    mass: float = 1 - 1e-5
    """Keep fewer ids where the most likely ones hold this much probability together."""
    support: Support = "exact"
    """Compare on the whole vocabulary (exact), or on the ids kept, all others being one outcome with their
    exact mass (bucket) or having probability 1e-12 each, as in the paper's code (paper)."""
    region: Region = "token"
    """Bound each token's divergence, or the mean over the tokens of a sequence."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_kl_bound(self.kl_bound)
        check_alpha(self.alpha)
        check_support_size(self.top_k, self.mass)
        check_choice("support", self.support, get_args(Support))
        check_choice("region", self.region, get_args(Region))

    @classmethod
    def read(cls, config: Any, key: str) -> Self:
        """The settings that a trainer's configuration holds under prefixed names.

        Args:
            config: has an attribute ``<prefix><name>`` for each setting.
            key: the prefix, after the path that leads to the configuration, such as ``actor.loss.troll_``.

        Raises:
            ConfigError: as above, with the name the setting has there.

        Example:
            >>> from types import SimpleNamespace
            >>> names = {f"troll_{name}": value for name, value in vars(TROLLSettings()).items()}
            >>> TROLLSettings.read(SimpleNamespace(**names), "troll_") == TROLLSettings()
            True
        """
        prefix = key.rpartition(".")[-1]
        try:
            return cls(**{field.name: getattr(config, prefix + field.name) for field in fields(cls)})
        except InvalidInputError as error:
            raise ConfigError(f"{key}{error}") from error


LagGrowth = Literal["constant", "linear", "power", "geometric"]
"""How a bound grows with the lag n: not; by (1 + rate n); by (1 + n)^rate; by (1 + rate)^n."""

_FACTORS: dict[str, Callable[[Any, float], Any]] = {
    "constant": lambda lag, rate: 0 * lag + 1,
    "linear": lambda lag, rate: 1 + rate * lag,
    "power": lambda lag, rate: (1 + lag) ** rate,
    "geometric": lambda lag, rate: (1 + rate) ** lag,
}


#: What a `LagBound` calls its settings, and what methods and trainers call them.
LAG_BOUND = {
    "kl_bound": "kl_bound",
    "growth": "lag_growth",
    "rate": "lag_rate",
    "largest": "kl_bound_largest",
}


@dataclass(frozen=True)
class LagBound:
    """The bound on KL(new || sampler) of a token that was sampled `lag` optimizer steps ago, in nats.

    A network that is n updates ahead of its sampler has moved on purpose: a bound made for fresh data would
    project most of that away. `project_tokens` takes one of these in place of a number. The default is the
    constant: no growth is known to be better (docs/studies.md, study j, has begun).

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
    """See `LagGrowth`."""
    largest: float = math.inf
    """Never more than this."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_kl_bound(self.kl_bound)
        check_choice("growth", self.growth, get_args(LagGrowth))
        _check_type("rate", self.rate, Real, "a number such as 0.5")
        _check_type("largest", self.largest, Real, "a number of nats such as 0.5")
        if not 0 <= self.rate < math.inf:
            raise InvalidInputError(
                f"rate must be a number from 0, got {self.rate!r}: a bound does not shrink with the lag."
            )
        if not self.largest >= self.kl_bound:
            raise InvalidInputError(
                f"largest must be at least kl_bound={self.kl_bound}, got {self.largest!r}; math.inf for no "
                "limit."
            )
        if self.growth != "constant" and not self.rate:
            raise InvalidInputError(
                f"rate must be above 0 for a bound whose growth is {self.growth}; with 0 it is constant."
            )
        if self.growth == "constant" and (self.rate or self.largest < math.inf):
            name, value = ("rate", self.rate) if self.rate else ("largest", self.largest)
            raise InvalidInputError(
                f"{name} is of a bound that grows with the lag, and this one is constant; got {value!r}. "
                f"Choose how it grows ({', '.join(get_args(LagGrowth)[1:])}), or leave {name} out."
            )

    @classmethod
    def read(cls, config: Any, key: str) -> Self:
        """The bound that a trainer's configuration describes under prefixed names; as `TROLLSettings.read`.

        The names besides `kl_bound` are `lag_growth`, `lag_rate` and `kl_bound_largest`.
        """
        prefix = key.rpartition(".")[-1]
        try:
            return cls(**{own: getattr(config, prefix + name) for own, name in LAG_BOUND.items()})
        except InvalidInputError as error:
            own, _, rest = str(error).partition(" ")
            raise ConfigError(f"{key}{LAG_BOUND[own]} {rest}") from error

    def at(self, lag: Tensor) -> Tensor:
        """The bounds of tokens with these lags, of the same shape, float64."""
        bounds: Tensor = self.kl_bound * _FACTORS[self.growth](lag.double(), self.rate)
        return bounds.clamp_max(self.largest)


def check_kl_bound(kl_bound: float) -> None:
    """Refuse a bound that is not a positive number (infinity is one)."""
    _check_type("kl_bound", kl_bound, Real, "a positive number such as 0.05")
    if not kl_bound > 0:
        raise InvalidInputError(
            f"kl_bound must be a positive number of nats, got {kl_bound!r}. 0.05 is the paper's, 0.01 to "
            "0.25 are usual; math.inf switches the projection off."
        )


def check_alpha(alpha: float) -> None:
    """Refuse a weight of the regression that is negative, infinite or no number."""
    _check_type("alpha", alpha, Real, "a number such as 1.0")
    if not 0 <= alpha < math.inf:
        raise InvalidInputError(f"alpha must be finite and not negative, got {alpha!r}; 1 is the paper's.")


def check_support_size(top_k: int, mass: float) -> None:
    """Refuse sizes that cannot be meant."""
    _check_type("top_k", top_k, Integral, "an integer of at least 1")
    if top_k < 1:
        raise InvalidInputError(f"top_k must be an integer of at least 1, got {top_k!r}; 64 is the paper's.")
    _check_type("mass", mass, Real, "a number such as 0.99999")
    if not 0.0 < mass <= 1.0:
        raise InvalidInputError(
            f"mass must lie in (0, 1], got {mass!r}. It is the probability to cover, so the paper's "
            "threshold of 1e-5 is mass=0.99999."
        )


def check_kl_stop(kl_stop: float | None) -> None:
    """Refuse a budget of KL a batch that is not a positive number; None is no budget."""
    if kl_stop is not None and not (is_number(kl_stop) and 0 < kl_stop < math.inf):
        raise ConfigError(f"kl_stop must be a positive number, got {kl_stop!r}.")


def check_step_scale(largest: float | None) -> None:
    """Refuse a largest weight of a response that is not a positive number; None is no scaling."""
    if largest is not None and not (is_number(largest) and largest > 0):
        raise ConfigError(
            f"step_scale is the largest weight of a response, a positive number such as 2; got {largest!r}."
        )


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is none of those allowed."""
    _check_type(name, value, str, f'text, such as "{allowed[0]}"')
    if value not in allowed:
        raise InvalidInputError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, numpy's included, and no bool, which Python counts as one."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_type(name: str, value: Any, kind: type, example: str) -> None:
    """Before anything is compared with it: what came out of a file or a shell may be text."""
    if not isinstance(value, kind) or isinstance(value, bool):  # which Python counts as a number
        remedy = "Give it without quotes or brackets, or leave it out for the default."
        if isinstance(value, str) and kind is Real and value.lstrip("+").lower() in ("inf", "infinity"):
            remedy = "YAML reads inf as text: write .inf there, and math.inf in Python."
        raise InvalidInputError(
            f"{name} must be {example}, got {value!r} of type {type(value).__name__}. {remedy}"
        )
