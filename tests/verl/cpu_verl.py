"""verl on a machine without an accelerator, for tests and benchmarks: import this before verl."""

from __future__ import annotations

import os
import warnings

os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_ENGINE_DEVICE="cuda",  # verl registers its engines for accelerators only
    VERL_USE_EXTERNAL_MODULES="cpu_platform",
    VERL_LOGGING_LEVEL="ERROR",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",  # asked for, never used: the group exists already
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES="",
)
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
    os.environ.setdefault(name, value)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl names every engine whose framework is not installed
    import verl.workers.engine  # noqa: F401
