"""The algorithms by name, and what follows from a name: its learner and its settings."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from tether.episodic.config import EpisodicConfig
from tether.episodic.episodes import EnvSpec
from tether.episodic.learner import Learner
from tether.errors import ConfigError, did_you_mean
from tether.experiments.setting_values import typed_value
from tether.names import look_up

ALGORITHMS = {
    "tce": "tether.episodic.tce:TCE",
    "bbrl": "tether.episodic.bbrl:BBRL",
    "toperl": "tether.episodic.off_policy:TOPERL",
}
"""Name -> where its `Learner` is; one of your own goes by "package.module:Class" wherever a name does."""


def find_algorithm(name: str) -> type[Learner]:
    """The learner of an algorithm.

    Raises:
        ConfigError: an unknown name (the nearest known one is suggested), or no `Learner`.

    >>> find_algorithm("tce").__name__
    'TCE'
    """
    found = look_up(name, ALGORITHMS, "algorithm")
    if not (isinstance(found, type) and issubclass(found, Learner)):
        raise ConfigError(
            f"{name!r} is {found!r}; an algorithm is a subclass of tether.episodic.learner.Learner."
        )
    return found


def build_learner(config: EpisodicConfig, spec: EnvSpec) -> Learner:
    """An untrained learner of the configured algorithm.

    Args:
        config: the run, of the class the algorithm declares as its `config_type`.
        spec: of the environment it will act in (`EpisodeSampler.spec`).

    Raises:
        ConfigError: an unknown algorithm, or settings of another one.
    """
    algorithm = find_algorithm(config.algo)
    if not isinstance(config, algorithm.config_type):
        raise ConfigError(
            f"algo={config.algo!r} is configured by {algorithm.config_type.__name__}, got "
            f"{type(config).__name__}. Give one of those, or the algo that {type(config).__name__} is for."
        )
    return algorithm(config, spec)


def config_from_dict(values: Mapping[str, Any]) -> EpisodicConfig:
    """The configuration that `EpisodicConfig.as_dict` wrote, also after a journey through JSON.

    Raises:
        ConfigError: an unknown algorithm, an unknown or missing setting, or a value of another type.

    >>> from tether.episodic.config import OnPolicyConfig
    >>> config = OnPolicyConfig("tether/PointReach-v0", episodes=8)
    >>> config_from_dict(config.as_dict()) == config
    True
    """
    algorithm = find_algorithm(values.get("algo", EpisodicConfig.algo))
    built: EpisodicConfig = _build(algorithm.config_type, values, "")
    return built


def _build(kind: type, values: Mapping[str, Any], path: str) -> Any:
    """A config dataclass from nested plain values; `path` is where it stands, for messages."""
    hints = typing.get_type_hints(kind)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(
                f"Unknown setting {path}{name}.{did_you_mean(str(name), hints)} Known: "
                f"{', '.join(sorted(hints))}."
            )
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}{name} is {value!r}; give settings by name, as {path}{name}.NAME.")
            arguments[name] = _build(typing.cast(type, hints[name]), value, f"{path}{name}.")
        else:
            arguments[name] = typed_value(value, hints[name], f"{path}{name}")
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"Settings are missing or of another type ({error}). Mend them, or give the folder of an "
            "episodic run."
        ) from error
