"""What a command sets for its whole process, and which of several processes it is."""

from __future__ import annotations

import logging
import os
from typing import Literal

from accelerate.utils import get_int_from_env, parse_flag_from_env

from tether.errors import ConfigError
from tether.experiments.jobs import usable_cores


def prepare_process(threads: int | None = None) -> None:
    """Set torch's threads and silence the notices that would bury a command's own display.

    Warnings and errors stay. For commands, not for libraries: all of it is global.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads or max(1, usable_cores() // process_count()))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("datasets").setLevel(logging.ERROR)


def process_count() -> int:
    """How many processes train together; more than one under ``accelerate launch`` or ``torchrun``."""
    return _number("WORLD_SIZE", 1)


def is_main_process() -> bool:
    """Whether this process writes the run's folder and speaks; the others only compute."""
    return _number("RANK", 0) == 0


def end_process_group() -> None:
    """Let go of what the processes spoke through, as PyTorch asks of a program before it ends."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def local_rank() -> int:
    """Which of this machine's accelerators is this process's."""
    return _number("LOCAL_RANK", 0)


Sharding = Literal["none", "optimizer", "everything"]
"""What each process holds a share of: nothing, gradients and moments (ZeRO-2), or the weights too."""


def sharding() -> Sharding:
    """How ``accelerate launch`` was asked to spread the model; read here, before any trainer exists."""
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return "everything"
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        return "everything" if _number("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2) == 3 else "optimizer"
    return "none"


def _number(name: str, default: int) -> int:
    try:
        return int(get_int_from_env([name], default))
    except ValueError as error:
        raise ConfigError(
            f"{name}={os.environ[name]!r} in the environment is no number. Start with accelerate launch."
        ) from error
