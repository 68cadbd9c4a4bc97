"""What an update is made of: the trust region, the estimator, and the trainer that has both."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from tether.errors import ConfigError

if TYPE_CHECKING:
    from tether.integrations.trl import OldPolicyTrainer
    from tether.llm.config import TrainConfig

#: TROLL, TRL's clip, nothing; or a loss of `tether.losses.LOSSES`.
TrustRegion = Literal[
    "troll", "clip", "none",
    "cispo", "clip_cov", "dppo", "gmpo", "gspo", "kl_cov", "kl_penalty", "ppo_clip", "pspo", "sapo", "trm",
    "unclipped", "vespo",
]  # fmt: skip

#: GRPO and its averages as TRL has them, GSPO's ratio, and estimators of `tether.advantages`.
Estimator = Literal[
    "grpo", "dr_grpo", "dapo", "bnpo", "gspo",
    "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo",
]  # fmt: skip

# How each is spelt in TRL. The last four average over tokens, as verl's do.
_IN_TRL: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo"},
    "bnpo": {"loss_type": "bnpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "rloo": {"loss_type": "dapo"},
    "reinforce_plus_plus": {"loss_type": "dapo"},
    "reinforce_plus_plus_baseline": {"loss_type": "dapo"},
    "ppo": {"loss_type": "dapo"},
}

# Estimators that replace TRL's advantages by a function of the rewards.
_FROM_REWARDS = ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")

# Trust regions whose settings are fields of TrainConfig.
_OWN_FIELDS = {
    "troll": "kl_bound, alpha, top_k, mass and region",
    "clip": "clip_low and clip_high",
    "none": "nothing to set",
}
_LABELS = {"troll": "TROLL", "clip": "clip", "none": "no trust region"}


def is_loss(trust_region: str) -> bool:
    """Whether a trust region is a loss of `tether.losses`, with options of its own.

    >>> is_loss("dppo"), is_loss("clip")
    (True, False)
    """
    return trust_region in get_args(TrustRegion) and trust_region not in _OWN_FIELDS


def method_label(config: TrainConfig) -> str:
    """The method's name in tables and legends, with what was chosen of a loss's options."""
    label = _LABELS.get(config.trust_region, config.trust_region)
    if not config.loss_options:
        return label
    return f"{label} {', '.join(f'{name}={value}' for name, value in config.loss_options.items())}"


def check_method(config: TrainConfig) -> None:
    """Refuse a trust region, options and an estimator that do not go together.

    Raises:
        ConfigError: naming the setting and what there is instead.
    """
    known = get_args(TrustRegion)
    if config.trust_region not in known:
        raise ConfigError(
            f"trust_region={config.trust_region!r} is not known. Choose one of {', '.join(known)}."
        )
    if config.estimator not in _IN_TRL:
        raise ConfigError(f"estimator={config.estimator!r} is not known. Choose one of {', '.join(_IN_TRL)}.")
    if is_loss(config.trust_region):
        from tether.integrations.loss_options import check_loss_options  # torch, which others do not need

        check_loss_options(config.trust_region, config.loss_options)
        if config.estimator == "gspo":
            raise ConfigError(
                f"estimator='gspo' sets the level of the ratio in troll, clip and none; "
                f"{config.trust_region} has one of its own. Use trust_region='gspo' with estimator='grpo', "
                "or another estimator."
            )
    elif config.loss_options:
        raise ConfigError(
            f"loss_options={dict(config.loss_options)} are for losses of tether.losses; "
            f"{config.trust_region} is set by fields: {_OWN_FIELDS[config.trust_region]}."
        )
    _check_inside(config)
    if config.estimator == "ppo" and config.quantization != "none":
        raise ConfigError(
            f"estimator='ppo' trains a copy of the backbone as its critic, which quantization="
            f"{config.quantization!r} makes impossible. Use another estimator, such as rloo."
        )
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(f"{name} must lie in [0, 1], got {getattr(config, name)} (1 is usual).")
    for name in ("critic_learning_rate", "value_clip"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} must be positive, got {getattr(config, name)}.")


def _check_inside(config: TrainConfig) -> None:
    of_troll = {
        "alpha_tolerance": config.alpha_tolerance,
        "regression_updates": config.regression_updates or None,
    }
    for name, value in of_troll.items():
        if value is not None and config.trust_region != "troll":
            raise ConfigError(f"{name}={value} acts on TROLL's regression; {config.trust_region} has none.")
    for name in ("alpha_tolerance", "kl_stop"):
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} must be a positive number, got {value}.")
    if not 0 <= config.regression_updates < config.updates_per_rollout:
        raise ConfigError(
            f"regression_updates={config.regression_updates} must leave some of the "
            f"{config.updates_per_rollout} updates of a batch to the policy gradient."
        )


def trl_settings_of(config: TrainConfig) -> dict[str, Any]:
    """The estimator in TRL's words."""
    return dict(_IN_TRL[config.estimator])


def build_trainer(
    config: TrainConfig, settings: dict[str, Any], arguments: dict[str, Any]
) -> OldPolicyTrainer:
    """The trainer with the config's trust region and estimator.

    Args:
        config: what was chosen.
        settings: of TRL's `GRPOConfig`.
        arguments: of its trainer, besides `args`.
    """
    trainer_class, args, chosen = _trust_region(config, settings)
    estimator, more = _estimator(config)
    inside, remedies = _inside(config)
    bases = tuple(base for base in (estimator, inside, trainer_class) if base is not None)
    # Baselines look at as many ids as TROLL would, to measure how far the policy moves.
    support = {"support_top_k": config.top_k, "support_mass": config.mass}
    made: Any = type(trainer_class.__name__, bases, {**support, "pack_sequences": config.pack_sequences})
    trainer: OldPolicyTrainer = made(args=args, **arguments, **chosen, **more, **remedies)
    return trainer


def _trust_region(config: TrainConfig, settings: dict[str, Any]) -> tuple[type, Any, dict[str, Any]]:
    from trl import GRPOConfig

    from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer

    if config.trust_region == "troll":
        return TROLLTrainer, TROLLConfig(**settings, **_troll_settings(config)), {}
    if is_loss(config.trust_region):
        from tether.integrations.trl_losses import PolicyLossTrainer

        chosen = {"policy_loss": config.trust_region, "loss_options": dict(config.loss_options)}
        return PolicyLossTrainer, GRPOConfig(**settings), chosen
    low, high = config.clip_range if config.trust_region == "clip" else (math.inf, math.inf)
    return OldPolicyTrainer, GRPOConfig(**settings, epsilon=low, epsilon_high=high), {}


def _troll_settings(config: TrainConfig) -> dict[str, Any]:
    return {
        "troll_kl_bound": config.kl_bound,
        "troll_alpha": config.alpha,
        "troll_top_k": config.top_k,
        "troll_mass": config.mass,
        "troll_support": config.support,
        "troll_region": config.region,
        "troll_pack_sequences": config.pack_sequences,
    }


def _estimator(config: TrainConfig) -> tuple[type | None, dict[str, Any]]:
    if config.estimator == "ppo":
        from tether.integrations.trl_critic import CriticOptions, CriticTrainer

        critic = CriticOptions(
            learning_rate=config.critic_learning_rate,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            clip_range=None if math.isinf(config.value_clip) else config.value_clip,
        )
        return CriticTrainer, {"critic": critic}
    if config.estimator in _FROM_REWARDS:
        from tether.integrations.trl_advantages import AdvantageTrainer

        options = {"gamma": config.gamma} if config.estimator == "reinforce_plus_plus" else {}
        return AdvantageTrainer, {"advantage": config.estimator, "advantage_options": options}
    return None, {}


def _inside(config: TrainConfig) -> tuple[type | None, dict[str, Any]]:
    """The remedies that keep the network itself near the old policy, where any was chosen."""
    if config.kl_stop is None and config.alpha_tolerance is None and config.regression_updates == 0:
        return None, {}
    from tether.integrations.trl_inside import InsideOptions, InsideTrainer

    options = InsideOptions(
        kl_stop=config.kl_stop,
        alpha_tolerance=config.alpha_tolerance,
        regression_updates=config.regression_updates,
    )
    return InsideTrainer, {"inside": options}
