"""New weights for a vLLM that runs in the trainer's process on a CPU.

There vLLM packs matrices for its kernels when it has loaded them, and TRL's transfer, which writes into the
unpacked ones, fails. vLLM's own reload packs anew, all but an LM head that is tied to the embeddings: it
would go on with the old one, in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def reload_weights(generation: Any) -> None:
    """Give TRL's colocated `VLLMGeneration` a transfer of weights that works on a CPU."""

    def sync_weights() -> None:
        llm = generation.llm
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": generation._iter_named_params()})
        head = llm.llm_engine.model_executor.driver_worker.model_runner.model.lm_head
        head.quant_method.process_weights_after_loading(head)
        llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


@contextmanager
def engine_in_process(**options: Any) -> Iterator[None]:
    """While TRL makes a trainer with a colocated vLLM on a CPU: its engine in this process, with options that
    TRL has no setting for.

    Args:
        options: of `vllm.LLM`, such as ``dtype``.
    """
    import functools

    from trl.generation import vllm_generation

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or weights could not be handed over
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    made = vllm_generation.LLM
    # Compiling takes minutes, which a CPU does not earn back.
    vllm_generation.LLM = functools.partial(made, enforce_eager=True, **options)
    try:
        yield
    finally:
        vllm_generation.LLM = made
