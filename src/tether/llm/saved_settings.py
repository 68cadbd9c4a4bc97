"""Settings of runs that earlier versions saved, in today's form; and what options were called then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from tether.errors import ConfigError
from tether.llm.choices import Choice, chosen, option_names
from tether.llm.estimators import find_estimator
from tether.llm.methods import find_method

#: Settings there are no more -> the value at which a run is what it would be without them.
RETIRED: dict[str, Any] = {
    "alpha_tolerance": None,
    "regression_updates": 0,
    "tail": "bucket",  # of the first runs of the search, when a support was all there was
}

#: What settings were called -> where they are now.
MOVED: dict[str, str] = {
    "trust_region": "method",
    "loss_options": "method.<option>",
    **{
        name: f"method.{name}"
        for name in ("kl_bound", "alpha", "top_k", "mass", "support", "region", "clip_low", "clip_high")
    },
    "gamma": "estimator.gamma",
    "gae_lambda": "estimator.gae_lambda",
    "critic_learning_rate": "estimator.learning_rate",
    "value_clip": "estimator.clip_range",
}


def current_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a saved run as the same run would be asked for now.

    A retired setting that was in use stays, so that a report shows it and nothing else passes for that run.

    >>> old = {"trust_region": "clip", "kl_bound": 0.05, "clip_low": 0.1, "alpha_tolerance": None}
    >>> current_settings(old)
    {'method': {'name': 'clip', 'top_k': 64, 'mass': 0.99999, 'clip_low': 0.1, 'clip_high': None}}
    """
    kept = {name: value for name, value in saved.items() if name not in RETIRED or value != RETIRED[name]}
    settings: dict[str, Any] = {}
    if "trust_region" in kept:  # every setting of every method side by side, those of others without effect
        settings["method"] = {"name": kept["trust_region"], **_moved(kept, "method", find_method)}
        settings["method"] |= kept.get("loss_options", {})
    if isinstance(kept.get("estimator"), str):
        settings["estimator"] = {"name": kept["estimator"], **_moved(kept, "estimator", find_estimator)}
    if settings:
        kept = {name: value for name, value in kept.items() if name not in MOVED}
    for name, find in (("method", find_method), ("estimator", find_estimator)):
        if name in (settings | kept):
            settings[name] = _completed((kept | settings)[name], find)
    return kept | settings


def _moved(saved: Mapping[str, Any], to: str, find: Callable[[str], type[Choice]]) -> dict[str, Any]:
    """The settings that went there, of those that what was chosen has."""
    name = saved["trust_region" if to == "method" else to]
    # A loss had options of its own, which may be called as TROLL's.
    is_loss = to == "method" and name not in ("troll", "clip", "none")
    own = ("top_k", "mass") if is_loss else option_names(find(name))
    places = {old: new.partition(".")[2] for old, new in MOVED.items() if new.startswith(f"{to}.")}
    return {
        new: _infinite_as_none(new, saved[old]) for old, new in places.items() if old in saved and new in own
    }


def _infinite_as_none(name: str, value: Any) -> Any:
    """A critic's clip that was off."""
    return None if name == "clip_range" and value == float("inf") else value


def _completed(saved: Any, find: Callable[[str], type[Choice]]) -> Any:
    """With the options that came later at their defaults; as it is, where what it names is not at hand."""
    try:
        return asdict(chosen(saved, find))
    except ConfigError:
        return saved
