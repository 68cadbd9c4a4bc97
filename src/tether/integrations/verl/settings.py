"""TROLL's settings in verl's configuration, under `actor_rollout_ref.actor.policy_loss`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from verl.workers.config import PolicyLossConfig

from tether.errors import ConfigError, InvalidInputError
from tether.integrations.verl_switch import ANCHOR, OLD_STORE, RATIO, SAMPLER_SWITCH, TROLL
from tether.losses.sampler import Bound
from tether.losses.troll import RatioLevel
from tether.settings import LagBound, TROLLSettings, check_choice
from tether.step_back_search import PASSES, check_step_back

#: `policy_loss.loss_mode` and the name in verl's registry of policy losses; `model.model_type`.
LOSS_MODE = MODEL_TYPE = TROLL

_KEY = "actor_rollout_ref.actor.policy_loss"
#: The remedy where the exact trust region cannot work.
USE_BUCKET = f"{_KEY}.troll_support=bucket"

OldStore = Literal["local", "queue"]
"""Where the old policy waits: on the worker that recorded it, or in TransferQueue with the batch."""

Anchor = Literal["trainer", "sampler"]
"""The policy the region is around: the trainer's own before it updates, or the one that sampled."""

# How many ids a token has travels as int16; one more is the sampled token.
_MOST_IDS = 2**15 - 2


@dataclass
class TROLLPolicyLossConfig(PolicyLossConfig):
    """verl's `PolicyLossConfig` with the settings of the projection.

    verl makes one from YAML when its `_target_` names this class. The engine that is built next in the
    same process is the one it configures: verl makes an actor's configuration immediately before the actor.

    Raises:
        ConfigError: a value out of range, with the key and the remedy.
    """

    loss_mode: str = LOSS_MODE
    """"troll", or any of verl's own losses to compare with: these then run untouched."""
    troll_kl_bound: float = TROLLSettings.kl_bound
    """Bound on KL(new || old) of each token in nats; infinity switches the trust region off."""
    troll_alpha: float = TROLLSettings.alpha
    """Weight of the regression of the network onto its projection."""
    troll_top_k: int = TROLLSettings.top_k
    """Ids kept of each old token distribution, besides the sampled one; exact support proves with them."""
    troll_mass: float = TROLLSettings.mass
    """Keep fewer ids where the most likely ones hold this much probability together."""
    troll_support: str = TROLLSettings.support
    """Compare policies on the whole vocabulary ("exact", from hidden states), or on the ids kept, all others
    being one outcome with their exact mass ("bucket") or having probability 1e-12 each ("paper")."""
    troll_anchor: str = ANCHOR
    """Project around the policy that verl scores the rollouts with ("trainer"), or around the one that
    sampled, from what its engine reported ("sampler"): no scoring pass; compared on the reported ids."""
    troll_lag_growth: str = LagBound.growth
    """Anchor sampler: how the bound grows with the lag; see `tether.LagBound`."""
    troll_lag_rate: float = LagBound.rate
    """Anchor sampler: the rate of that growth."""
    troll_kl_bound_largest: float = LagBound.largest
    """Anchor sampler: where that growth ends, in nats."""
    troll_old_store: str = OLD_STORE
    """Keep the old policy on the worker that recorded it ("local"), or send it with the batch ("queue")."""
    troll_region: str = TROLLSettings.region
    """Bound each "token"'s divergence, or the mean over the tokens of a "sequence"."""
    troll_step_back: float | None = None
    """Budget in nats for the network itself: after the updates on a batch it goes back towards the weights
    that scored it until the measured KL(new || old) of the batch's tokens is within this; None: it stays."""
    troll_step_back_statistic: Any = "mean"
    """What is held to the budget: the tokens' "mean", their "max", or a quantile such as 0.99."""
    troll_step_back_passes: int = PASSES
    """Passes over the batch a step back may take."""
    troll_ratio: str = RATIO
    """Ratio of each "token", or GSPO's of a "sequence" (with `loss_agg_mode=seq-mean-token-mean`)."""

    def __post_init__(self) -> None:
        """Check the values and hand them to the engine that is built next."""
        _check(self)
        _pending[:] = [self]

    @property
    def around_sampler(self) -> bool:
        """Whether the old policy is the one that sampled."""
        return self.troll_anchor == "sampler"


_pending: list[TROLLPolicyLossConfig] = []


def take_pending_settings() -> TROLLPolicyLossConfig | None:
    """The settings made last in this process since the last call, if any."""
    latest = _pending[0] if _pending else None
    _pending.clear()
    return latest


def same_settings(first: Any, second: Any) -> bool:
    """Whether two configurations agree on everything TROLL reads."""
    names = [field.name for field in fields(TROLLPolicyLossConfig) if field.name.startswith("troll_")]
    return all(getattr(first, name, None) == getattr(second, name, None) for name in names)


def bound(config: TROLLPolicyLossConfig) -> Bound:
    """The bound: a number, or one that grows with the lag."""
    growing = LagBound.read(config, f"{_KEY}.troll_")
    return config.troll_kl_bound if growing.growth == "constant" else growing


def _check(config: TROLLPolicyLossConfig) -> None:
    TROLLSettings.read(config, f"{_KEY}.troll_")
    if config.troll_top_k > _MOST_IDS:
        raise ConfigError(
            f"{_KEY}.troll_top_k must be at most {_MOST_IDS}, got {config.troll_top_k!r}; 64 is usual."
        )
    try:
        check_choice("ratio", config.troll_ratio, get_args(RatioLevel))
        check_choice("old_store", config.troll_old_store, get_args(OldStore))
        check_choice("anchor", config.troll_anchor, get_args(Anchor))
    except InvalidInputError as error:
        raise ConfigError(f"{_KEY}.troll_{error}") from error
    grows = isinstance(bound(config), LagBound)
    if grows and not config.around_sampler:
        raise ConfigError(
            f"{_KEY}.troll_lag_growth={config.troll_lag_growth} bounds the divergence from the policy that "
            f"sampled. Use {SAMPLER_SWITCH} on the command line, or leave it constant."
        )
    if config.troll_step_back is not None:
        _check_step_back(config)
    if config.around_sampler and config.troll_support == "paper":
        raise ConfigError(
            f"{_KEY}.troll_support=paper invents probabilities for the ids whose exact mass a sampler's "
            "report tells. Leave it at its default with troll_anchor=sampler."
        )


def _check_step_back(config: TROLLPolicyLossConfig) -> None:
    try:
        check_step_back(
            config.troll_step_back, config.troll_step_back_statistic, config.troll_step_back_passes
        )
    except InvalidInputError as error:
        raise ConfigError(f"{_KEY}.troll_step_back: {error}") from error
    if config.troll_support != "exact" or config.around_sampler:
        raise ConfigError(
            f"{_KEY}.troll_step_back measures the network against the hidden states of the policy that verl "
            "scores the rollouts with, over the whole vocabulary. Use troll_support=exact and "
            "troll_anchor=trainer with it, or set it to null."
        )
