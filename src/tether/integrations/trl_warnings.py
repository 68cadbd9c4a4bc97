"""What a trainer that compares whole distributions warns of when it is built."""

from __future__ import annotations

from typing import Any

from tether.errors import warn
from tether.integrations.dropout import warn_of_dropout
from tether.integrations.trl_config import TROLLConfig, warn_of_generation_settings, warn_of_reshaped_sampling

_NO_LAYERS = "Set disable_dropout=True, or lora_dropout=0."
_NO_RATES = (
    "disable_dropout=True does not reach them: load the model with the rate at 0, such as "
    'model_init_kwargs={{"{setting}": 0.0}}.'
)


def warn_of_settings(trainer: Any, base_model: Any) -> None:
    """Warn of everything that makes the old policy another one than the trust region believes, or none."""
    if trainer.anchor == "trainer":
        _warn_without_old_policy(trainer)
    warn_of_dropout(trainer.model, _NO_LAYERS, _NO_RATES)
    _warn_of_noisy_embeddings(trainer.args)
    if not isinstance(trainer.args, TROLLConfig):  # which has said so itself
        warn_of_reshaped_sampling(trainer.args, trainer.anchor)
    if not trainer.compact_rollouts:  # which read none of them
        warn_of_generation_settings(base_model, trainer.args)


def _warn_without_old_policy(trainer: Any) -> None:
    accumulation = trainer.args.gradient_accumulation_steps
    per_rollout = trainer.args.steps_per_generation * trainer.num_iterations
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if accumulation % per_rollout == 0 and not corrected:
        warn(
            "Every batch of rollouts serves a single update "
            f"(gradient_accumulation_steps={accumulation}, "
            f"steps_per_generation={trainer.args.steps_per_generation}, "
            f"num_iterations={trainer.num_iterations}), so the policy is its own old policy and no trust "
            "region, TROLL or clip, can act. Set steps_per_generation to a multiple of "
            f"gradient_accumulation_steps, such as {8 * accumulation}, or num_iterations to more than 1."
        )


def _warn_of_noisy_embeddings(args: Any) -> None:
    if args.neftune_noise_alpha:
        warn(
            f"neftune_noise_alpha={args.neftune_noise_alpha} adds fresh noise to the embeddings of every "
            "pass, so that old and new policy differ by noise, which the trust region would project away: "
            "nearly every token is projected. Leave it unset."
        )
