"""Which settings of a run go with asynchronous rollouts; the others are refused by name."""

from __future__ import annotations

from typing import Any

from tether.errors import ConfigError
from tether.llm.methods import TROLL, Clip

#: Setting -> the value at which it asks for nothing, and what to do instead.
_NOT_THERE: dict[str, tuple[object, str]] = {
    "kl_stop": (None, "a batch serves one update, after which there is nothing to stop"),
    "step_back": (None, "a batch serves one update, by many versions of the policy"),
    "reference_penalty": (0.0, "TRL's asynchronous trainer has no reference model"),
    "sampler_weight": (None, "the region is around the sampler itself"),
    "step_scale": (None, "it would need every rank's samples of an update; lower the learning rate"),
    "sampler_dtype": ("as_trained", "set vllm_dtype, which is the server's own"),
    "lag": (0, "data are as old as the server is behind; set max_lag"),
    "mask_truncated": (False, "TRL's asynchronous trainer does not tell which responses were cut off"),
    "pack_sequences": (False, "its sequences are packed anyway"),
    "share_prefixes": (False, "TRL packs its sequences, each with its own prompt"),
    "quantization": ("none", "a server cannot take over 4-bit weights; use lora_rank without it"),
}


def check_async(config: Any) -> None:
    """Refuse what a run with ``rollouts="vllm-async"`` cannot have, and its settings in other runs.

    Args:
        config: a `TrainConfig`, which calls this while it is made.

    Raises:
        ConfigError: naming the setting and what to do.
    """
    if config.rollouts != "vllm-async":
        _check_not_async(config)
        return
    if config.max_lag < 1:
        raise ConfigError(
            f"max_lag must be at least 1, got {config.max_lag}: a response is written before the update that "
            "uses it. For rollouts in turns with updates use rollouts='vllm'."
        )
    if config.vllm_port is not None and config.vllm_server is not None:
        raise ConfigError(
            f"vllm_port={config.vllm_port} is of a server to be started, and vllm_server="
            f"{config.vllm_server!r} of one that runs. Give one of the two."
        )
    if not isinstance(config.method, TROLL | Clip):
        raise ConfigError(
            f"rollouts='vllm-async' trains with method troll or clip, got {config.method.name!r}. The others "
            "have the sampler's records with rollouts='vllm' and anchor='sampler', and stale data on "
            "purpose with lag."
        )
    if isinstance(config.method, TROLL):
        _check_support(config.method)
    if config.estimator.name != "grpo":
        raise ConfigError(
            f"rollouts='vllm-async' has TRL's advantages, estimator grpo; got {config.estimator.name!r}."
        )
    for name, (unused, reason) in _NOT_THERE.items():
        value = getattr(config, name)
        if value != unused:
            raise ConfigError(f"{name}={value!r} does not go with rollouts='vllm-async': {reason}.")
    object.__setattr__(config, "anchor", "sampler")


def _check_not_async(config: Any) -> None:
    if config.vllm_port is not None:
        raise ConfigError(
            f"vllm_port={config.vllm_port} is of the server that rollouts='vllm-async' starts; got "
            f"rollouts={config.rollouts!r}."
        )
    if config.max_lag != type(config).max_lag:
        raise ConfigError(
            f"max_lag={config.max_lag} is of rollouts='vllm-async'; got rollouts={config.rollouts!r}, in "
            "turns with updates. For stale data on purpose set lag."
        )


def _check_support(method: TROLL) -> None:
    """The region is on the ids that the server reports, all of them, and the mass of all others."""
    if method.support == "paper":
        raise ConfigError(
            "method.support='paper' invents a probability for each id that the sampler did not report, and "
            "rollouts='vllm-async' has the region around the sampler: use 'bucket'."
        )
    if method.mass != TROLL.mass:
        raise ConfigError(
            f"method.mass={method.mass} does not go with rollouts='vllm-async', which keeps every id "
            "that the server reports: set method.top_k."
        )
