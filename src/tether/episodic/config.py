"""Everything a training run needs to know, as frozen dataclasses that travel through JSON.

`EpisodicConfig` is what every run has. An algorithm with settings of its own subclasses it, as
`OnPolicyConfig` does for TCE and BBRL. The command line is made from these classes: a field is an option,
the text below it is its help.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args

import tyro

from tether.episodic.critic import CriticConfig
from tether.episodic.policy import PolicyConfig
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.segment_critic import SegmentCriticConfig
from tether.errors import ConfigError, check_at_least_one, check_option
from tether.projection.gaussian import GaussianMethod

PolicyInput = Literal["observation", "context"]
Precision = Literal["float32", "float64"]


def _keywords_from_words(words: Sequence[str]) -> dict[str, Any]:
    """Names and values in turn, as they are typed: numbers, True and False become what they say.

    Text that would be read as one of those is typed in quotation marks, as `typed_keywords` writes all text.
    """
    if len(words) % 2:
        raise ValueError(f"give a value for each name; got {' '.join(words)}")
    keywords: dict[str, Any] = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        try:
            keywords[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            keywords[name] = value
    return keywords


def typed_keywords(keywords: Mapping[str, Any]) -> dict[str, str]:
    """Keywords of an environment as they are typed, so that each is read as what it is: "1" is no number.

    >>> typed_keywords({"level": "1", "size": (1, 2), "dense": True})
    {'level': "'1'", 'size': '(1, 2)', 'dense': 'True'}
    """
    return {name: repr(value) for name, value in keywords.items()}


_KEYWORDS = tyro.constructors.PrimitiveConstructorSpec[dict[str, Any]](
    nargs="*",
    metavar="[NAME VALUE ...]",
    instance_from_str=_keywords_from_words,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda keywords: [word for pair in typed_keywords(keywords).items() for word in pair],
)


@dataclass(frozen=True)
class EpisodicConfig:
    """One training run, whatever learns in it. `presets` has vetted ones for each environment."""

    env_id: Annotated[str, tyro.conf.arg(aliases=["--env"])]
    """Environment, e.g. "tether/HopperJump-v0", or your own as "package.module:id"."""

    env_options: Annotated[dict[str, Any], _KEYWORDS] = field(default_factory=dict)
    """Keywords of the environment."""

    algo: str = "tce"
    """Algorithm: "tce" (credit by segments), "bbrl" (by whole episodes), "toperl" (off-policy, experimental),
    or "package.module:Class"."""

    seed: int = 0
    """Seed of networks, exploration and the stream of episodes."""

    iterations: int = 200
    """Policy updates; the schedules end with the last."""

    episodes: int = 16
    """Episodes sampled for each update."""

    num_workers: Annotated[int, tyro.conf.arg(aliases=["--workers"])] = 2
    """Simulator processes; 0 simulates in the training process. Changes no result."""

    learner_threads: int = 1
    """Processor threads of one operation of learning, while the simulators wait; policy and critic learn side
    by side whatever it is. Large batches gain from more; another number rounds differently."""

    motion: ProDMPConfig = field(default_factory=ProDMPConfig)
    """The movement primitive."""

    evaluate_every: int = 10
    """Iterations between deterministic evaluations."""

    evaluation_episodes: int = 16
    """Episodes of an evaluation: the same for every run, so that curves can be compared."""

    checkpoint_every: int = 10
    """Iterations between checkpoints."""

    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept."""

    def __post_init__(self) -> None:
        for name in ("iterations", "episodes", "evaluate_every", "evaluation_episodes", "checkpoint_every",
                     "keep_checkpoints", "learner_threads"):  # fmt: skip
            check_at_least_one(name, getattr(self, name))
        if self.num_workers < 0:
            raise ConfigError(f"num_workers is 0 (this process) or more, got {self.num_workers}.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"A seed lies in [0, 2^32), got {self.seed}.")

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, as `algorithms.config_from_dict` reads them."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TrustRegionConfig:
    """How far an iteration may move the policy."""

    mean_bound: float = 0.005
    """How far the mean may move for one context (nats for "kl")."""

    cov_bound: float = 0.0005
    """How far the covariance may move (nats for "kl")."""

    method: GaussianMethod = "kl"
    """Divergence: "kl", "wasserstein" or "frobenius"."""

    regression_weight: float = 1.0
    """Weight of KL(network || projected), which pulls the network towards its projection."""

    pull_covariance: bool = True
    """Pull the covariance, too, where that is not set to its projection after an iteration in any case (BBRL
    with one covariance for all contexts, which as published pulls the mean alone)."""

    target_entropy: float | None = None
    """Entropy per weight (nats) to which a lower bound falls linearly over training. None: no bound."""

    def __post_init__(self) -> None:
        if not (self.mean_bound > 0 and self.cov_bound > 0 and 0 <= self.regression_weight < math.inf):
            raise ConfigError(
                "mean_bound and cov_bound must be positive, regression_weight finite and not negative; got "
                f"{self.mean_bound}, {self.cov_bound} and {self.regression_weight}."
            )
        if self.target_entropy is not None and not math.isfinite(self.target_entropy):
            raise ConfigError(f"target_entropy is a number of nats or None, got {self.target_entropy}.")
        check_option("method", self.method, get_args(GaussianMethod))

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
    """Adam's learning rate for the policy, at the start."""

    final_learning_rate_fraction: float = 0.01
    """Fraction to which all learning rates fall linearly, the critic's too; 1 keeps them."""

    learning_rates_fall_from: float = 0.0
    """The fraction of training from which on they fall; 0 lets them fall from the start."""

    epochs: int = 50
    """Gradient steps of the policy in an iteration, each on the whole batch."""

    weight_decay: float = 0.0
    """Adam's weight decay for the policy."""

    gamma: float = 1.0
    """Discount per step (TCE)."""

    gae_lambda: float = 0.95
    """Lambda of the critic's targets, from TD (0) to whole returns (1) (TCE)."""

    segment_points: int = 25
    """Points at which a motion is cut; the segments are one fewer (TCE)."""

    shift_rewards: bool = True
    """Count what is earned from the task's event on (a ball is hit, the robot takes off) at the event's
    step, where the critic can see what it is for (TCE)."""

    include_last_reward: bool = False
    """Let the last segment run to the end of the episode; the paper's ends at the last point (TCE)."""

    def __post_init__(self) -> None:
        rates = 0 < self.learning_rate < math.inf and 0 <= self.weight_decay < math.inf
        if not (rates and self.epochs >= 1):
            raise ConfigError(
                "Needed: learning_rate > 0, epochs >= 1, weight_decay >= 0; got "
                f"{self.learning_rate}, {self.epochs}, {self.weight_decay}."
            )
        if not 0 < self.final_learning_rate_fraction <= 1:
            raise ConfigError(
                "final_learning_rate_fraction must lie in (0, 1], got "
                f"{self.final_learning_rate_fraction}; 1 keeps the learning rate constant."
            )
        if not 0 <= self.learning_rates_fall_from < 1:
            raise ConfigError(
                f"learning_rates_fall_from must lie in [0, 1), got {self.learning_rates_fall_from}; 0 lets "
                "them fall from the start."
            )
        if self.segment_points < 2:
            raise ConfigError(
                f"A motion is cut at 2 points or more, got segment_points={self.segment_points}."
            )
        if not (0 < self.gamma <= 1 and 0 <= self.gae_lambda <= 1):
            raise ConfigError(
                f"Needed: 0 < gamma <= 1 and 0 <= gae_lambda <= 1; got {self.gamma}, {self.gae_lambda}."
            )

    def learning_rate_factor(self, progress: float) -> float:
        """What learning rates are multiplied by when the fraction `progress` of training is over.

        >>> UpdateConfig(final_learning_rate_fraction=0.5).learning_rate_factor(0.5)
        0.75
        >>> late = UpdateConfig(final_learning_rate_fraction=0.5, learning_rates_fall_from=0.8)
        >>> [late.learning_rate_factor(progress) for progress in (0.5, 0.8, 1.0)]
        [1.0, 1.0, 0.5]
        """
        fallen = max(0.0, progress - self.learning_rates_fall_from) / (1.0 - self.learning_rates_fall_from)
        return 1.0 + fallen * (self.final_learning_rate_fraction - 1.0)


@dataclass(frozen=True)
class GaussianConfig(EpisodicConfig):
    """What a Gaussian policy over motions needs besides, however it learns."""

    policy_input: PolicyInput = "observation"
    """What the policy sees before the motion: the whole first observation, or its task context alone."""

    precision: Precision = "float32"
    """Precision of the networks; projections are computed in float64 in any case."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Network and exploration."""

    trust_region: TrustRegionConfig = field(default_factory=TrustRegionConfig)
    """How far an iteration may move the policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("policy_input", PolicyInput), ("precision", Precision)):
            check_option(name, getattr(self, name), get_args(allowed))


@dataclass(frozen=True)
class OnPolicyConfig(GaussianConfig):
    """What TCE and BBRL need: a critic, and how the policy is improved by it."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic: of states for TCE, of contexts for BBRL."""

    update: UpdateConfig = field(default_factory=UpdateConfig)
    """How an iteration improves the policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = {"bbrl": 1, "tce": self.update.segment_points - 1}.get(self.algo, 2)
        if self.episodes * parts == 1:
            raise ConfigError(
                f"{self.algo} normalises the advantages of an iteration, and episodes=1 gives it a single "
                "one, which becomes 0: nothing is learned. Set episodes to 2 or more."
            )


@dataclass(frozen=True)
class ReplayConfig:
    """Which past episodes are learned from, how often, and how they are cut."""

    capacity: int = 1000
    """Episodes that are kept; the oldest are forgotten."""

    batch: int = 64
    """Episodes drawn for each gradient step."""

    best: float = 0.0
    """Share of a batch that is drawn from the tenth of the episodes that earned most: for tasks in which luck
    has to find first what is to be learned, once in a hundred episodes."""

    pieces: int = 20
    """An episode is read in so many."""

    segments: int = 3
    """A gradient step of the critic cuts its episodes into 1 to so many segments."""

    def __post_init__(self) -> None:
        for name in ("capacity", "batch", "pieces", "segments"):
            check_at_least_one(name, getattr(self, name))
        if not 0 <= self.best <= 1:
            raise ConfigError(f"replay.best is a share in [0, 1]; got {self.best}.")


@dataclass(frozen=True)
class OffPolicyConfig(GaussianConfig):
    """What TOPERL needs: a critic of segments, a replay, and how fast the policy follows the critic."""

    critic: SegmentCriticConfig = field(default_factory=SegmentCriticConfig)
    """The critic of motions."""

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """What is learned from."""

    learning_rate: float = 3e-4
    """Adam's learning rate for the policy."""

    epochs: int = 20
    """Gradient steps of the policy in an iteration, each on its own batch."""

    least_noise: float = 1.0
    """Each motion explores with a share of the policy's deviation, drawn from here to 1. With 1 unlikely
    motions are found sooner; with 0 the critic knows the mean motion, too, where small deviations fail."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.learning_rate < math.inf and self.epochs >= 1 and 0 <= self.least_noise <= 1):
            raise ConfigError(
                "Needed: learning_rate > 0, epochs >= 1 and least_noise in [0, 1]; got "
                f"{self.learning_rate}, {self.epochs} and {self.least_noise}."
            )
        if self.replay.capacity < self.episodes:
            raise ConfigError(
                f"The replay keeps {self.replay.capacity} episodes, fewer than the {self.episodes} of one "
                "iteration. Raise replay.capacity or lower episodes."
            )


_ConfigT = TypeVar("_ConfigT", bound=EpisodicConfig)


def taken_over(config: EpisodicConfig, kind: type[_ConfigT], algo: str) -> _ConfigT:
    """Settings of another kind, with what both kinds have."""
    shared = next(base for base in kind.__mro__ if isinstance(config, base))
    return kind(**{f.name: getattr(config, f.name) for f in dataclasses.fields(shared)} | {"algo": algo})
