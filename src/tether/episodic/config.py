"""Everything a training run needs to know, as frozen dataclasses that travel through JSON."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tether.episodic.critic import CriticConfig
from tether.episodic.policy import PolicyConfig
from tether.episodic.prodmp import ProDMPConfig
from tether.errors import ConfigError
from tether.projection.gaussian import GaussianMethod

Algorithm = Literal["tce", "bbrl"]
PolicyInput = Literal["observation", "context"]
Precision = Literal["float32", "float64"]


@dataclass(frozen=True)
class TrustRegionConfig:
    """How far an iteration may move the policy."""

    mean_bound: float = 0.005
    """Bound of the mean's part, a context (nats for "kl")."""

    cov_bound: float = 0.0005
    """Bound of the covariance's part."""

    method: GaussianMethod = "kl"
    """Divergence: "kl", "wasserstein" or "frobenius"."""

    regression_weight: float = 1.0
    """Weight of KL(network || projected), which pulls the network after its projection."""

    target_entropy: float | None = None
    """Entropy a weight, in nats, that the lower bound of the entropy reaches at the end of training, on a
    line from the initial entropy. None: no bound."""

    def __post_init__(self) -> None:
        if not (self.mean_bound > 0 and self.cov_bound > 0 and self.regression_weight >= 0):
            raise ConfigError(
                "mean_bound and cov_bound must be positive and regression_weight not negative, got "
                f"{self.mean_bound}, {self.cov_bound} and {self.regression_weight}."
            )
        if self.method not in get_args(GaussianMethod):
            raise ConfigError(f"method is one of {get_args(GaussianMethod)}; got {self.method!r}.")

    def entropy_bound(self, initial: float, num_weights: int, progress: float) -> float | None:
        """The bound when the fraction `progress` of training is over.

        >>> TrustRegionConfig(target_entropy=0.0).entropy_bound(initial=8.0, num_weights=4, progress=0.25)
        6.0
        """
        if self.target_entropy is None:
            return None
        return initial + progress * (num_weights * self.target_entropy - initial)


@dataclass(frozen=True)
class UpdateConfig:
    """How an iteration's episodes improve the policy."""

    learning_rate: float = 3e-4
    """Of Adam, for the policy, at the start."""

    final_learning_rate_fraction: float = 0.01
    """What is left of the learning rates (critic's too) at the end, on a line; 1 keeps them."""

    epochs: int = 50
    """Gradient steps of the policy an iteration, each over the whole batch."""

    weight_decay: float = 0.0
    """Of Adam, for the policy."""

    gamma: float = 1.0
    """Discount a step (TCE)."""

    gae_lambda: float = 0.95
    """Of the critic's targets (TCE)."""

    segment_points: int = 25
    """Points at which a motion is cut; there is one segment fewer (TCE)."""

    include_last_reward: bool = False
    """Whether the last segment runs to the end of the episode; the paper's ends at the last point (TCE)."""

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and self.epochs >= 1 and self.weight_decay >= 0):
            raise ConfigError(
                "Needed: learning_rate > 0, epochs >= 1, weight_decay >= 0; got "
                f"{self.learning_rate}, {self.epochs}, {self.weight_decay}."
            )
        if not 0 < self.final_learning_rate_fraction <= 1:
            raise ConfigError(
                "final_learning_rate_fraction must lie in (0, 1], got "
                f"{self.final_learning_rate_fraction}; 1 keeps the learning rate constant."
            )
        if not (0 < self.gamma <= 1 and 0 <= self.gae_lambda <= 1):
            raise ConfigError(
                f"Needed: 0 < gamma <= 1 and 0 <= gae_lambda <= 1; got {self.gamma}, {self.gae_lambda}."
            )

    def learning_rate_factor(self, progress: float) -> float:
        """What learning rates are multiplied by when the fraction `progress` of training is over.

        >>> UpdateConfig(final_learning_rate_fraction=0.5).learning_rate_factor(0.5)
        0.75
        """
        return 1.0 + progress * (self.final_learning_rate_fraction - 1.0)


@dataclass(frozen=True)
class EpisodicConfig:
    """One training run of an episodic policy. `presets` has a vetted one for each environment."""

    env_id: str
    """Environment, a name the sampler knows, e.g. "tether/HopperJump-v0"."""

    env_options: dict[str, Any] = field(default_factory=dict)
    """Keywords of the environment."""

    algo: Algorithm = "tce"
    """"tce": credit by segments. "bbrl": credit by whole episodes."""

    seed: int = 0
    """Of networks, exploration and the stream of episodes."""

    iterations: int = 200
    """Policy updates; the schedules end with the last."""

    episodes: int = 16
    """Episodes sampled for each of them."""

    num_workers: int = 2
    """Simulator processes; 0 simulates in the training process. Does not change any result."""

    policy_input: PolicyInput = "observation"
    """What the policy sees before the motion: the whole first observation, or only its task context."""

    precision: Precision = "float32"
    """Of the networks; projections are computed in float64 in any case."""

    motion: ProDMPConfig = field(default_factory=ProDMPConfig)
    """The movement primitive."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Network and exploration."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic: of states for TCE, of contexts for BBRL."""

    trust_region: TrustRegionConfig = field(default_factory=TrustRegionConfig)
    """How far an iteration may move the policy."""

    update: UpdateConfig = field(default_factory=UpdateConfig)
    """How an iteration improves it."""

    evaluate_every: int = 10
    """Iterations between deterministic evaluations."""

    evaluation_episodes: int = 16
    """Episodes of an evaluation: always the same, for every run, so that curves can be compared."""

    checkpoint_every: int = 10
    """Iterations between checkpoints."""

    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""

    def __post_init__(self) -> None:
        for name, allowed in (("algo", Algorithm), ("policy_input", PolicyInput), ("precision", Precision)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"{name} is one of {get_args(allowed)}; got {getattr(self, name)!r}.")
        for name in (
            "iterations",
            "episodes",
            "evaluate_every",
            "evaluation_episodes",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_workers < 0:
            raise ConfigError(f"num_workers is 0 (this process) or more, got {self.num_workers}.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"A seed lies in [0, 2^32), got {self.seed}.")

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, as `config_from_dict` reads them."""
        return dataclasses.asdict(self)


def config_from_dict(values: Mapping[str, Any]) -> EpisodicConfig:
    """The configuration `EpisodicConfig.as_dict` wrote, also after a journey through JSON.

    Raises:
        ConfigError: an unknown or missing setting.

    >>> config = EpisodicConfig("tether/PointReach-v0", policy=PolicyConfig(hidden_sizes=(8, 8)))
    >>> config_from_dict(config.as_dict()) == config
    True
    """
    built = _build(EpisodicConfig, values, "")
    assert isinstance(built, EpisodicConfig)
    return built


def _build(kind: type, values: Mapping[str, Any], path: str) -> object:
    hints = typing.get_type_hints(kind)
    unknown = sorted(values.keys() - hints.keys())
    if unknown:
        raise ConfigError(f"Unknown setting {path}{unknown[0]}. Known: {', '.join(sorted(hints))}.")
    arguments = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            value = _build(typing.cast(type, hints[name]), value, f"{path}{name}.")
        elif isinstance(value, list):
            value = tuple(value)
        arguments[name] = value
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"Settings are missing ({error}). Give the folder of an episodic run.") from error
