"""Which settings each policy loss takes, and checking them before any time is spent on training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tether.errors import ConfigError, InvalidInputError
from tether.losses import LOSSES

#: Given by the trainer, not chosen: what was sampled, the distributions, how tokens are averaged.
_GIVEN = frozenset({"response_ids", "new", "old", "generator", "loss_agg_mode", "max_response_length"})

# Which settings of a loss make it look at whole distributions.
_LOOKS_AT_DISTRIBUTIONS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "dppo": lambda chosen: str(chosen["divergence"]).startswith("top-k"),
    "kl_penalty": lambda chosen: bool(chosen["kl_estimate"] == "exact"),
    "trm": lambda chosen: bool(chosen["kl_estimate"] == "exact"),
    "troll": lambda _: True,
}


def loss_options(name: str) -> dict[str, Any]:
    """The settings a loss of `tether.losses.LOSSES` can be given in a trainer, with their defaults.

    Raises:
        ConfigError: an unknown loss.

    Example:
        >>> loss_options("ppo_clip")
        {'clip_ratio_low': 0.2, 'clip_ratio_high': 0.2, 'dual_clip': None}
    """
    if name not in LOSSES:
        raise ConfigError(f"There is no policy loss {name!r}. Choose one of {', '.join(sorted(LOSSES))}.")
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _GIVEN}


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
            raise ConfigError(f"{name} has no option {option!r}. {has}")
    try:
        _try_out(name, {**known, **options})
    except InvalidInputError as error:
        raise ConfigError(f"{name} refuses its options: {error}") from error
    except TypeError as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ConfigError(f"{name} cannot compute with {given} ({error}).") from error


def looks_at_distributions(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a loss with these settings needs whole token distributions, not just sampled tokens.

    Example:
        >>> looks_at_distributions("dppo", {}), looks_at_distributions("dppo", {"divergence": "top-k-kl"})
        (False, True)
    """
    rule = _LOOKS_AT_DISTRIBUTIONS.get(name)
    return rule is not None and rule({**loss_options(name), **options})


def _try_out(name: str, options: Mapping[str, Any]) -> None:
    """Each loss checks its own settings: ask it, about two tokens of a vocabulary of two."""
    log_probs = torch.full((1, 2), 0.5).log()
    extra: dict[str, Any] = {}
    if looks_at_distributions(name, options):
        rows = torch.full((1, 2, 2), 0.5).log()
        extra = {"new": rows, "old": rows}
    if name == "troll":
        extra["response_ids"] = torch.zeros(1, 2, dtype=torch.long)
    LOSSES[name](log_probs, log_probs, torch.ones(1), torch.ones(1, 2), **options, **extra)
