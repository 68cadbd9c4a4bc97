"""Whether a loss in TRL is computed where the logits are, in one pass over the head, and if not, why."""

from __future__ import annotations

import logging
import math
from typing import Any

from tether.integrations.loss_options import GIVEN, given_to
from tether.integrations.one_pass_head import LossOfTokens, say_once
from tether.losses.linear import REACH

_log = logging.getLogger(__name__)


def loss_in_forward(trainer: Any, inputs: dict[str, Any]) -> LossOfTokens | None:
    """The objective of an `ObjectiveTrainer` for the model's forward; None where it is computed afterwards.

    The reason is logged once a trainer, at level INFO. Evaluations need no gradient, and no reason.
    """
    if not trainer.model.training:
        return None
    reason = _obstacle(trainer, inputs) or trainer._obstacle()
    say_once(trainer, _log, reason)
    if reason is not None:
        return None
    return LossOfTokens(
        objective=lambda tokens: trainer._objective(tokens, None, inputs),
        depends_on=trainer._depends_on,
        old=trainer._compared_with(inputs),
        old_log_probs=inputs["old_per_token_logps"],
        kl_bound=trainer.args.troll_kl_bound if trainer._bounded else math.inf,
    )


def _obstacle(trainer: Any, inputs: dict[str, Any]) -> str | None:
    """What of a trainer's settings needs log-probabilities with their gradient, or those of all tokens."""
    if "old_per_token_logps" not in inputs:
        return "every batch of rollouts serves one update, so the policy is its own old policy"
    if trainer.beta != 0.0:
        return f"beta={trainer.beta} adds TRL's own penalty on the reference policy"
    if trainer._entropy_bonus_enabled:
        return "TRL adds its own entropy bonus"
    if trainer.top_entropy_quantile < 1.0:
        return f"top_entropy_quantile={trainer.top_entropy_quantile} compares the entropies of all tokens"
    if trainer.anchor == "sampler":
        return 'anchor="sampler" renormalises the network on what its sampler could sample'
    if trainer.accelerator.mixed_precision == "fp16":
        return "fp16 scales a loss up before its gradient is rounded"
    if trainer.args.torch_compile:
        return "torch_compile traces the forward, and the gradient of a loss inside it is not traced"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed scales a loss, and gathers a head around its backward pass"
    return None


def obstacle_of_region(settings: Any) -> str | None:
    """The same of TROLL's own settings."""
    if settings.troll_support == "paper":
        return 'troll_support="paper" compares the most likely ids of both policies'
    if settings.troll_region == "sequence":
        return 'troll_region="sequence" projects the tokens of a sequence by one step'
    return None


def obstacle_of_loss(name: str, options: dict[str, Any]) -> str | None:
    """The same of a rival's rule."""
    if name not in REACH:
        return f"{name} is not known to depend on sampled tokens and their sequences alone"
    given = given_to(name, options) & (GIVEN - {"response_ids", "lag", "proximal_log_probs"})
    return f"{name} asks for {', '.join(sorted(given))}" if given else None
