"""TRL's own loss on given log-probabilities: its method, called on a stand-in for the trainer.

Nothing of TRL is copied. The stand-in holds the attributes that `_compute_loss` reads and returns the
batch's log-probabilities where the trainer would run a model.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _Accelerator:
    """One process: nothing to gather."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str = "sum") -> Tensor:
        return value


def trl_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    trainer: str = "GRPOTrainer",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of `GRPOTrainer._compute_loss` (or `GMPOTrainer`'s) with these settings."""
    leaf = log_probs.clone().requires_grad_()
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(log_probs), None),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=_Accelerator(),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1, **arguments),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_high=epsilon_high,
        epsilon_low=epsilon_low,
        importance_sampling_level=importance_sampling_level,
        loss_type=arguments.get("loss_type"),
        max_completion_length=log_probs.shape[1],
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
    )
    class_ = _trainer_class(trainer)
    if trainer == "GRPOTrainer":
        stand_in.get_gamma_weights = class_.get_gamma_weights
    tokens = torch.zeros(log_probs.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1],
        "completion_ids": tokens,
        "completion_mask": response_mask,
        "advantages": advantages,
        "old_per_token_logps": old_log_probs,
        "num_items_in_batch": response_mask.sum(),
    }
    loss = class_._compute_loss(stand_in, None, inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def _trainer_class(name: str) -> Any:
    # Importing TRL takes seconds, so nobody else pays for it.
    if name == "GRPOTrainer":
        from trl.trainer.grpo_trainer import GRPOTrainer

        return GRPOTrainer
    import warnings

    from trl.import_utils import TRLExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TRLExperimentalWarning)
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
    return GMPOTrainer
