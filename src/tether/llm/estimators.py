"""How advantages are estimated and the loss is averaged: the estimators by name.

Your own is a function from rewards to advantages, as in `tether.advantages`: "package.module:function".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.llm.choices import Choice, kind_of
from tether.names import look_up, unknown
from tether.signatures import options_of, places_of


@dataclass(frozen=True)
class EstimatorSpec:
    """What a name stands for."""

    trl: Mapping[str, Any]
    """TRL's settings."""
    replaces: str = ""
    """What replaces TRL's advantages, "package.module:name": a function of rewards, or a critic's options."""
    critic: bool = False
    """Whether it trains a value model beside the policy."""


# Averages over tokens, as verl does.
_TOKENS = {"loss_type": "dapo"}

ESTIMATORS: dict[str, EstimatorSpec] = {
    "grpo": EstimatorSpec({"loss_type": "grpo"}),
    "dr_grpo": EstimatorSpec({"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": EstimatorSpec({"loss_type": "dapo"}),
    "bnpo": EstimatorSpec({"loss_type": "bnpo"}),
    "gspo": EstimatorSpec({"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "rloo": EstimatorSpec(_TOKENS, "tether.advantages:rloo"),
    "reinforce_plus_plus": EstimatorSpec(_TOKENS, "tether.advantages:reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": EstimatorSpec(_TOKENS, "tether.advantages:reinforce_plus_plus_baseline"),
    "ppo": EstimatorSpec(_TOKENS, "tether.integrations.trl_critic:CriticOptions", critic=True),
}


@dataclass(frozen=True)
class Estimator(Choice):
    """How advantages are estimated and the loss is averaged; its options are further fields."""

    @property
    def spec(self) -> EstimatorSpec:
        """What the name stands for."""
        return estimator_spec(self.name)

    @property
    def compares_all(self) -> bool:
        """Whether a response is compared with those to other problems too, not only to its own."""
        function = look_up(self.spec.replaces, {}, "estimator") if self.spec.replaces else None
        return self.spec.critic or (function is not None and "group_ids" not in places_of(function))

    def for_trainer(self) -> Any:
        """As the trainers take it; None where TRL's own advantages are meant."""
        if not self.spec.replaces or self.spec.critic:
            return self if self.spec.critic else None
        from tether.integrations.trl_advantages import FromRewards

        return FromRewards(self.name, self.options())


@dataclass(frozen=True)
class _FromRewards(Estimator):
    """One by a function of the rewards.

    Raises:
        ConfigError: options that the function refuses.
    """

    def __post_init__(self) -> None:
        """Have the function itself try its options."""
        from tether.integrations.loss_options import check_estimator_options

        check_estimator_options(self.name, self.options())


def estimator_spec(name: str) -> EstimatorSpec:
    """What an estimator's name stands for; of "package.module:function" that, averaged over tokens.

    Raises:
        ConfigError: an unknown name.

    >>> estimator_spec("gspo").trl["importance_sampling_level"]
    'sequence'
    """
    if name not in ESTIMATORS and ":" not in name:
        raise unknown(name, ESTIMATORS, "estimator")
    return ESTIMATORS.get(name) or EstimatorSpec(_TOKENS, name)


@functools.cache
def find_estimator(name: str) -> type[Estimator]:
    """The class of an estimator; its fields are its options.

    Raises:
        ConfigError: an unknown name, or nothing there to import.

    >>> find_estimator("reinforce_plus_plus")(gamma=0.99).changed()
    {'gamma': 0.99}
    """
    spec = estimator_spec(name)
    replaces: Any = look_up(spec.replaces, {}, "estimator") if spec.replaces else None
    if spec.critic:
        kind: type[Estimator] = kind_of(name, (Estimator, replaces))
    else:
        options = {} if replaces is None else options_of(replaces, name)
        kind = kind_of(name, (Estimator if replaces is None else _FromRewards,), options.values())
    return kind
