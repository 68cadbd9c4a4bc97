"""Whether data sets fill TRL's batches: found out before training starts, and said with the numbers.

TRL takes prompts a whole batch of rollouts at a time. A data set that does not fill one gives an epoch
without any step, which TRL reports as a missing `max_steps`, or not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Sized
from dataclasses import fields
from typing import Any

# First, because it says what to install where TRL is missing or has moved.
from tether.integrations.trl_config import TROLLConfig

# isort: split
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id

from tether.errors import ConfigError, warn
from tether.integrations import trl_seam

trl_seam.check()

# A share of the prompts of an epoch that is worth a warning if no batch takes it up.
_NOTABLE_SHARE = 0.1


class FittedTrainer(GRPOTrainer):
    """`GRPOTrainer` that looks at the sizes of its data sets before it uses them.

    Raises:
        ConfigError: a set that fills no batch, with the numbers; settings of another trainer's.
    """

    _config_class: type[GRPOConfig] = GRPOConfig
    _reads_troll_settings = False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> None:
        if args is not None:
            self._check_read(args)
        args = fit_to_data(self._settings(model, args), train_dataset)
        super().__init__(model, reward_funcs, args, train_dataset, *rest, **kwargs)

    @classmethod
    def _check_read(cls, args: Any) -> None:
        """Refuse what TROLLTrainer would read and this trainer does not."""
        if cls._reads_troll_settings or not isinstance(args, TROLLConfig):
            return
        unread = {
            field.name: getattr(args, field.name)
            for field in fields(args)
            if field.name.startswith("troll_") and getattr(args, field.name) != field.default
        }
        if unread:
            raise ConfigError(
                f"{unread} are settings of TROLLTrainer, and {cls.__name__} does not read them. Give it "
                "keywords instead: anchor, sampler_weight, sampler_tolerance, support_top_k, support_mass, "
                "pack_sequences."
            )

    @classmethod
    def _settings(cls, model: Any, args: Any) -> Any:
        """Those given, or the defaults with TRL's rule for where the results go."""
        if args is not None:
            return args
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return cls._config_class(f"{name.split('/')[-1]}-{cls._name}")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a stream of prompts too short for a single update is an error."""
        result = super().train(*args, **kwargs)
        check_stream_was_long_enough(self.args, self.train_dataset, self.state.global_step)
        return result

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As TRL's, after a look at the numbers."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        if chosen is not None:
            check_evaluation_data(self.args, chosen)
        return super().get_eval_dataloader(eval_dataset)


def fit_to_data(config: GRPOConfig, dataset: Any) -> GRPOConfig:
    """The settings to train with on `dataset`: those given, or fewer updates a batch of rollouts.

    Only a number of updates that nobody chose is lowered, and in a copy of the settings. Data sets without
    a length (streams, or none at all) are taken as they are.

    Raises:
        ConfigError: not a single batch of rollouts can be filled; the message has the numbers.
    """
    prompts = _length(dataset)
    if prompts is None:
        return config
    needed = config.generation_batch_size // config.num_generations
    if prompts >= needed:
        _warn_of_leftover(config, prompts, needed)
        return config
    steps = _largest_steps(config, prompts)
    updates = steps // config.gradient_accumulation_steps
    if getattr(config, "updates_by_default", False) and updates:
        smaller = _with_steps(config, updates * config.gradient_accumulation_steps)
        taken = smaller.generation_batch_size // config.num_generations
        warn(
            f"{_shortage(config, prompts, needed)} Each batch of rollouts is made of {taken} prompts and "
            f"serves {updates} update{'s' if updates > 1 else ''} instead "
            f"(steps_per_generation={smaller.steps_per_generation}). For more updates on each batch set "
            f"num_iterations, which makes several passes over it.{_leftover(config, prompts, taken)}"
        )
        return smaller
    remedy = (
        f"steps_per_generation={steps} is the most they fill"
        if steps
        else "Lower per_device_train_batch_size (or raise num_generations)"
    )
    if steps < config.gradient_accumulation_steps:
        # TRL's own default needs as many: gradient_accumulation_steps micro-batches.
        remedy += ", and lower gradient_accumulation_steps" if steps else ""
    raise ConfigError(f"{_shortage(config, prompts, needed)} Not a single update could be made. {remedy}.")


def check_evaluation_data(config: GRPOConfig, dataset: Any) -> None:
    """Refuse to evaluate where TRL would fail inside, or report on nothing.

    Raises:
        ConfigError: no prompt at all, or a batch that splits the completions of a prompt.
    """
    completions = config.num_generations_eval or config.num_generations
    batch = config.per_device_eval_batch_size * config.world_size
    if batch % completions:
        raise ConfigError(
            "A batch of the evaluation holds "
            f"per_device_eval_batch_size={config.per_device_eval_batch_size} x {config.world_size} processes "
            f"= {batch} completions, no multiple of the {completions} that each prompt gets. Make it one, or "
            "set num_generations_eval to one of its divisors."
        )
    prompts = _length(dataset)
    if prompts is None:
        return
    if not prompts:
        raise ConfigError("The evaluation set is empty. Give it prompts, or leave it out.")
    if config.dataloader_drop_last and prompts * completions < batch:
        raise ConfigError(
            f"The evaluation set has {prompts} prompts with {completions} completions each, fewer than the "
            f"{batch} of one batch, and dataloader_drop_last=True leaves them all out. Set it to False, or "
            "lower per_device_eval_batch_size."
        )


def check_stream_was_long_enough(config: GRPOConfig, dataset: Any, updates: int) -> None:
    """Refuse to call it training where a stream of prompts ended before the first batch was full.

    Raises:
        ConfigError: after no update at all.
    """
    if updates == 0 and dataset is not None and _length(dataset) is None:
        needed = config.generation_batch_size // config.num_generations
        raise ConfigError(
            f"Training ended without an update: the stream of prompts ended before the {needed} of one batch "
            f"of rollouts ({_batch(config)}). Lower steps_per_generation, or give it more prompts."
        )


def _length(dataset: Any) -> int | None:
    return len(dataset) if isinstance(dataset, Sized) else None


def _batch(config: GRPOConfig) -> str:
    return (
        f"per_device_train_batch_size={config.per_device_train_batch_size} x {config.world_size} processes x "
        f"steps_per_generation={config.steps_per_generation} = {config.generation_batch_size} completions, "
        f"{config.num_generations} a prompt"
    )


def _shortage(config: GRPOConfig, prompts: int, needed: int) -> str:
    return (
        f"The data set has {prompts} prompts, fewer than the {needed} of one batch of rollouts "
        f"({_batch(config)})."
    )


def _largest_steps(config: GRPOConfig, prompts: int) -> int:
    """The most micro-batches that `prompts` fill with whole groups, at most those of the settings; or 0.

    Whole updates if there are any: half an update's rollouts would be of two policies.
    """
    completions = config.per_device_train_batch_size * config.world_size
    fitting = [
        steps
        for steps in range(1, config.steps_per_generation + 1)
        if steps * completions % config.num_generations == 0
        and steps * completions // config.num_generations <= prompts
    ]
    whole = [steps for steps in fitting if steps % config.gradient_accumulation_steps == 0]
    return max(whole or fitting, default=0)


def _with_steps(config: GRPOConfig, steps: int) -> GRPOConfig:
    smaller = copy.copy(config)  # the caller's may serve another, larger data set as well
    smaller.steps_per_generation = steps
    smaller.generation_batch_size = config.per_device_train_batch_size * config.world_size * steps
    return smaller


def _warn_of_leftover(config: GRPOConfig, prompts: int, taken: int) -> None:
    if prompts % taken >= _NOTABLE_SHARE * prompts:
        warn(
            f"The data set has {prompts} prompts, and a batch of rollouts takes {taken} ({_batch(config)})."
            f"{_leftover(config, prompts, taken)} Choose steps_per_generation so that fewer are left."
        )


def _leftover(config: GRPOConfig, prompts: int, taken: int) -> str:
    """What becomes of the prompts that fill no batch, as a sentence; nothing if there are none."""
    left = prompts % taken
    if not left:
        return ""
    which = "others in each epoch" if config.shuffle_dataset else "always the last, as shuffle_dataset=False"
    return f" An epoch uses {prompts - left} of the {prompts} prompts and leaves {left} over, {which}."
