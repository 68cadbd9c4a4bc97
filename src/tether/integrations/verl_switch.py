"""TROLL in verl's trainers with one switch, `+tether=troll`, and what it stands for. Needs no verl.

Hydra, which reads verl's configuration, finds the switch by itself where Tether is installed
(`hydra_plugins`); `tether verl --show` prints it.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from tether.settings import TROLLSettings

#: `policy_loss.loss_mode` and `model.model_type`, by which verl finds loss and engine.
TROLL = "troll"
SWITCH = "+tether=troll"

#: Settings of TROLL that only verl's plug-in has.
OLD_STORE, RATIO = "local", "token"

_PLUGIN = "tether.integrations.verl"
_LOSS = "actor_rollout_ref.actor.policy_loss"


def settings() -> dict[str, Any]:
    """TROLL's settings under their names in `policy_loss`, with their defaults.

    Example:
        >>> settings()["troll_support"], settings()["troll_old_store"]
        ('exact', 'local')
    """
    shared = {f"troll_{field.name}": field.default for field in fields(TROLLSettings)}
    return {**shared, "troll_old_store": OLD_STORE, "troll_ratio": RATIO}


def configuration() -> dict[str, Any]:
    """What the switch adds to verl's configuration."""
    policy_loss = {"_target_": f"{_PLUGIN}.TROLLPolicyLossConfig", "loss_mode": TROLL, **settings()}
    model = {"external_lib": _PLUGIN, "model_type": TROLL}
    return {"actor_rollout_ref": {"model": model, "actor": {"policy_loss": policy_loss}}}


def lines() -> list[str]:
    """The same as overrides of a command line: a key to a line.

    Example:
        >>> lines()[0]
        'actor_rollout_ref.model.external_lib=tether.integrations.verl'
    """
    known = ("external_lib", "_target_", "loss_mode")  # to verl; the rest is added
    return [f"{'' if key.endswith(known) else '+'}{key}={value}" for key, value in _flat(configuration())]


def register() -> None:
    """Tell Hydra of the switch."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(
        group="tether", name=TROLL, node=configuration(), package="_global_", provider="tether"
    )


def describe() -> str:
    """The switch, what it stands for, how to change it, and the verl that is installed here."""
    shown = "\n".join(f"    {line}" for line in lines())
    return (
        f"TROLL in any of verl's trainers:\n\n    python -m verl.trainer.main_ppo {SWITCH} ...\n\n"
        f"It stands for\n\n{shown}\n\n"
        f"and is changed by later words of the command line, such as {_LOSS}.troll_kl_bound=0.1 or\n"
        f"{_LOSS}.troll_support=bucket. What each means: docs/verl.md.\n\n{_installed()}"
    )


def _installed() -> str:
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        return "verl is not installed here; in an environment of its own: pip install 'tether-rl[verl]'."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl names every engine whose framework is not installed
        from tether.integrations.verl.environment import TESTED

    known = "tested" if TESTED.covers(version) else f"untested; tested is {TESTED}"
    return f"verl {version} is installed here ({known}), and has all that the plug-in stands on."


def _flat(tree: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value
