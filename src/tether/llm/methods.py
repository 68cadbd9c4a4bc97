"""The trainer that has a run's trust region and estimator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tether.llm.config import TrainConfig
from tether.llm.method_names import is_loss

if TYPE_CHECKING:
    from tether.integrations.trl import OldPolicyTrainer

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
    trainer: OldPolicyTrainer = trainer_class(
        args=args, **arguments, **chosen, estimator=_estimator(config), kl_stop=config.kl_stop
    )
    return trainer


def _trust_region(config: TrainConfig, settings: dict[str, Any]) -> tuple[type, Any, dict[str, Any]]:
    from trl import GRPOConfig

    from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer

    if config.trust_region == "troll":
        return TROLLTrainer, TROLLConfig(**settings, **_troll_settings(config)), {}
    # Baselines look at as many ids as TROLL would, to measure how far the policy moves.
    looking = {
        "support_top_k": config.top_k, "support_mass": config.mass, "pack_sequences": config.pack_sequences,
    }  # fmt: skip
    if is_loss(config.trust_region):
        from tether.integrations.trl_losses import PolicyLossTrainer

        chosen = {"policy_loss": config.trust_region, "loss_options": dict(config.loss_options)}
        return PolicyLossTrainer, GRPOConfig(**settings), chosen | looking
    low, high = config.clip_range if config.trust_region == "clip" else (math.inf, math.inf)
    return OldPolicyTrainer, GRPOConfig(**settings, epsilon=low, epsilon_high=high), looking


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


def _estimator(config: TrainConfig) -> Any:
    if config.estimator == "ppo":
        from tether.integrations.trl_critic import CriticOptions

        return CriticOptions(
            learning_rate=config.critic_learning_rate,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            clip_range=None if math.isinf(config.value_clip) else config.value_clip,
        )
    if config.estimator in _FROM_REWARDS:
        from tether.integrations.trl_advantages import FromRewards

        options = {"gamma": config.gamma} if config.estimator == "reinforce_plus_plus" else {}
        return FromRewards(config.estimator, options)
    return None
