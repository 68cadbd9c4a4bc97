"""The trained model as a folder anybody can load: whole weights, tokenizer, card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.experiments import RunFolder, atomic_write_text
from tether.llm.config import TrainConfig
from tether.llm.model_card import model_card

if TYPE_CHECKING:
    from tether.integrations.trl import OldPolicyTrainer

UNFINISHED = ".unfinished-checkpoint"
"""Where in a run folder a checkpoint is written before it counts."""

_ADAPTER = "adapter_config.json"


def save_trained_model(
    config: TrainConfig, run: RunFolder | None, trainer: OldPolicyTrainer, tokenizer: Any
) -> None:
    """Write ``<run>/model``: the trained weights with adapters merged, the tokenizer and a card.

    A model that was there stays until the new one is complete. Every process of a distributed run calls
    this; ``run`` is None in those that do not write.
    """
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if sharded or config.quantization != "none":
        # Adapters go onto the base model's own weights, not onto their 4-bit or sharded copy.
        gathered = config.output / ".gathered-model"
        trainer.save_model(str(gathered))
        if run is not None:
            finish_from_checkpoint(config, run, gathered, tokenizer)
            shutil.rmtree(gathered)
        return
    if run is None:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    _write(config, run, model.save_pretrained, tokenizer)


def finish_from_checkpoint(config: TrainConfig, run: RunFolder, checkpoint: Path, tokenizer: Any) -> None:
    """Write ``<run>/model`` from a checkpoint: its weights, or its adapters merged into the base model."""
    from tether.llm.models import load_model_and_tokenizer

    if not (checkpoint / _ADAPTER).is_file():
        model, _ = load_model_and_tokenizer(checkpoint, dtype="auto")
    else:
        from peft import PeftModel

        dtype = "bfloat16" if config.quantization != "none" and config.dtype == "auto" else config.dtype
        base, _ = load_model_and_tokenizer(config.model, dtype=dtype)
        model = PeftModel.from_pretrained(base, str(checkpoint)).merge_and_unload()
    _write(config, run, model.save_pretrained, tokenizer)


def _write(config: TrainConfig, run: RunFolder, save: Callable[[Path], Any], tokenizer: Any) -> None:
    """Beside the final name first, then in its place."""
    folder = run.path / "model"
    unfinished, replaced = folder.with_name(".model.tmp"), folder.with_name(".model.old")
    for left_over in (unfinished, replaced):
        if left_over.exists():
            shutil.rmtree(left_over)
    save(unfinished)
    tokenizer.save_pretrained(unfinished)
    atomic_write_text(unfinished / "README.md", model_card(config, run))
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(unfinished, folder)
    if replaced.exists():
        shutil.rmtree(replaced)
