"""Checks before hours are spent: memory, disk, lengths, chat template, and whether rewards can teach."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tether.errors import ConfigError, warn
from tether.llm.config import TrainConfig
from tether.llm.rollouts import engine_memory
from tether.llm.tasks import Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_PROBLEMS, _RESPONSES = 8, 4
"""How many training problems are looked at, and answered how often."""

_CROWDED = 0.9
"""Share of free memory from which what is certainly needed is worth a warning."""

_TRUNCATED = 0.9
"""Share of responses cut off from which learning is in doubt."""

_LOST_IN_BFLOAT16 = 1e-5
"""Below this learning rate most steps of Adam are smaller than bfloat16's last digit of a weight."""


@dataclass(frozen=True)
class Finding:
    """Something a check found."""

    text: str
    """What, with numbers, and what to do."""
    fatal: bool
    """Whether the run cannot work, rather than likely being of no use."""


def check_before_loading(config: TrainConfig, task: Task) -> None:
    """Look at what can be known without the weights: lengths, template, memory, disk."""
    if config.preflight == "off":
        return
    from tether.llm.generate import encode_prompt
    from tether.llm.models import read_config_and_tokenizer

    model_config, tokenizer = read_config_and_tokenizer(config.model)
    prompts = [problem.prompt for problem in task.problems("train", 4 * _PROBLEMS, config.seed)]
    if task.chat and tokenizer.chat_template is None:
        _raise_or_warn(config, [Finding(
            f"Task {config.task!r} asks in conversations, but {config.model!r} has no chat template. Use an "
            "instruction-tuned model, or put a chat_template into its tokenizer.", True,
        )])  # fmt: skip
        return
    longest = max(len(encode_prompt(tokenizer, p, config.chat_template_options)) for p in prompts)
    response = config.max_response_tokens or task.max_response_tokens
    estimate = estimate_memory(config, model_config)
    _raise_or_warn(config, [
        *_lengths(model_config, longest, response),
        *_memory(config, estimate),
        *_disk(config, estimate),
        *_precision(config),
    ])  # fmt: skip


def check_rewards(
    config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task
) -> None:
    """Answer a few training problems as training would, and see whether the rewards differ.

    Random numbers of others are left alone. All wrong, all right, or (for estimators that compare responses
    to one problem) alike within every problem means advantages of zero: nothing to learn from.
    """
    if config.preflight == "off":
        return
    from tether.llm.generate import answer_and_judge

    count = min(_RESPONSES, config.responses_per_prompt)
    problems = [p for p in task.problems("train", _PROBLEMS, config.seed) for _ in range(count)]
    answered = answer_and_judge(
        model, tokenizer, task, problems,
        max_response_tokens=config.max_response_tokens, temperature=config.temperature,
        batch_size=len(problems), seed=config.seed, chat_template_options=config.chat_template_options,
    )  # fmt: skip
    verdicts = [verdict for _, verdict in answered]
    rewards = [verdict.reward for verdict in verdicts]
    groups = [rewards[start : start + count] for start in range(0, len(rewards), count)]
    truncated = sum(response.truncated for response, _ in answered) / len(answered)
    solved = sum(verdict.correct for verdict in verdicts)
    compares_all = config.estimator.compares_all
    _raise_or_warn(
        config, [*_reward_findings(groups, solved, compares_all), *_truncation(truncated, len(answered))]
    )


def _raise_or_warn(config: TrainConfig, findings: Sequence[Finding]) -> None:
    stops = [found for found in findings if found.fatal or config.preflight == "refuse"]
    if stops:
        listed = "\n".join(f"- {found.text}" for found in stops)
        raise ConfigError(
            f"Checks before training found what stands in its way:\n{listed}\n"
            "(preflight='off', --preflight off, trains all the same.)"
        )
    for found in findings:
        warn(f"Before training: {found.text}")


def _lengths(model_config: Any, longest: int, response: int) -> Iterator[Finding]:
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + response > positions:
        yield Finding(
            f"Prompts of {longest} tokens and responses of {response} do not fit the model's {positions} "
            "positions. Lower max_response_tokens, or use a model with a longer context.",
            True,
        )


def _memory(config: TrainConfig, estimate: MemoryEstimate) -> Iterator[Finding]:
    available, place = available_memory(config.device)
    served = engine_memory(config, estimate.parameters)
    if served and place == "GPU memory":
        available, served = int(available * (1 - config.vllm_memory)), 0
    parts = (
        f"weights {_gb(estimate.weights)}, gradients {_gb(estimate.gradients)}, optimizer "
        f"{_gb(estimate.optimizer)}"
        + (f", reference model {_gb(estimate.reference)}" if estimate.reference else "")
        + (f", critic {_gb(estimate.critic)}" if estimate.critic else "")
        + (f", weights of earlier updates {_gb(estimate.lagged)}" if estimate.lagged else "")
        + (f", vLLM {_gb(served)}" if served else "")
    )
    fixed = estimate.fixed + served
    needed = f"{estimate.parameters:,} parameters need {_gb(fixed)} ({parts}), and {_gb(available)}"
    remedy = "Set lora_rank (quantization='nf4' on CUDA), dtype='bfloat16', or take a smaller model."
    if served:
        remedy += " Without vLLM: rollouts='transformers'."
    if fixed > available:
        yield Finding(f"{needed} of {place} are free. {remedy}", True)
    elif fixed > _CROWDED * available:
        yield Finding(f"{needed} of {place} are free, which leaves little to compute with. {remedy}", False)


def _disk(config: TrainConfig, estimate: MemoryEstimate) -> Iterator[Finding]:
    folder = config.output.absolute()
    there = len(list(folder.glob("checkpoints/step-*/COMPLETE")))
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    kept = config.keep_checkpoints + 1  # the new one is whole before the oldest goes
    model = estimate.parameters * (2 if config.dtype == "bfloat16" else 4)
    needed = max(1, kept - there) * estimate.checkpoint + model
    if needed > free:
        one = estimate.checkpoint + model
        yield Finding(
            f"{kept} checkpoints of {_gb(estimate.checkpoint)} and the trained model need {_gb(needed)} on "
            f"the disk of {folder}, and {_gb(free)} are free. Free space, lower keep_checkpoints "
            f"({config.keep_checkpoints}), or choose another output folder.",
            one > free,
        )


def _precision(config: TrainConfig) -> Iterator[Finding]:
    all_in_bfloat16 = config.dtype == "bfloat16" and config.lora_rank is None
    if all_in_bfloat16 and config.optimizer == "adamw" and config.learning_rate < _LOST_IN_BFLOAT16:
        yield Finding(
            f"With bfloat16 weights a learning rate of {config.learning_rate:g} changes most weights by less "
            "than their last digit, so that most of every step is lost. Use dtype='float32' with "
            "mixed_precision (twice the memory), or lora_rank.",
            False,
        )


def _reward_findings(groups: Sequence[Sequence[float]], solved: int, compares_all: bool) -> Iterator[Finding]:
    rewards = [reward for group in groups for reward in group]
    asked = f"{len(rewards)} responses to {len(groups)} training problems"
    if any(max(group) > min(group) for group in ([rewards] if compares_all else groups)):
        return
    if solved == 0 and max(rewards) == min(rewards):
        yield Finding(
            f"None of {asked} was right (all have reward {rewards[0]:g}), so the success rate is likely "
            f"below {1 - 0.05 ** (1 / len(rewards)):.0%} and there is next to nothing to learn from. Take "
            "easier problems, a stronger model, a longer max_response_tokens, or check that the form of the "
            "answer is asked for.",
            False,
        )
    elif solved == len(rewards):
        yield Finding(
            f"All of {asked} were right: nothing is left to learn here. Take harder problems.", False
        )
    else:
        yield Finding(
            f"Among {asked}, those to one problem all have the same reward, so every advantage is zero. "
            "Raise temperature or responses_per_prompt, or take problems of another difficulty.",
            False,
        )


def _truncation(share: float, count: int) -> Iterator[Finding]:
    if share >= _TRUNCATED:
        yield Finding(
            f"{share:.0%} of {count} responses were cut off at the longest length. Raise "
            "max_response_tokens, or check that the model ends its turns (end token, chat template).",
            False,
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


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
    """On the disk: what is trained, and its moments, a critic's too; the weights of earlier updates."""
    reference: int
    """A second model, where the reference penalty needs one."""
    critic: int
    """PPO's: a backbone in float32, with its gradients and moments."""
    lagged: int
    """Trained weights of earlier updates, where these sample."""

    @property
    def fixed(self) -> int:
        """What there is no way around with these settings."""
        others = self.reference + self.critic + self.lagged
        return self.weights + self.gradients + self.optimizer + others


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
    adapters = sum(layer.in_features + layer.out_features for layer in _linear_layers(model))
    trained = parameters if config.lora_rank is None else config.lora_rank * adapters
    trained_size = size if config.lora_rank is None else 4
    moments = _MOMENTS[config.optimizer]
    share = 1 if sharding() == "none" else process_count()
    weights = int(parameters * size) if config.quantization == "none" else _nf4_weights(model)
    backbone = sum(weight.numel() for weight in model.base_model.parameters())
    critic = 4 * backbone if config.estimator.spec.critic else 0
    versions = config.lag // config.updates_per_rollout + 1 if config.lag else 0
    lagged = versions * trained * trained_size
    return MemoryEstimate(
        parameters=parameters,
        trained=trained,
        weights=weights // share if sharding() == "everything" else weights,
        gradients=trained * trained_size // share,
        optimizer=moments * trained * trained_size // share,
        checkpoint=trained * (trained_size + moments * trained_size) + 3 * critic + lagged,
        reference=int(parameters * size) if config.reference_penalty and config.lora_rank is None else 0,
        critic=4 * critic,
        lagged=lagged,
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


def _linear_layers(model: PreTrainedModel) -> list[torch.nn.Linear]:
    """What adapters and 4-bit weights apply to: all linear layers except the head."""
    head = model.get_output_embeddings()
    return [part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head]


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
