"""From a `TrainConfig` to a ready TRL trainer."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.errors import ConfigError, MissingDependencyError
from tether.llm.config import TrainConfig
from tether.llm.process import process_count
from tether.llm.tasks import Task, reward_function, to_dataset

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tether.integrations.packing import Packing
    from tether.integrations.trl import OldPolicyTrainer

# AdamW is TRL's default. SGD has the momentum of AdamW's first moment: what differs is the normalisation.
_OPTIMIZERS: dict[str, dict[str, str]] = {"adamw": {}, "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"}}


def make_trainer(
    config: TrainConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    folder: Path,
) -> OldPolicyTrainer:
    """The trainer a config asks for; all of them measure how far the policy moves."""
    arguments: dict[str, Any] = {
        "model": model,
        "reward_funcs": reward_function(task),
        "train_dataset": _problems_in_training_order(config, task),
        "processing_class": tokenizer,
        "peft_config": _lora(config),
    }
    arguments |= {
        "estimator": config.estimator.for_trainer(),
        "kl_stop": config.kl_stop,
        "step_back": _step_back(config),
        "anchor": config.anchor,
        "sampler_weight": config.sampler_weight,
        "lag": config.lag,
        "compact_rollouts": config.rollouts == "compact",
    }
    settings = _trl_settings(config, task, folder)
    packing: Packing = "shared" if config.share_prefixes else config.pack_sequences
    return config.method.build(settings, arguments, packing)


def _trl_settings(config: TrainConfig, task: Task, folder: Path) -> dict[str, Any]:
    import torch

    accumulation = config.responses_per_update // config.responses_per_micro_batch
    cpu = config.device == "cpu" or not torch.accelerator.is_available()
    return {
        **config.estimator.spec.trl,
        "output_dir": str(folder),
        "use_cpu": cpu,
        "ddp_backend": "gloo" if cpu and process_count() > 1 else None,
        "bf16": config.mixed_precision or (not cpu and config.dtype != "float32"),
        "seed": config.seed,
        "max_steps": config.steps,
        "per_device_train_batch_size": _responses_per_process(config),
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": config.updates_per_rollout * accumulation,
        "num_generations": config.responses_per_prompt,
        "max_completion_length": config.max_response_tokens or task.max_response_tokens,
        "temperature": config.temperature,
        "beta": config.reference_penalty,
        "learning_rate": config.learning_rate,
        **_OPTIMIZERS[config.optimizer],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": config.warmup_steps,
        "weight_decay": 0.0,
        "max_grad_norm": config.max_grad_norm,
        "gradient_checkpointing": config.gradient_checkpointing,
        "mask_truncated_completions": config.mask_truncated,
        "chat_template_kwargs": dict(config.chat_template_options),
        **_vllm(config, cpu),
        # A NaN must be seen (tether.llm.failures), not replaced by an average.
        "logging_nan_inf_filter": False,
        # The order is ours (below), and the same after a resume in whichever epoch.
        "shuffle_dataset": False,
        "dataloader_pin_memory": not cpu,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": _trackers(config),
        "run_name": f"{config.output.name}, {config.label}, seed {config.seed}",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def _responses_per_process(config: TrainConfig) -> int:
    """The micro-batch is that of the whole run; each process holds an equal part of it."""
    processes = process_count()
    if config.responses_per_micro_batch % processes:
        raise ConfigError(
            f"{config.responses_per_micro_batch} responses at a time cannot be split evenly among "
            f"{processes} processes. Set micro_batch_size to a multiple of their number."
        )
    return config.responses_per_micro_batch // processes


def _trackers(config: TrainConfig) -> list[str]:
    """The trackers TRL reports to; TensorBoard is fed by the run, into its own folder."""
    chosen: list[str] = [name for name in config.report_to if name != "tensorboard"]
    for name in chosen:
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(
                f"report_to names {name}, which is not installed: pip install {name}"
            )
    return chosen or ["none"]


def _vllm(config: TrainConfig, cpu: bool) -> dict[str, Any]:
    """TRL's settings of vLLM; refused where it cannot run rather than replaced."""
    if config.rollouts != "vllm":
        return {}
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "rollouts='vllm' needs vLLM, which is not installed: pip install 'trl[vllm]', or use "
            "rollouts='transformers'."
        )
    if cpu:
        raise ConfigError(
            "rollouts='vllm' hands weights over on the GPU, and this run has none (device "
            f"{config.device!r}). Use rollouts='transformers'."
        )
    settings: dict[str, Any] = {"use_vllm": True, "vllm_mode": config.vllm_mode}
    if config.vllm_mode == "colocate":
        return settings | {"vllm_gpu_memory_utilization": config.vllm_memory}
    if config.vllm_server is None:
        raise ConfigError(
            "vllm_mode='server' needs the server's address: set vllm_server, such as http://localhost:8000."
        )
    return settings | {"vllm_server_base_url": config.vllm_server}


def _problems_in_training_order(config: TrainConfig, task: Task) -> Dataset:
    """As many problems as the run will see, each pass over the data in a new order."""
    rollouts = math.ceil(config.steps / config.updates_per_rollout)
    needed = rollouts * config.prompts_per_rollout
    dataset = to_dataset(task, "train", needed, config.seed)
    order: list[int] = []
    rng = random.Random(config.seed)
    while len(order) < needed:
        once = list(range(len(dataset)))
        rng.shuffle(once)
        order += once
    return dataset.select(order[:needed])


def _step_back(config: TrainConfig) -> Any:
    if config.step_back is None:
        return None
    from tether.integrations.trl_step_back import StepBackOptions

    return StepBackOptions(config.step_back, config.step_back_statistic, every=config.step_back_every)


def _lora(config: TrainConfig) -> Any:
    if config.lora_rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=2 * config.lora_rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
