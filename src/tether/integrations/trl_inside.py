"""Keeping the network itself near the old policy, not only what the loss sees of it.

TROLL bounds the projected policy exactly and pulls the network towards it with a fixed weight; over many
updates on one batch the network drifts far beyond the bound all the same. Three remedies, each optional:

- stop a batch's updates once the network has moved further than a KL budget;
- raise the weight of the pull while the network is outside and lower it when it is inside (dual ascent);
- leave the last updates of each batch to the pull alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.errors import CheckpointError, ConfigError
from tether.experiments.files import atomic_write_json, load_json
from tether.integrations.trl import OldPolicyTrainer, TROLLTrainer
from tether.integrations.trl_old_policy import IDS
from tether.integrations.trl_trainer import loss_mask
from tether.losses import ProjectedTokens

_STATE_FILE = "inside.json"


@dataclass(frozen=True)
class InsideOptions:
    """How the network is kept near the old policy."""

    kl_stop: float | None = None
    """Mean KL(new || old) of an update's tokens, in nats, above which it and the rest of its batch's are
    skipped."""
    alpha_tolerance: float | None = None
    """TROLL: adapt alpha so that the mean excess of KL over the bound is this share of the bound."""
    alpha_rate: float = 0.1
    """TROLL: by how much, in log space, alpha moves in one update at most."""
    alpha_max: float = 1e3
    """TROLL: the largest alpha."""
    regression_updates: int = 0
    """TROLL: the last so many updates of each batch make the pull alone, without a policy gradient."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("kl_stop", "alpha_tolerance", "alpha_rate", "alpha_max"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be a positive number, got {value!r}.")
        if self.regression_updates < 0:
            raise ConfigError(f"regression_updates must not be negative, got {self.regression_updates}.")


class InsideTrainer(OldPolicyTrainer):
    """A trainer that keeps the network near the old policy; put it before another trainer's class.

    Args besides those of `GRPOTrainer`:

        inside: how.

    `kl_stop` works with every trust region, the others with `TROLLTrainer`. It reads
    `trust_region/kl_mean`, which holds lower bounds for tokens compared on their likeliest ids alone (TROLL's
    certified ones, all of a rival's): it never stops too early, and late by what moved among the other ids.
    An update that is skipped leaves the weights and the optimizer's moments as they are. Logs
    `trust_region/stopped` (1 where an update was skipped) and `trust_region/alpha`; a checkpoint holds the
    alpha it had come to, and whether the rest of its batch is skipped.

    Raises:
        ConfigError: alpha or regression without TROLL, no update left to the policy gradient, updates that
            span batches, or kl_stop under DeepSpeed.
        CheckpointError: a checkpoint without an alpha to go on with.

    Source: early stopping as in PPO's implementation of OpenAI Spinning Up; alpha as the multiplier of the
    constraint KL(new || old) <= bound, by multiplicative dual ascent (as PPO's adaptive penalty, arXiv
    1707.06347, section 4). For TROLL neither is in the paper.

    Example:
        ```python
        class StoppedTROLL(InsideTrainer, TROLLTrainer):
            pass

        trainer = StoppedTROLL(model, reward, args, train_dataset=dataset, inside=InsideOptions(kl_stop=0.02))
        ```
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *rest: Any,
        inside: InsideOptions | None = None,
        **kwargs: Any,
    ) -> None:
        self.inside = inside or InsideOptions()
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        self._check_inside()
        self._stopped = False
        #: Sums over the micro-batches of an update: KL, excess over the bound, tokens.
        self._moved = torch.zeros(3, device=self.accelerator.device)

    def _check_inside(self) -> None:
        of_troll = self.inside.alpha_tolerance is not None or self.inside.regression_updates > 0
        if of_troll and not isinstance(self, TROLLTrainer):
            raise ConfigError(
                "alpha_tolerance and regression_updates act on TROLL's regression, which this trainer does "
                "not have. Use kl_stop, or trust_region='troll'."
            )
        if self.inside.kl_stop is not None and self.is_deepspeed_enabled:
            raise ConfigError(
                f"kl_stop={self.inside.kl_stop} withholds an update after its last backward pass, and "
                "DeepSpeed has made it by then. Train with DDP or FSDP, or without kl_stop."
            )
        together = self.args.gradient_accumulation_steps
        if self._micro_batches % together:
            raise ConfigError(
                f"A batch of rollouts has steps_per_generation x num_iterations = {self._micro_batches} "
                f"micro-batches, no multiple of gradient_accumulation_steps={together}: an update would "
                "learn from two batches. Make it a multiple."
            )
        if self.inside.regression_updates >= self._updates_a_batch:
            raise ConfigError(
                f"regression_updates={self.inside.regression_updates} leaves none of the "
                f"{self._updates_a_batch} updates of a batch to the policy gradient."
            )

    @property
    def _micro_batches(self) -> int:
        """Of a batch of rollouts, over all its uses."""
        return int(self.args.steps_per_generation * self.num_iterations)

    @property
    def _updates_a_batch(self) -> int:
        return self._micro_batches // int(self.args.gradient_accumulation_steps)

    @property
    def _update_in_batch(self) -> int:
        """Which of its batch's updates the present one is, from 0."""
        return int(self.state.global_step % self._updates_a_batch)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.model.training:
            self._stopped = False
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        first_regression = self._updates_a_batch - self.inside.regression_updates
        if self.model.training and IDS in inputs and self._update_in_batch >= first_regression:
            inputs = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        return super()._compute_loss(model, inputs)

    def _log_tokens(
        self, tokens: ProjectedTokens, of_objective: Mapping[str, Tensor], inputs: dict[str, Any]
    ) -> None:
        if self.model.training:
            mask = loss_mask(inputs) > 0
            kl = torch.where(mask, tokens.kl, 0.0)
            bound = getattr(self.args, "troll_kl_bound", math.inf)
            excess = torch.where(mask, (tokens.kl - bound).clamp(min=0), 0.0)
            self._moved += torch.stack([kl.sum(), excess.sum(), mask.sum()]).to(self._moved)
        super()._log_tokens(tokens, of_objective, inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As TRL's; after an update's last micro-batch, decide on the update and on the next alpha."""
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            kl, excess, count = self.accelerator.reduce(self._moved, reduction="sum").tolist()
            self._moved.zero_()
            if count > 0:
                self._maybe_stop(kl / count)
                self._adapt_alpha(excess / count)
        return loss

    def _maybe_stop(self, kl: float) -> None:
        if self.inside.kl_stop is None:
            return
        self._stopped = self._stopped or kl > self.inside.kl_stop
        self._metrics["train"]["trust_region/stopped"].append(float(self._stopped))
        if self._stopped:
            # None, not zeros: Adam then skips the parameters instead of moving them by its momentum.
            for parameter in self.model.parameters():
                parameter.grad = None

    def _adapt_alpha(self, excess: float) -> None:
        tolerance = self.inside.alpha_tolerance
        if tolerance is None:
            return
        bound, rate = self.args.troll_kl_bound, self.inside.alpha_rate
        # From -1 (nothing outside) to 1 (twice the tolerance outside, or more).
        violation = min(excess / (tolerance * bound) - 1, 1.0)
        alpha = self.args.troll_alpha * math.exp(rate * violation)
        self.args.troll_alpha = min(max(alpha, 1 / self.inside.alpha_max), self.inside.alpha_max)
        self._metrics["train"]["trust_region/alpha"].append(self.args.troll_alpha)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        state: dict[str, Any] = {}
        if self.inside.alpha_tolerance is not None:
            state["alpha"] = self.args.troll_alpha
        if self.inside.kl_stop is not None:
            state["stopped"] = self._stopped
        if state and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            atomic_write_json(folder / _STATE_FILE, state)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint) / _STATE_FILE
        state = load_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
        # Matters inside a batch alone: the next one begins anew.
        self._stopped = self.inside.kl_stop is not None and bool(state.get("stopped", False))
        if self.inside.alpha_tolerance is None:
            return
        if "alpha" not in state:
            raise CheckpointError(
                f"The checkpoint {checkpoint} has no alpha in {_STATE_FILE}: it was written without "
                "alpha_tolerance. Continue from one that was, or begin a new run."
            )
        self.args.troll_alpha = float(state["alpha"])
