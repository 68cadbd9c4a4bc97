"""From a `TrainConfig` to a ready TRL trainer."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.errors import ConfigError
from tether.llm.config import TrainConfig
from tether.llm.precision import computes_in_bfloat16
from tether.llm.process import process_count
from tether.llm.rollouts import colocated_engine, vllm_settings
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
    import torch

    arguments: dict[str, Any] = {
        "model": model,
        "reward_funcs": reward_function(task),
        "train_dataset": problems_in_training_order(config, task),
        "processing_class": tokenizer,
        "peft_config": lora(config),
    }
    arguments |= {
        "estimator": config.estimator.for_trainer(),
        "kl_stop": config.kl_stop,
        "step_back": _step_back(config),
        "step_scale": config.step_scale,
        "anchor": config.anchor,
        "sampler_weight": config.sampler_weight,
        "lag": config.lag,
        "sampler_dtype": None if config.sampler_dtype == "as_trained" else torch.bfloat16,
        "compact_rollouts": config.rollouts == "compact",
    }
    settings = _trl_settings(config, task, folder)
    packing: Packing = "shared" if config.share_prefixes else config.pack_sequences
    with colocated_engine(config, model, on_cpu=_on_cpu(config)):
        return config.method.build(settings, arguments, packing)


def _trl_settings(config: TrainConfig, task: Task, folder: Path) -> dict[str, Any]:
    accumulation = config.responses_per_update // config.responses_per_micro_batch
    return {
        **config.estimator.spec.trl,
        **training_settings(config, task, folder),
        "steps_per_generation": config.updates_per_rollout * accumulation,
        "beta": config.reference_penalty,
        "mask_truncated_completions": config.mask_truncated,
        "chat_template_kwargs": dict(config.chat_template_options),
        **vllm_settings(config, on_cpu=_on_cpu(config)),
        # The order is ours (below), and the same after a resume in whichever epoch.
        "shuffle_dataset": False,
    }


def _on_cpu(config: TrainConfig) -> bool:
    import torch

    return config.device == "cpu" or not torch.accelerator.is_available()


def training_settings(config: TrainConfig, task: Task, folder: Path) -> dict[str, Any]:
    """Settings of TRL's that every trainer takes, synchronous or not."""
    cpu = _on_cpu(config)
    return {
        "output_dir": str(folder),
        "use_cpu": cpu,
        "ddp_backend": "gloo" if cpu and process_count() > 1 else None,
        "bf16": computes_in_bfloat16(config, on_cpu=cpu),
        "seed": config.seed,
        "max_steps": config.steps,
        "per_device_train_batch_size": _responses_per_process(config),
        "gradient_accumulation_steps": config.responses_per_update // config.responses_per_micro_batch,
        "num_generations": config.responses_per_prompt,
        "max_completion_length": config.max_response_tokens or task.max_response_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.sampling_top_k or 0,  # TRL's word for all of them
        "learning_rate": config.learning_rate,
        **_OPTIMIZERS[config.optimizer],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": config.warmup_steps,
        "weight_decay": 0.0,
        "max_grad_norm": config.max_grad_norm,
        "gradient_checkpointing": config.gradient_checkpointing,
        # A NaN must be seen (tether.llm.failures), not replaced by an average.
        "logging_nan_inf_filter": False,
        "dataloader_pin_memory": not cpu,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",  # the run's trackers get TRL's numbers too
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


def problems_in_training_order(config: TrainConfig, task: Task) -> Dataset:
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


def lora(config: TrainConfig) -> Any:
    """Adapters, if they are asked for."""
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
