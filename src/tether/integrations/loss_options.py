"""Which settings losses and estimators take, and checking them before any time is spent on training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tether.advantages import ADVANTAGES
from tether.errors import ConfigError, InvalidInputError
from tether.losses import find_loss
from tether.signatures import Option, check_known, keywords_of, options_of, places_of

#: Given by the trainer, not chosen, to a loss whose signature asks for it: what was sampled, whole
#: distributions, how old the data is, random numbers.
GIVEN = frozenset({"response_ids", "new", "old", "lag", "proximal_log_probs", "generator"})

# Given to every loss: how tokens are averaged.
_AVERAGING = frozenset({"loss_agg_mode", "max_response_length"})


def loss_options(name: str) -> dict[str, Option]:
    """The settings a loss can be given in a trainer: the keywords of its signature.

    Args:
        name: of `tether.losses.LOSSES`, or "package.module:function".

    Raises:
        ConfigError: an unknown loss, one without what every trainer gives, or a setting without a default.

    Example:
        >>> {option.name: option.default for option in loss_options("ppo_clip").values()}
        {'clip_ratio_low': 0.2, 'clip_ratio_high': 0.2, 'dual_clip': None}
    """
    loss = find_loss(name)
    lacking = _AVERAGING - keywords_of(loss)
    if lacking:
        raise ConfigError(
            f"{name} lacks the keywords {', '.join(sorted(lacking))}, which say how tokens are averaged. "
            "Hand them to tether.losses.aggregate."
        )
    return options_of(loss, name, GIVEN | _AVERAGING)


def given_to(name: str, options: Mapping[str, Any]) -> frozenset[str]:
    """Which of `response_ids`, `new`, `old` and `generator` a loss with these settings is to be given.

    Example:
        >>> sorted(given_to("dppo", {"divergence": "top-k-kl"})), sorted(given_to("clip_cov", {}))
        (['new', 'old'], ['generator'])
    """
    needed = keywords_of(find_loss(name)) & GIVEN
    return frozenset(needed if looks_at_distributions(name, options) else needed - {"new", "old"})


def looks_at_distributions(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a loss with these settings needs whole token distributions, not just sampled tokens.

    Example:
        >>> looks_at_distributions("dppo", {}), looks_at_distributions("dppo", {"divergence": "top-k-kl"})
        (False, True)
    """
    rule = getattr(find_loss(name), "looks_at_distributions", None)
    return rule({**_defaults(name), **options}) if rule else "new" in keywords_of(find_loss(name))


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
    check_known(name, options, loss_options(name))
    with _asked(name, options):
        _try_out(name, {**_defaults(name), **options})


def check_estimator_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse values that an estimator of `tether.advantages` does not take; one of your own is not asked.

    Raises:
        ConfigError: naming the setting.

    Example:
        >>> check_estimator_options("reinforce_plus_plus", {"gamma": 0.99})
    """
    estimator = ADVANTAGES.get(name)
    if estimator is None:
        return
    tokens = torch.ones(2, 1)
    available = {
        "rewards": torch.ones(2), "group_ids": torch.zeros(2, dtype=torch.long), "response_mask": tokens,
        "token_rewards": tokens, "values": tokens,
    }  # fmt: skip
    with _asked(name, options):
        estimator(*(available[place] for place in places_of(estimator)), **options)


@contextmanager
def _asked(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """What refuses its options says so as a setting."""
    try:
        yield
    except InvalidInputError as error:
        raise ConfigError(f"{name} refuses its options: {error}") from error
    except TypeError as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ConfigError(f"{name} cannot compute with {given} ({error}).") from error


def _defaults(name: str) -> dict[str, Any]:
    return {option.name: option.default for option in loss_options(name).values()}


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
