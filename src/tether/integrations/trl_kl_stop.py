"""Stopping a batch's updates once the network has moved too far from the policy that gathered the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.errors import ConfigError
from tether.experiments.files import atomic_write_json, load_json
from tether.integrations.trl_advantages import EstimatorTrainer
from tether.settings import check_kl_stop

# Part of a checkpoint, so the name stays.
_STATE_FILE = "inside.json"


class StoppableTrainer(EstimatorTrainer):
    """`GRPOTrainer` with a budget of KL(new || old) a batch of rollouts, if it is given one: `kl_stop`.

    An update whose tokens' mean KL is above it, and the rest of its batch's, leave the weights and the
    optimizer's moments as they are; a critic (`estimator=CriticOptions()`) goes on learning from the batch.
    The KL is that of `trust_region/kl_mean`, which holds lower bounds for tokens compared on their likeliest
    ids alone (TROLL's certified, all of a rival's): it never stops too early, and late by what moved among
    the other ids. Logs `trust_region/stopped`, 1 where an update was skipped; a checkpoint holds whether the
    rest of its batch is.

    Raises:
        ConfigError: not a positive number, updates that span batches, DeepSpeed, or fp16.

    Source: early stopping as in PPO's implementation of OpenAI Spinning Up, where too the critic
        goes on; for TROLL not in the paper.
    """

    def __init__(self, *args: Any, kl_stop: float | None = None, **kwargs: Any) -> None:
        check_kl_stop(kl_stop)
        super().__init__(*args, **kwargs)
        self.kl_stop = kl_stop
        if kl_stop is not None:
            self._check_updates_can_stop()
        self._stopped = False
        #: Sums over the micro-batches of an update: KL, tokens.
        self._moved = torch.zeros(2, device=self.accelerator.device)

    def _check_updates_can_stop(self) -> None:
        if self.is_deepspeed_enabled:
            raise ConfigError(
                f"kl_stop={self.kl_stop} withholds an update after its last backward pass, and DeepSpeed has "
                "made it by then. Train with DDP or FSDP, or without kl_stop."
            )
        if self.accelerator.mixed_precision == "fp16":
            raise ConfigError(
                f"kl_stop={self.kl_stop} withholds updates, and fp16's loss scaling needs a gradient at "
                "each. Train in bf16, or without kl_stop."
            )
        self._check_whole_updates()

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.model.training:
            self._stopped = False
        return super()._generate_and_score_completions(inputs)

    def _count_moved(self, kl: Tensor, mask: Tensor) -> None:
        """Add a micro-batch's tokens, [B, T]."""
        if self.kl_stop is not None and self.model.training:
            counted = mask > 0
            self._moved += torch.stack([torch.where(counted, kl, 0.0).sum(), counted.sum()]).to(self._moved)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As TRL's; after an update's last micro-batch, decide whether it is made."""
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.kl_stop is None or not self.accelerator.sync_gradients:
            return loss
        kl, count = self.accelerator.reduce(self._moved, reduction="sum").tolist()
        self._moved.zero_()
        if count > 0:
            self._stopped = self._stopped or kl / count > self.kl_stop
            self._metrics["train"]["trust_region/stopped"].append(float(self._stopped))
            if self._stopped:
                # None, not zeros: Adam then skips the parameters instead of moving them by its momentum.
                for parameter in self.model.parameters():
                    parameter.grad = None
        return loss

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        if self.kl_stop is not None and self.args.should_save:
            atomic_write_json(folder / _STATE_FILE, {"stopped": self._stopped})

    def _load_beside(self, folder: Path) -> None:
        super()._load_beside(folder)
        if self.kl_stop is None:
            return
        file = folder / _STATE_FILE
        state = load_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
        # Matters inside a batch alone: the next one begins anew.
        self._stopped = bool(state.get("stopped", False))
