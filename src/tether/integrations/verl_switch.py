"""TROLL in verl's trainers with one switch, and what it stands for. Needs no verl.

`+tether=troll`: around the policy that verl scores the rollouts with; `+tether=troll_sampler`: around the one
that sampled them.

Hydra, which reads verl's configuration, finds the switch by itself where Tether is installed
(`hydra_plugins`); `tether verl --show` prints it.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from tether.settings import LagBound, TROLLSettings
from tether.step_back_search import PASSES

#: `policy_loss.loss_mode` and `model.model_type`, by which verl finds loss and engine.
TROLL = "troll"
SWITCH = "+tether=troll"
TROLL_SAMPLER = "troll_sampler"
SAMPLER_SWITCH = f"+tether={TROLL_SAMPLER}"
#: Beside either: verl's default is FSDP1, where exact support finds no LM head.
STRATEGY = "actor_rollout_ref.actor.strategy=fsdp2"

#: Settings of TROLL that only verl's plug-in has.
OLD_STORE, RATIO, ANCHOR = "local", "token", "trainer"

#: Where a rollout server of verl's finds how many ids it is to report of each token.
TOP_K = "troll_top_k"

_PLUGIN = "tether.integrations.verl"
_LOSS = "actor_rollout_ref.actor.policy_loss"
#: The agent loop that keeps what the engine reports.
MANAGER = f"{_PLUGIN}.rollouts.SamplerAgentLoopManager"


def settings() -> dict[str, Any]:
    """TROLL's settings under their names in `policy_loss`, with their defaults.

    Example:
        >>> settings()["troll_support"], settings()["troll_old_store"]
        ('exact', 'local')
    """
    shared = {f"troll_{field.name}": field.default for field in fields(TROLLSettings)}
    lag = {"growth": LagBound.growth, "rate": LagBound.rate}
    by_lag = {f"troll_lag_{name}": default for name, default in lag.items()}
    largest = {"troll_kl_bound_largest": LagBound.largest}
    own = {"troll_anchor": ANCHOR, "troll_old_store": OLD_STORE, "troll_ratio": RATIO}
    network = {
        "troll_step_back": None,
        "troll_step_back_statistic": "mean",
        "troll_step_back_passes": PASSES,
    }
    return {**shared, **own, **by_lag, **largest, **network}


def configuration() -> dict[str, Any]:
    """What the switch adds to verl's configuration."""
    policy_loss = {"_target_": f"{_PLUGIN}.TROLLPolicyLossConfig", "loss_mode": TROLL, **settings()}
    model = {"external_lib": _PLUGIN, "model_type": TROLL}
    return {"actor_rollout_ref": {"model": model, "actor": {"policy_loss": policy_loss}}}


def sampler_configuration() -> dict[str, Any]:
    """What the other one adds: the same around the sampler, an engine that reports, no scoring pass."""
    whole = configuration()
    whole["actor_rollout_ref"]["actor"]["policy_loss"]["troll_anchor"] = "sampler"
    whole["actor_rollout_ref"]["rollout"] = {
        "calculate_log_probs": True,
        "agent": {"agent_loop_manager_class": MANAGER},
        "custom": {TOP_K: f"${{{_LOSS}.troll_top_k}}"},
    }
    whole["algorithm"] = {"rollout_correction": {"bypass_mode": True}}
    return whole


def lines(tree: dict[str, Any] | None = None) -> list[str]:
    """The same as overrides of a command line: a key to a line.

    Example:
        >>> lines()[0]
        'actor_rollout_ref.model.external_lib=tether.integrations.verl'
    """
    known = (  # to verl; the rest is added
        "external_lib", "_target_", "loss_mode",
        "calculate_log_probs", "bypass_mode",
    )  # fmt: skip
    flat = _flat(configuration() if tree is None else tree)
    return [
        f"{'' if key.endswith(known) else '+'}{key}={'null' if value is None else value}"
        for key, value in flat
    ]


def register() -> None:
    """Tell Hydra of the switches."""
    from hydra.core.config_store import ConfigStore

    for name, node in ((TROLL, configuration()), (TROLL_SAMPLER, sampler_configuration())):
        ConfigStore.instance().store(
            group="tether", name=name, node=node, package="_global_", provider="tether"
        )


def describe() -> str:
    """The switch, what it stands for, how to change it, and the verl that is installed here."""
    troll = lines()
    shown = "\n".join(f"    {line}" for line in troll)
    others = [line for line in lines(sampler_configuration()) if line not in troll]
    beside = "\n".join(f"    '{line}'" if "$" in line else f"    {line}" for line in others)
    return (
        f"TROLL in any of verl's trainers:\n\n    python -m verl.trainer.main_ppo {SWITCH} {STRATEGY} ...\n\n"
        f"The first word stands for\n\n{shown}\n\n"
        "Around the policy that sampled, from what vLLM reports, for asynchronous and stale data:\n\n"
        f"    python -m verl.trainer.main_ppo {SAMPLER_SWITCH} {STRATEGY} ...\n\n"
        f"whose first word stands for the same, but for\n\n{beside}\n\n"
        f"verl's own default, strategy=fsdp, goes with {_LOSS}.troll_support=bucket alone.\n"
        f"Either is changed by later words of the command line, such as {_LOSS}.troll_kl_bound=0.1 or\n"
        f"{_LOSS}.troll_support=bucket. What each means: docs/verl.md.\n"
        "A YAML file of your own, whose settings either would overrule, has it among its defaults instead:\n"
        f"'- tether: {TROLL}', before '- _self_'.\n\n{_installed()}"
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
