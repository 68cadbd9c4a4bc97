"""The settings of TROLL in TRL, and what they refuse."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from tether.errors import ConfigError, MissingDependencyError, TetherWarning

try:
    import trl
    from trl import GRPOConfig
except ImportError as error:
    raise MissingDependencyError(
        f"tether.integrations.trl needs TRL 1.16 ({error}). Install it with: pip install 'tether-rl[llm]'"
    ) from error

if not trl.__version__.startswith("1.16."):
    raise MissingDependencyError(
        f"tether.integrations.trl works with TRL 1.16, found {trl.__version__}. "
        "Install it with: pip install 'trl>=1.16,<1.17'"
    )

# The loss types whose only use of the trust region is the clip that TROLL replaces.
_CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")

# Updates made on each batch of rollouts unless the user says otherwise: the paper's 8.
_UPDATES_PER_ROLLOUT = 8


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class TROLLConfig(GRPOConfig):
    """`GRPOConfig` with the settings of the projection.

    Apart from the `troll_` fields, one default differs: without `steps_per_generation` or
    `generation_batch_size`, each batch of rollouts serves 8 updates as in the paper. With TRL's own
    default it serves one, the policy is then always its own old policy, and no trust region, clip or
    TROLL, ever acts. With ``num_iterations=8`` batches of rollouts keep TRL's size, and each is gone through
    8 times. docs/trl.md has the differences in a table.

    Raises:
        ConfigError: a value out of range, or a combination TROLL does not cover, with the remedy.
    """

    troll_kl_bound: float = _option(
        0.05, "Bound on KL(new || old) of each token in nats; infinity switches the trust region off."
    )
    troll_alpha: float = _option(1.0, "Weight of the regression of the network onto its projection.")
    troll_top_k: int = _option(64, "Ids kept of each old token distribution, besides the sampled one.")
    troll_mass: float = _option(
        1 - 1e-5, "Keep fewer ids where the most likely ones hold this much probability together."
    )
    troll_support: Literal["exact", "bucket", "paper"] = _option(
        "exact",
        "Where distributions are compared: on the whole vocabulary, from the old policy's hidden states "
        "(exact); on the ids kept, all others being one outcome with their exact mass (bucket); or as in "
        "the paper's code, all others having probability 1e-12 each (paper).",
    )
    troll_region: Literal["token", "sequence"] = _option(
        "token", "Bound each token's divergence, or the mean over the tokens of a sequence."
    )
    troll_pack_sequences: bool = _option(
        False, "Run the model on the tokens of a micro-batch without their padding, back to back."
    )

    def __post_init__(self) -> None:
        """Check the settings and choose the number of updates a rollout batch."""
        #: Whether nobody chose how many updates a batch of rollouts serves, so that a small data set may.
        self.updates_by_default = self.steps_per_generation is None and self.generation_batch_size is None  # type: ignore[has-type]
        if self.updates_by_default:
            updates = 1 if self.num_iterations > 1 else _UPDATES_PER_ROLLOUT
            self.steps_per_generation = updates * self.gradient_accumulation_steps
        super().__post_init__()
        _check_types(self)
        _check_ranges(self)
        _check_combinations(self)


def _check_types(config: TROLLConfig) -> None:
    """Before anything is compared with them: what came out of a file or a shell may be text."""
    examples: dict[str, tuple[type, str]] = {
        "troll_kl_bound": (Real, "a number such as 0.05"),
        "troll_alpha": (Real, "a number such as 1.0"),
        "troll_mass": (Real, "a number such as 0.99999"),
        "troll_top_k": (Integral, "a whole number such as 64"),
        "troll_pack_sequences": (bool, "True or False"),
        "troll_support": (str, 'text, such as "exact"'),
        "troll_region": (str, 'text, such as "token"'),
    }
    for name, (kind, example) in examples.items():
        value = getattr(config, name)
        # Python counts True as a number.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(
                f"{name} must be {example}, got {value!r} of type {type(value).__name__}. Give it without "
                "quotes or brackets, or leave it out for the default."
            )


def _check_ranges(config: TROLLConfig) -> None:
    if not config.troll_kl_bound > 0:
        raise ConfigError(
            f"troll_kl_bound must be positive, got {config.troll_kl_bound!r}. 0.05 is the paper's; infinity "
            "switches the trust region off."
        )
    if not (config.troll_alpha >= 0 and math.isfinite(config.troll_alpha)):
        raise ConfigError(f"troll_alpha must be a number that is not negative, got {config.troll_alpha!r}.")
    if not config.troll_top_k >= 1:
        raise ConfigError(f"troll_top_k must be at least 1, got {config.troll_top_k!r}. 64 is the paper's.")
    if not 0 < config.troll_mass <= 1:
        raise ConfigError(
            f"troll_mass must lie in (0, 1], got {config.troll_mass!r}. It is the probability to keep: the "
            "paper's threshold of 1e-5 is troll_mass=0.99999."
        )
    for name, allowed in (
        ("troll_support", ("exact", "bucket", "paper")),
        ("troll_region", ("token", "sequence")),
    ):
        if getattr(config, name) not in allowed:
            raise ConfigError(f"{name} must be one of {allowed}, got {getattr(config, name)!r}.")


def _check_combinations(config: TROLLConfig) -> None:
    """Refuse what would silently be something else than TROLL."""
    if config.loss_type not in _CLIPPED_LOSS_TYPES:
        raise ConfigError(
            f'loss_type="{config.loss_type}" has a trust region of its own, which TROLL would replace. '
            f"Use one of {', '.join(_CLIPPED_LOSS_TYPES)}, or GRPOTrainer for {config.loss_type}."
        )
    if config.epsilon != 0.2 or config.epsilon_high is not None or config.delta is not None:
        raise ConfigError(
            f"epsilon={config.epsilon}, epsilon_high={config.epsilon_high} and delta={config.delta} "
            "belong to the clip, which TROLL replaces. Leave them at their defaults and set troll_kl_bound."
        )
    if config.off_policy_mask_threshold is not None:
        raise ConfigError(
            "off_policy_mask_threshold would judge sequences by their projected log-probabilities, which "
            "never leave the trust region. Leave it unset; the projection already bounds each token."
        )
    changed = _reshaped_sampling(config)
    if changed:
        warnings.warn(
            f"{changed} make the sampler a different policy than the one whose log-probabilities are "
            "compared: samples are drawn from a truncated or reshaped distribution, ratios are those of the "
            "whole one. Leave these settings at their defaults while training.",
            TetherWarning,
            stacklevel=4,
        )


def _reshaped_sampling(config: TROLLConfig) -> dict[str, Any]:
    """The settings under which tokens are not drawn from the distribution that is scored."""
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    chosen = {name: getattr(config, name) for name in neutral}
    neutral["temperature"] = config.temperature  # what the scores are divided by
    chosen.update({n: v for n, v in (config.generation_kwargs or {}).items() if n in neutral})
    return {name: value for name, value in chosen.items() if value not in (neutral[name], None)}


# What TRL leaves to the model's own generation settings unless it is told: what reshapes nothing.
_UNSHAPED_BY_THE_MODEL: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "sequence_bias": (None,),
}


def warn_of_generation_settings(model: Any, config: GRPOConfig) -> None:
    """Warn if a model's own settings reshape what is sampled while whole distributions are scored."""
    settings = model.generation_config
    if settings is None or config.use_vllm:  # vLLM is told every setting
        return
    given = {**(config.generation_kwargs or {}), **({} if config.min_p is None else {"min_p": config.min_p})}
    changed = {
        name: getattr(settings, name, None)
        for name, unshaped in _UNSHAPED_BY_THE_MODEL.items()
        if name not in given and getattr(settings, name, None) not in unshaped
    }
    if changed:
        warnings.warn(
            f"The model's own generation settings {changed} make the sampler a different policy than the one "
            "whose log-probabilities are compared. Reset them before training, as in "
            f"model.generation_config.{next(iter(changed))} = None.",
            TetherWarning,
            stacklevel=4,
        )
