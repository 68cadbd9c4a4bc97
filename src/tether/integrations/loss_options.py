"""Which settings each policy loss takes, and checking them before any time is spent on training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from tether.errors import ConfigError, InvalidInputError, did_you_mean
from tether.losses import find_loss

#: Given by the trainer, not chosen, to a loss whose signature asks for it: what was sampled, whole
#: distributions, random numbers, how tokens are averaged.
_GIVEN = frozenset(
    {
        *("response_ids", "new", "old", "lag", "proximal_log_probs", "generator"),
        *("loss_agg_mode", "max_response_length"),
    }
)


def loss_options(name: str) -> dict[str, Any]:
    """The settings a loss can be given in a trainer, with their defaults: the keywords of its signature.

    Args:
        name: of `tether.losses.LOSSES`, or "package.module:function".

    Raises:
        ConfigError: an unknown loss, one without what every trainer gives, or a setting without a default.

    Example:
        >>> loss_options("ppo_clip")
        {'clip_ratio_low': 0.2, 'clip_ratio_high': 0.2, 'dual_clip': None}
    """
    parameters = _keywords(name)
    lacking = {"loss_agg_mode", "max_response_length"} - parameters.keys()
    if lacking:
        raise ConfigError(
            f"{name} lacks the keywords {', '.join(sorted(lacking))}, which say how tokens are averaged. "
            "Hand them to tether.losses.aggregate."
        )
    chosen = {key: parameter for key, parameter in parameters.items() if key not in _GIVEN}
    without = [key for key, parameter in chosen.items() if parameter.default is parameter.empty]
    if without:
        raise ConfigError(f"{name}'s options {', '.join(without)} need defaults.")
    return {key: parameter.default for key, parameter in chosen.items()}


def given_to(name: str, options: Mapping[str, Any]) -> frozenset[str]:
    """Which of `response_ids`, `new`, `old` and `generator` a loss with these settings is to be given.

    Example:
        >>> sorted(given_to("dppo", {"divergence": "top-k-kl"})), sorted(given_to("clip_cov", {}))
        (['new', 'old'], ['generator'])
    """
    needed = _keywords(name).keys() & (_GIVEN - {"loss_agg_mode", "max_response_length"})
    return frozenset(needed if looks_at_distributions(name, options) else needed - {"new", "old"})


def looks_at_distributions(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a loss with these settings needs whole token distributions, not just sampled tokens.

    Example:
        >>> looks_at_distributions("dppo", {}), looks_at_distributions("dppo", {"divergence": "top-k-kl"})
        (False, True)
    """
    rule = getattr(find_loss(name), "looks_at_distributions", None)
    return rule({**loss_options(name), **options}) if rule else "new" in _keywords(name)


def check_loss_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse settings that the loss does not have, or values that it does not take.

    Raises:
        ConfigError: naming the setting, and those that there are.

    Example:
        >>> check_loss_options("cispo", {"clip_ratio_high": 3.0})
        >>> check_loss_options("cispo", {"kl_bound": 0.1})
        Traceback (most recent call last):
        ...
        tether.errors.ConfigError: cispo has no option 'kl_bound'. It has clip_ratio_low, clip_ratio_high.
    """
    known = loss_options(name)
    for option in options:
        if option not in known:
            has = f"It has {', '.join(known)}." if known else "It has none."
            raise ConfigError(f"{name} has no option {option!r}.{did_you_mean(option, known)} {has}")
    try:
        _try_out(name, {**known, **options})
    except InvalidInputError as error:
        raise ConfigError(f"{name} refuses its options: {error}") from error
    except TypeError as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ConfigError(f"{name} cannot compute with {given} ({error}).") from error


def _keywords(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(find_loss(name)).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _try_out(name: str, options: Mapping[str, Any]) -> None:
    """Each loss checks its own settings: ask it, about two tokens of a vocabulary of two."""
    log_probs = torch.full((1, 2), 0.5).log()
    rows = torch.full((1, 2, 2), 0.5).log()
    available = {
        "response_ids": torch.zeros(1, 2, dtype=torch.long), "new": rows, "old": rows,
        "lag": torch.ones(1), "proximal_log_probs": None, "generator": torch.Generator(),
    }  # fmt: skip
    given = {key: available[key] for key in given_to(name, options)}
    find_loss(name)(log_probs, log_probs, torch.ones(1), torch.ones(1, 2), **options, **given)
