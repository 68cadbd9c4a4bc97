"""VCPO's step: a smaller learning rate for an update that few of its responses decide."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from tether.errors import ConfigError
from tether.integrations.trl_old_policy import loss_mask
from tether.losses.tokens import LARGEST_LOG_RATIO
from tether.settings import check_step_scale


def response_weights(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, largest: float = math.inf
) -> Tensor:
    """min(new / old, largest) of whole responses, the product over their tokens, [B], float64.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        mask: [B, T].
        largest: where a weight is cut.
    """
    log_ratio = torch.where(mask > 0, (log_probs - old_log_probs).detach().double(), 0.0).sum(-1)
    return log_ratio.clamp_max(LARGEST_LOG_RATIO).exp().clamp_max(largest)


def effective_share(weights: Tensor) -> float:
    """(sum w)^2 / (B sum w^2): how many of B responses a weighted mean rests on, as a share of them.

    >>> effective_share(torch.tensor([1.0, 1.0, 1.0, 0.0]))
    0.75
    """
    weights = weights.double()
    if not bool((weights > 0).any()):  # no response, or none that would be learned from
        return 1.0
    weights = weights / weights.max()  # whose squares cannot overflow
    return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))


class StepScale(TrainerCallback):
    """Multiplies each update's learning rate by the square root of its responses' effective share.

    Where data are old, ratios of whole responses are far apart and a few decide an update, whose gradient
    is then mostly noise. A factor on the loss would not make AdamW's step smaller, so it is on the learning
    rate, for the one step. Trainers add it to themselves: ``step_scale=2`` of `OldPolicyTrainer` and all that
    are built on it.

    Logs `trust_region/effective_share`.

    Args:
        trainer: an `OldPolicyTrainer`.
        largest: where the ratio of a response, new / old, is cut; `math.inf` for nowhere.

    Raises:
        ConfigError: a cut that is not positive, or DeepSpeed, which makes the step itself.

    Source: VCPO (arXiv 2602.17616), its scaling for AdamW; without its baseline, which needs a gradient norm
        of each response.
    """

    def __init__(self, trainer: Any, largest: float = 2.0) -> None:
        check_step_scale(largest)
        if trainer.is_deepspeed_enabled:
            raise ConfigError(
                f"step_scale={largest} changes the learning rate before the optimizer's step, and DeepSpeed "
                "has made it by then. Train with DDP or FSDP, or without step_scale."
            )
        self._trainer, self._largest = trainer, float(largest)
        self._weights: list[Tensor] = []  # of the update's micro-batches
        self._rates: list[Any] = []

    def count(self, inputs: dict[str, Any], log_probs: Tensor, old_log_probs: Tensor) -> None:
        """Add a micro-batch's responses."""
        mask = loss_mask(inputs)
        weights = response_weights(log_probs, old_log_probs, mask, largest=self._largest)
        self._weights.append(weights[(mask > 0).any(-1)])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All micro-batches of the update have been seen."""
        # Nothing is counted where a batch serves one update and is its own old policy: all weights are one.
        together = torch.cat(self._weights) if self._weights else torch.ones(1)
        self._weights = []
        accelerator = self._trainer.accelerator
        gathered = accelerator.gather(accelerator.pad_across_processes(together, pad_index=-1))
        share = effective_share(gathered[gathered >= 0])
        self._trainer._metrics["train"]["trust_region/effective_share"].append(share)
        groups = self._trainer.optimizer.param_groups
        self._rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * math.sqrt(share)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before a scheduler or a checkpoint sees the learning rate."""
        for group, rate in zip(self._trainer.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
