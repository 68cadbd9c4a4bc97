"""How an update is kept close to the policy that gathered the data: the methods by name, and who trains them.

A loss of `tether.losses`, or of your own as "package.module:function", is a method whose options are the
keywords of its signature; nothing is written here for it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from tether.errors import ConfigError
from tether.llm.choices import Choice, kind_of
from tether.names import unknown
from tether.settings import LAG_BOUND, LagBound, LagGrowth, TROLLSettings, check_support_size

if TYPE_CHECKING:
    from tether.integrations.packing import Packing
    from tether.integrations.trl import OldPolicyTrainer

Settings = dict[str, Any]


@dataclass(frozen=True)
class Method(Choice):
    """What keeps an update close to the policy that gathered the data."""

    title: ClassVar[str] = ""

    @property
    def label(self) -> str:
        """The method's name in tables and legends."""
        return self.title or self.name

    def build(self, settings: Settings, arguments: Settings, pack_sequences: Packing) -> OldPolicyTrainer:
        """The trainer that has it.

        Args:
            settings: of TRL's `GRPOConfig`.
            arguments: of the trainer, besides `args`.
            pack_sequences: as in `OldPolicyTrainer`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TROLL(TROLLSettings, Method):
    """The differentiable projection of each token's distribution.

    >>> TROLL(kl_bound=0.1).label
    'TROLL'
    """

    name: str = field(default="troll", init=False)
    title: ClassVar[str] = "TROLL"
    lag_growth: LagGrowth = LagBound.growth
    """anchor sampler: how the bound grows with the updates n since the sampler's weights: not, by 1 + rate n,
    (1 + n)^rate or (1 + rate)^n."""
    lag_rate: float = LagBound.rate
    """anchor sampler: the rate of that growth."""
    kl_bound_largest: float = LagBound.largest
    """anchor sampler: where that growth ends, in nats."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        super().__post_init__()
        LagBound.read(self, "method.")

    def build(self, settings: Settings, arguments: Settings, pack_sequences: Packing) -> OldPolicyTrainer:
        """`TROLLTrainer`."""
        from tether.integrations.trl import TROLLConfig, TROLLTrainer

        named = {one.name for one in fields(TROLLSettings)} | set(LAG_BOUND.values())
        own = {name: getattr(self, name) for name in named}
        own |= {name: arguments[name] for name in ("anchor", "sampler_weight") if name in arguments}
        config = TROLLConfig(
            **settings, **{f"troll_{name}": value for name, value in own.items()},
            troll_pack_sequences=bool(pack_sequences), troll_share_prefixes=pack_sequences == "shared",
        )  # fmt: skip
        return TROLLTrainer(args=config, **{n: v for n, v in arguments.items() if n not in own})


@dataclass(frozen=True)
class Rival(Method):
    """A method that looks at as many ids as TROLL would, if only to measure how far the policy moves."""

    top_k: int = TROLLSettings.top_k
    """Ids kept of each old token distribution, besides the sampled one."""
    mass: float = TROLLSettings.mass
    """Keep fewer ids where the most likely ones hold this much probability."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_support_size(self.top_k, self.mass)

    def _looking(self, pack_sequences: Packing) -> dict[str, Any]:
        return {
            "support_top_k": self.top_k, "support_mass": self.mass, "pack_sequences": pack_sequences
        }  # fmt: skip


@dataclass(frozen=True)
class NoTrustRegion(Rival):
    """TRL's policy gradient with its clip taken away."""

    name: str = field(default="none", init=False)
    title: ClassVar[str] = "no trust region"

    def widths(self, settings: Settings) -> tuple[float, float]:
        """How far a ratio may fall and rise."""
        return math.inf, math.inf

    def build(self, settings: Settings, arguments: Settings, pack_sequences: Packing) -> OldPolicyTrainer:
        """`OldPolicyTrainer`."""
        from trl import GRPOConfig

        from tether.integrations.trl import OldPolicyTrainer

        low, high = self.widths(settings)
        args = GRPOConfig(**settings, epsilon=low, epsilon_high=high)
        return OldPolicyTrainer(args=args, **arguments, **self._looking(pack_sequences))


@dataclass(frozen=True)
class Clip(NoTrustRegion):
    """PPO's clip, as TRL has it."""

    name: str = field(default="clip", init=False)
    title: ClassVar[str] = "clip"
    clip_low: float | None = None
    """How far a ratio may fall; by default .2, and 3e-4 for the ratios of sequences (estimator gspo)."""
    clip_high: float | None = None
    """How far a ratio may rise; by default clip_low, and 4e-4 for the ratios of sequences."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        super().__post_init__()
        for name in ("clip_low", "clip_high"):
            width = getattr(self, name)
            if width is not None and not width >= 0:
                raise ConfigError(f"method.{name} must be at least 0, or left out; got {width}.")

    def widths(self, settings: Settings) -> tuple[float, float]:
        """Lower and upper half-width.

        >>> Clip(clip_high=0.28).widths({}), Clip().widths({"importance_sampling_level": "sequence"})
        ((0.2, 0.28), (0.0003, 0.0004))
        """
        sequences = settings.get("importance_sampling_level") == "sequence"
        low = (3e-4 if sequences else 0.2) if self.clip_low is None else self.clip_low
        high = (4e-4 if sequences else low) if self.clip_high is None else self.clip_high
        return low, high


@dataclass(frozen=True)
class LossMethod(Rival):
    """A policy loss; its options are further fields.

    Raises:
        ConfigError: options that the loss refuses.
    """

    def __post_init__(self) -> None:
        """Have the loss itself try its options."""
        from tether.integrations.loss_options import check_loss_options

        super().__post_init__()
        check_loss_options(self.name, self.loss_options)

    @property
    def loss_options(self) -> dict[str, Any]:
        """The keywords of the loss."""
        measuring = {one.name for one in fields(Rival)}
        return {name: value for name, value in self.options().items() if name not in measuring}

    @property
    def label(self) -> str:
        """The name, with what was chosen of the options.

        >>> find_method("dppo")(divergence="top-k-kl").label
        'dppo divergence=top-k-kl'
        """
        own = self.loss_options.keys() & self.changed().keys()
        words = ", ".join(
            f"{name}={_shown(getattr(self, name))}" for name in self.loss_options if name in own
        )
        return f"{self.name} {words}".strip()

    def build(self, settings: Settings, arguments: Settings, pack_sequences: Packing) -> OldPolicyTrainer:
        """`PolicyLossTrainer`."""
        from trl import GRPOConfig

        from tether.integrations.trl_losses import PolicyLossTrainer

        return PolicyLossTrainer(
            args=GRPOConfig(**settings), policy_loss=self.name, loss_options=self.loss_options,
            **arguments, **self._looking(pack_sequences),
        )  # fmt: skip


_OF_TRL: dict[str, type[Method]] = {"troll": TROLL, "clip": Clip, "none": NoTrustRegion}


def method_names() -> list[str]:
    """Every method there is by a plain name."""
    from tether.losses import LOSSES  # torch, which the others do not need

    return sorted({*_OF_TRL, *LOSSES})


@functools.cache
def find_method(name: str) -> type[Method]:
    """The class of a method; its fields are its options.

    Args:
        name: troll, clip, none, a loss of `tether.losses.LOSSES`, or where your own is,
            "package.module:function".

    Raises:
        ConfigError: an unknown name, or nothing there to import.

    >>> find_method("ppo_clip")(clip_ratio_high=0.28).changed()
    {'clip_ratio_high': 0.28}
    """
    if name in _OF_TRL:
        return _OF_TRL[name]
    if name not in method_names() and ":" not in name:
        raise unknown(name, method_names(), "method")
    from tether.integrations.loss_options import loss_options

    kind: type[Method] = kind_of(name, (LossMethod,), loss_options(name).values())
    return kind


def _shown(value: Any) -> str:
    """A number as it is typed: 5, not 5.0."""
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
