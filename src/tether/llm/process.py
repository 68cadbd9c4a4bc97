"""What a command sets for its whole process before it loads a model."""

from __future__ import annotations

import logging
import os


def prepare_process(threads: int | None = None) -> None:
    """Set torch's threads and silence the notices that would bury a command's own display.

    Warnings and errors stay. For commands, not for libraries: all of it is global.

    Args:
        threads: torch threads; one a core if not given.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads or os.cpu_count() or 1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("datasets").setLevel(logging.ERROR)
