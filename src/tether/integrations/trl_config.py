"""The settings of TROLL in TRL, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from tether.errors import ConfigError, InvalidInputError, MissingDependencyError, warn
from tether.settings import (
    Anchor,
    LagBound,
    LagGrowth,
    Region,
    Support,
    TROLLSettings,
    check_choice,
    is_number,
)

try:
    from trl import GRPOConfig
except ImportError as error:
    raise MissingDependencyError(
        f"tether.integrations.trl needs TRL ({error}). Install it with: pip install 'tether-rl[llm]'"
    ) from error

# The loss types whose only use of the trust region is the clip that TROLL replaces.
_CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")

# Updates made on each batch of rollouts unless the user says otherwise: the paper's 8.
_UPDATES_PER_ROLLOUT = 8


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


def sampler_tolerance_field() -> Any:
    """The setting `troll_sampler_tolerance`."""
    return _option(
        None,
        "vLLM with records: mean difference of log-probabilities to the trainer's own, right after new "
        "weights, above which training stops; by default 1e-3 in float32; in half precision 0.05, or four "
        "times the first transfer's, at most 0.15.",
    )


@dataclass
class RegionFields:
    """Settings of the trust region that every trainer of TRL takes, synchronous or not."""

    troll_kl_bound: float = _option(
        TROLLSettings.kl_bound,
        "Bound on KL(new || old) of each token in nats; infinity switches the trust region off.",
    )
    troll_alpha: float = _option(
        TROLLSettings.alpha, "Weight of the regression of the network onto its projection."
    )
    troll_top_k: int = _option(
        TROLLSettings.top_k, "Ids kept of each old token distribution, besides the sampled one."
    )
    troll_region: Region = _option(  # noqa: RUF009
        TROLLSettings.region, "Bound each token's divergence, or the mean over the tokens of a sequence."
    )
    troll_lag_growth: LagGrowth = _option(  # noqa: RUF009
        LagBound.growth,
        "Anchor sampler: how the bound grows with the optimizer steps n since the sampler's weights: "
        "constant, "
        "linear (1 + rate n), power (1 + n)^rate, or geometric (1 + rate)^n times troll_kl_bound.",
    )
    troll_lag_rate: float = _option(LagBound.rate, "Anchor sampler: the rate of that growth.")
    troll_kl_bound_largest: float = _option(
        LagBound.largest, "Anchor sampler: where that growth ends, in nats."
    )


@dataclass
class TROLLConfig(RegionFields, GRPOConfig):
    """`GRPOConfig` with the settings of the projection.

    Apart from the `troll_` fields, one default differs: without `steps_per_generation` or
    `generation_batch_size`, each batch of rollouts serves 8 updates as in the paper. With TRL's own
    default it serves one, the policy is then always its own old policy, and no trust region, clip or
    TROLL, ever acts. With ``num_iterations=8`` batches of rollouts keep TRL's size, and each is gone through
    8 times. docs/trl.md has the differences in a table.

    Raises:
        ConfigError: a value out of range, or a combination TROLL does not cover, with the remedy.
    """

    troll_mass: float = _option(
        TROLLSettings.mass, "Keep fewer ids where the most likely ones hold this much probability together."
    )
    troll_support: Support = _option(  # noqa: RUF009
        TROLLSettings.support,
        "Where distributions are compared: on the whole vocabulary, from the old policy's hidden states "
        "(exact); on the ids kept, all others being one outcome with their exact mass (bucket); or as in "
        "the paper's code, all others having probability 1e-12 each (paper).",
    )
    troll_anchor: Anchor = _option(  # noqa: RUF009
        "trainer",
        "Which policy the region is around: the trainer's own when the rollouts began, which TRL scores "
        "(trainer); or the one that sampled, from the log-probabilities its engine reports, however old it "
        "is "
        "(sampler): no scoring pass, and distributions are compared on what was reported (support bucket).",
    )
    troll_sampler_weight: float | None = _option(
        None,
        "Anchor trainer: weigh the policy gradient by min(pi / sampler, this), the decoupled form, for "
        "samplers "
        "that are not the trainer's policy; 2 is usual.",
    )
    troll_sampler_tolerance: float | None = sampler_tolerance_field()
    troll_pack_sequences: bool = _option(
        False, "Run the model on the tokens of a micro-batch without their padding, back to back."
    )
    troll_share_prefixes: bool = _option(
        False, "Compute once what the sequences of a micro-batch begin with alike, such as a group's prompt."
    )

    def __post_init__(self) -> None:
        """Check the settings and choose the number of updates a rollout batch."""
        #: Whether nobody chose how many updates a batch of rollouts serves, so that a small data set may.
        self.updates_by_default = self.steps_per_generation is None and self.generation_batch_size is None  # type: ignore[has-type]
        if self.updates_by_default:
            updates = 1 if self.num_iterations > 1 else _UPDATES_PER_ROLLOUT
            self.steps_per_generation = updates * self.gradient_accumulation_steps
        super().__post_init__()
        TROLLSettings.read(self, "troll_")
        _check_anchor(self)
        for name in ("troll_pack_sequences", "troll_share_prefixes"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        _check_combinations(self)


def _check_anchor(config: TROLLConfig) -> None:
    """What belongs to either anchor, and what the sampler's records make of other settings."""
    sampler = config.troll_anchor == "sampler"
    try:
        check_choice("troll_anchor", config.troll_anchor, get_args(Anchor))
    except InvalidInputError as error:
        raise ConfigError(str(error)) from error
    bound = lag_bound(config)
    grows = bound.growth != "constant"
    if grows and not sampler:
        raise ConfigError(
            f"troll_lag_growth={bound.growth!r} bounds the divergence from the policy that sampled. Set "
            'troll_anchor="sampler", or leave it constant.'
        )
    check_sampler_weight(config, config.troll_sampler_weight, config.troll_anchor, prefix="troll_")
    check_sampler_tolerance(config.troll_sampler_tolerance)
    if not sampler:
        return
    if config.troll_support == "paper":
        raise ConfigError(
            'troll_support="paper" invents probabilities for the ids whose exact mass a sampler\'s report '
            "tells. "
            'Leave troll_support at its default with troll_anchor="sampler".'
        )
    own = (config.generation_kwargs or {}).get("temperature", config.temperature)
    if own != config.temperature:
        raise ConfigError(
            f"generation_kwargs samples at temperature {own} and the network is scored at "
            f"temperature={config.temperature}. Set temperature alone."
        )
    config.troll_support = "bucket"
    config.vllm_importance_sampling_correction = False  # the sampler is the old policy


def lag_bound(config: RegionFields) -> LagBound:
    """The bound that a configuration describes."""
    return LagBound.read(config, "troll_")


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
    warn_of_reshaped_sampling(config, config.troll_anchor)


def check_sampler_weight(
    config: GRPOConfig, weight: float | None, anchor: Anchor, *, prefix: str = ""
) -> None:
    """Refuse a weight that cannot be meant, or that would come on top of another correction.

    Args:
        prefix: of the setting's name.
    """
    if weight is None:
        return
    if anchor == "sampler" or not (is_number(weight) and weight > 0):
        raise ConfigError(
            f'{prefix}sampler_weight={weight!r} corrects {prefix}anchor="trainer" for another sampler, by a '
            "positive largest weight such as 2. With the sampler as the anchor there is nothing to correct."
        )
    if config.use_vllm and config.vllm_importance_sampling_correction:
        raise ConfigError(
            f"{prefix}sampler_weight={weight} and vllm_importance_sampling_correction=True would both weigh "
            "the policy gradient. Choose one."
        )


def check_sampler_tolerance(tolerance: float | None) -> None:
    """Refuse what no difference could be within; infinity is within nothing's reach and switches it off."""
    if tolerance is not None and not (is_number(tolerance) and tolerance > 0):
        raise ConfigError(
            "The sampler's tolerance is a positive difference of log-probabilities in the mean, such as 0.1 "
            f"(math.inf for no check), or None for what arithmetic explains; got {tolerance!r}."
        )


# Settings under which tokens are not drawn from the distribution that is scored, of Transformers' generation
# and of vLLM, with the values that change nothing. Truncation is what a region around the sampler allows for.
TRUNCATING: dict[str, tuple[Any, ...]] = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}
_PENALTIES: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (None, 0.0)),
    **dict.fromkeys(("structured_outputs", "vllm_structured_outputs_regex"), (None,)),
}
_RESHAPING: dict[str, tuple[Any, ...]] = {
    **_PENALTIES,
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p"), (None, 1.0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (None, 0.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (None, 0)),
    **dict.fromkeys(("min_new_tokens", "min_length", "min_tokens"), (None, 0)),
    **dict.fromkeys(("bad_words_ids", "bad_words", "suppress_tokens", "begin_suppress_tokens"), (None, [])),
    **dict.fromkeys(("sequence_bias", "logit_bias", "allowed_token_ids"), (None,)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), (None,)),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), (None,)),
    "guidance_scale": (None, 1.0),
    "num_beams": (None, 1),
    "do_sample": (None, True),
}
# What TRL tells Transformers in every case; the rest is left to the model's own settings.
_TOLD_BY_TRL = ("top_p", "top_k", "repetition_penalty", "do_sample")


def changed_sampling(config: GRPOConfig, neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Those of the settings in `neutral` that have another value than one that changes nothing."""
    given = {name: getattr(config, name) for name in (*TRUNCATING, "repetition_penalty")}
    if getattr(config, "use_vllm", False):  # which alone knows of such a thing
        given["vllm_structured_outputs_regex"] = getattr(config, "vllm_structured_outputs_regex", None)
    given.update(getattr(config, "generation_kwargs", None) or {})  # which the asynchronous trainer has not
    return {name: v for name, v in given.items() if name in neutral and v not in neutral[name]}


def check_penalties(config: GRPOConfig, tolerance: float | None) -> None:
    """Refuse what no check of the sampler's weights could pass: vLLM reports what it makes of them.

    Args:
        tolerance: the check's; infinity for none.

    Raises:
        ConfigError: with the setting.
    """
    if tolerance == math.inf:
        return
    if changed := changed_sampling(config, _PENALTIES):
        raise ConfigError(
            f"{changed} changes every log-probability that vLLM reports, so that they cannot tell whether it "
            "has the trainer's weights. Leave it at its default while training, or leave the check out "
            "(sampler_tolerance=math.inf)."
        )


def check_kept_ids(config: GRPOConfig, reported: int) -> None:
    """Refuse sampling that may keep more ids of a token than are reported: the first such token ends a run.

    Args:
        reported: ids that the engine reports of each token.

    Raises:
        ConfigError: with the setting.
    """
    truncating = changed_sampling(config, TRUNCATING)
    if truncating and not 0 < (truncating.get("top_k") or 0) <= reported:
        raise ConfigError(
            f"{truncating} may keep more ids of a token than the {reported} that the engine reports of it. "
            f"Set top_k={reported} beside it (--sampling-top-k of the command), or have more reported "
            "(troll_top_k)."
        )


def warn_of_reshaped_sampling(config: GRPOConfig, anchor: Anchor) -> None:
    """Warn if tokens are not drawn from the distribution whose log-probabilities are compared."""
    neutral = _RESHAPING | (TRUNCATING if anchor == "trainer" else {})
    neutral["temperature"] = (None, config.temperature)  # what the scores are divided by
    if changed := changed_sampling(config, neutral):
        warn(
            f"{changed} make the sampler a different policy than the one whose log-probabilities are "
            "compared: samples are drawn from a truncated or reshaped distribution, ratios are those of the "
            "whole one. Leave these settings at their defaults while training."
        )


def warn_of_generation_settings(model: Any, config: GRPOConfig) -> None:
    """Warn if a model's own settings reshape what is sampled while whole distributions are scored."""
    settings = model.generation_config
    if settings is None or config.use_vllm:  # vLLM is told every setting
        return
    given = {**(config.generation_kwargs or {}), **({} if config.min_p is None else {"min_p": config.min_p})}
    changed = {
        name: getattr(settings, name, None)
        for name, neutral in (_RESHAPING | TRUNCATING).items()
        if name not in given and name not in _TOLD_BY_TRL and getattr(settings, name, None) not in neutral
    }
    if changed:
        warn(
            f"The model's own generation settings {changed} make the sampler a different policy than the one "
            "whose log-probabilities are compared. Reset them before training, as in "
            f"model.generation_config.{next(iter(changed))} = None."
        )
