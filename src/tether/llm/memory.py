"""What a training run cannot do without, before anything is loaded: memory and disk; and what there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tether.llm.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_NF4_BYTES = 0.53
"""Bytes a weight in NF4: half a byte, and doubly quantised constants."""

_MOMENTS = {"adamw": 2, "sgd": 1}
"""Numbers an optimizer keeps for each one it changes."""

# What layers with adapters keep, in multiples of what they keep without; benchmarks/results/smollm2_cost.
_ADAPTED = 1.6

# TRL evaluates the LM head in tiles of this many tokens and ids, in float32.
_HEAD_TOKENS, _HEAD_IDS = 4096, 32768


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes one process needs, its share where the model is spread; activations and responses come on top."""

    parameters: int
    """Numbers in the model."""
    trained: int
    """Numbers the optimizer changes."""
    weights: int
    gradients: int
    optimizer: int
    """AdamW's two moments, SGD's momentum."""
    checkpoint: int
    """On the disk: what is trained, and its moments."""
    reference: int
    """A second model, where the reference penalty needs one."""
    critic: int
    """PPO's: a backbone in float32, with its gradients and moments."""

    @property
    def fixed(self) -> int:
        """What there is no way around with these settings."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic


def estimate_memory(config: TrainConfig, model_config: PretrainedConfig) -> MemoryEstimate:
    """What training takes in one process of ``config``'s run.

    The model is built without memory (on torch's meta device), so all counts are exact for its architecture.
    """
    from transformers import AutoModelForCausalLM

    from tether.llm.process import process_count, sharding

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    size = _bytes_a_weight(config, model_config)
    parameters = sum(weight.numel() for weight in model.parameters())
    trained = parameters if config.lora_rank is None else _adapter_size(model, config.lora_rank)
    trained_size = size if config.lora_rank is None else 4
    moments = _MOMENTS[config.optimizer]
    share = 1 if sharding() == "none" else process_count()
    weights = int(parameters * size) if config.quantization == "none" else _nf4_weights(model)
    return MemoryEstimate(
        parameters=parameters,
        trained=trained,
        weights=weights // share if sharding() == "everything" else weights,
        gradients=trained * trained_size // share,
        optimizer=moments * trained * trained_size // share,
        checkpoint=_checkpoint(parameters, trained, size, trained_size, moments),
        reference=int(parameters * size) if config.reference_penalty and config.lora_rank is None else 0,
        critic=_critic(model) if config.estimator.spec.critic else 0,
    )


def available_memory(device: str = "auto") -> tuple[int, str]:
    """Bytes that are free, and of what: this process's GPU, or this machine (or container).

    >>> available, place = available_memory("cpu")
    >>> available > 0, place
    (True, 'memory')
    """
    from tether.llm.process import local_rank

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.mem_get_info(local_rank())[0], "GPU memory"
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = _container_limit()
    return (free if limit is None else min(free, limit)), "memory"


def _bytes_a_weight(config: TrainConfig, model_config: Any) -> int:
    names = {"float32": 4, "bfloat16": 2}
    if config.dtype in names:
        return names[config.dtype]
    stored = getattr(model_config, "dtype", None)
    return stored.itemsize if isinstance(stored, torch.dtype) else 4


def _checkpoint(parameters: int, trained: int, size: int, trained_size: int, moments: int) -> int:
    saved = parameters * size if trained == parameters else trained * trained_size
    return int(saved + moments * trained * trained_size)


def _critic(model: PreTrainedModel) -> int:
    """Weights, gradients and two moments, four bytes each."""
    return 4 * 4 * sum(weight.numel() for weight in model.base_model.parameters())


def _linear_layers(model: PreTrainedModel) -> list[torch.nn.Linear]:
    """What adapters and 4-bit weights apply to: all linear layers except the head."""
    head = model.get_output_embeddings()
    return [part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head]


def _adapter_size(model: PreTrainedModel, rank: int) -> int:
    return sum(rank * (layer.in_features + layer.out_features) for layer in _linear_layers(model))


def _nf4_weights(model: PreTrainedModel) -> int:
    packed = sum(layer.weight.numel() for layer in _linear_layers(model))
    others = sum(weight.numel() for weight in model.parameters()) - packed
    return int(packed * _NF4_BYTES + others * 2)


def _container_limit(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """What the control groups this process is in (a container, a cluster's job) still allow; None without a
    limit."""
    own = membership.read_text().splitlines() if membership.is_file() else []
    below = next((line.removeprefix("0::/") for line in own if line.startswith("0::/")), "")
    folder, allowed = root / below, []
    while folder.is_relative_to(root):  # each group above limits it too
        allowed.append(_left_of(folder))
        folder = folder.parent
    return min((left for left in allowed if left is not None), default=None)


def _left_of(group: Path) -> int | None:
    """What one control group still allows. Cached files count as used there, but give way."""
    limit, used, kinds = (group / name for name in ("memory.max", "memory.current", "memory.stat"))
    if not (limit.is_file() and used.is_file()):
        return None
    text = limit.read_text().strip()
    if not text.isdigit():
        return None
    stat = dict(line.split() for line in kinds.read_text().splitlines()) if kinds.is_file() else {}
    taken = int(used.read_text()) - int(stat.get("inactive_file", 0))
    return max(0, int(text) - max(0, taken))
