"""How much memory a training run will take, before anything is loaded; and how much there is."""

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
    """Bytes one process needs, its share where the model is spread. Weights, gradients and optimizer are
    counted; the rest is estimated."""

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
    activations: int
    """What one micro-batch leaves for the backward pass, and the tile of the LM head."""
    generation: int
    """Keys and values of all responses of a batch, written at once, and the logits of one token each."""

    @property
    def fixed(self) -> int:
        """What there is no way around with these settings."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic

    @property
    def peak(self) -> int:
        """The larger of an update and of writing responses, when there are no gradients."""
        resting = self.weights + self.optimizer + self.reference + self.critic
        return max(self.fixed + self.activations, resting + self.generation)


def estimate_memory(config: TrainConfig, model_config: PretrainedConfig, length: int) -> MemoryEstimate:
    """What training takes in one process of ``config``'s run.

    The model is built without memory (on torch's meta device), so weights, gradients and moments are exact
    for its architecture. Activations are counted as the tensors a pre-norm decoder with gated MLP and fused
    attention keeps: 8 of the width and 4 of the MLP's width for each token and layer.

    Args:
        config: the run's settings.
        model_config: the model's configuration.
        length: tokens of the longest prompt and response together.
    """
    from transformers import AutoModelForCausalLM

    from tether.llm.process import process_count, sharding

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    text = model_config.get_text_config()
    size = _bytes_a_weight(config, model_config)
    parameters = sum(weight.numel() for weight in model.parameters())
    trained = parameters if config.lora_rank is None else _adapter_size(model, config.lora_rank)
    trained_size = size if config.lora_rank is None else 4
    rows = max(1, config.responses_per_micro_batch // process_count())
    written = max(1, config.prompts_per_rollout * config.responses_per_prompt // process_count())
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
        activations=_activations(config, text, rows * length, size),
        generation=0 if config.rollouts == "vllm" else _generation(text, written, length, size),
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


def _activations(config: TrainConfig, text: Any, tokens: int, size: int) -> int:
    compute = 2 if config.mixed_precision else size
    width, inner = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    layer = tokens * (8 * width + 4 * inner) * compute
    layers = text.num_hidden_layers
    kept = layer + layers * tokens * width * compute if config.gradient_checkpointing else layers * layer
    tile = min(tokens, _HEAD_TOKENS) * min(text.vocab_size, _HEAD_IDS) * 4
    return int((kept if config.lora_rank is None else _ADAPTED * kept) + 2 * tile)


def _generation(text: Any, responses: int, length: int, size: int) -> int:
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = responses * length * text.num_hidden_layers * 2 * heads * head_dim * size
    logits = 3 * responses * text.vocab_size * 4  # as they come, scaled, and as probabilities
    return int(cache + logits)


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
