"""TROLL for TRL's asynchronous GRPO: the region is around the policy that sampled, however old that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# First, because they say what to install where TRL is missing or another version.
from tether.integrations import trl_async_seam  # noqa: F401
from tether.integrations.trl_config import (
    RegionFields,
    check_kept_ids,
    check_penalties,
    check_sampler_tolerance,
    lag_bound,
    sampler_tolerance_field,
    warn_of_reshaped_sampling,
)

# isort: split
import torch
from torch import Tensor
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

from tether.errors import ConfigError, InvalidInputError
from tether.integrations.trl_async_base import PackedPass, RecordedTrainer, truncates
from tether.integrations.trl_card import PAPER
from tether.losses import troll_objective
from tether.settings import TROLLSettings

__all__ = ["AsyncClipTrainer", "AsyncTROLLConfig", "AsyncTROLLTrainer"]


@dataclass
class AsyncTROLLConfig(RegionFields, AsyncGRPOConfig):
    """`AsyncGRPOConfig` with the settings of the projection around the sampler.

    Raises:
        ConfigError: a value out of range, or one that belongs to the clip, with the remedy.
    """

    troll_sampler_tolerance: float | None = sampler_tolerance_field()

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        try:
            TROLLSettings(self.troll_kl_bound, self.troll_alpha, self.troll_top_k, region=self.troll_region)
        except InvalidInputError as error:
            raise ConfigError(f"troll_{error}") from error
        lag_bound(self)
        check_sampler_tolerance(self.troll_sampler_tolerance)
        if self.epsilon != 0.2 or self.epsilon_high is not None:
            raise ConfigError(
                f"epsilon={self.epsilon} and epsilon_high={self.epsilon_high} belong to the clip, which "
                "TROLL replaces. Leave them at their defaults and set troll_kl_bound."
            )
        check_kept_ids(self, self.troll_top_k)
        check_penalties(self, self.troll_sampler_tolerance)
        warn_of_reshaped_sampling(self, "sampler")

    @property
    def truncates(self) -> bool:
        """Whether sampling keeps a set of ids."""
        return truncates(self)


class AsyncTROLLTrainer(RecordedTrainer):
    """`AsyncGRPOTrainer` whose trust region is the projection around the policy that really sampled.

    Takes the arguments of `AsyncGRPOTrainer`, with `args` an `AsyncTROLLConfig`. TRL's rollout worker asks
    the vLLM server for the `troll_top_k` likeliest ids of each token; the server needs ``vllm serve
    --logprobs-mode processed_logprobs --max-logprobs -1``. A rollout worker of one's own puts
    `tether.integrations.trl_async_records.SamplerRecords` in the place of its samples' ``old_log_probs``.
    Staleness limit, tools, several turns, resuming and weight transfers are TRL's. Besides, prompts may be
    plain text, `model` one that is loaded already, and on a CPU attention over packed rows is computed in
    plain torch. After each transfer the server is asked for a few tokens, which tells whether it has the
    weights.

    Logs what `TROLLTrainer` does with ``troll_anchor="sampler"``, `trust_region/lag` among them: in
    optimizer steps, of the weights that were published when a prompt's group began, so an upper bound for
    sequences that went on over a transfer. TRL's `clip_ratio/*` stay at zero.

    Source: TROLL (arXiv 2510.03817), around the behaviour policy.

    Raises:
        ConfigError: other settings than an `AsyncTROLLConfig`.
        EngineError: (from `train`) a server or a rollout worker that has ended or does not answer.
        StaleSamplerError: (from `train`) a server without the weights it was given.

    Example:
        ```python
        from tether.integrations.trl_async import AsyncTROLLConfig, AsyncTROLLTrainer

        trainer = AsyncTROLLTrainer(
            model="Qwen/Qwen3-0.6B",
            reward_funcs=reward,
            args=AsyncTROLLConfig(output_dir="out", troll_lag_growth="linear", troll_lag_rate=0.25),
            train_dataset=dataset,
        )
        trainer.train()
        ```
    """

    _tag_names = ["trl", "async-grpo", "troll"]  # noqa: RUF012 (TRL's class attribute)
    _name = "AsyncTROLL"
    _paper = PAPER

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        if not isinstance(args, AsyncTROLLConfig):
            raise ConfigError(
                f"AsyncTROLLTrainer needs args=AsyncTROLLConfig(output_dir=...), got {type(args).__name__}. "
                "It takes every argument of AsyncGRPOConfig."
            )
        super().__init__(
            model, reward_funcs, args, *rest,
            support_top_k=args.troll_top_k, sampler_tolerance=args.troll_sampler_tolerance, **kwargs,
        )  # fmt: skip

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """TROLL's objective of a packed row; TRL's own loss is taken of nothing, for its metrics."""
        packed = PackedPass(model, inputs)
        AsyncGRPOTrainer.compute_loss(self, packed, packed.without_advantages(inputs))
        loss = self._troll(packed, inputs)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * packed.output.aux_loss
        return loss / self.current_gradient_accumulation_steps

    def _troll(self, packed: PackedPass, inputs: dict[str, Any]) -> Tensor:
        """The objective's part of an update, averaged over tokens as TRL does."""
        bound = lag_bound(self.args)
        tokens, rows, lag, mask = packed.projected(
            inputs, int(self.state.global_step), region=self.args.troll_region,
            kl_bound=bound.kl_bound if bound.growth == "constant" else bound,
        )  # fmt: skip
        advantages = rows.spread(inputs["advantages"][packed.chosen], 0.0)
        objective = troll_objective(tokens, advantages, mask, alpha=self.args.troll_alpha)
        self._log_tokens(tokens, objective.metrics, lag, mask)
        share = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1.0)
        return torch.where(mask > 0, objective.token_loss, 0.0).sum() / share


class AsyncClipTrainer(RecordedTrainer):
    """`AsyncGRPOTrainer` with its own loss, the clip, to compare with; how far the policy moves is measured.

    Takes the arguments of `AsyncGRPOTrainer`, of which `args` is a plain `AsyncGRPOConfig`, and those of
    `RecordedTrainer`. Where sampling is truncated, ratios are those of the network renormalised on what it
    keeps.
    """

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """TRL's loss of a packed row."""
        packed = PackedPass(model, inputs, differentiable=True)
        loss: Tensor = AsyncGRPOTrainer.compute_loss(self, packed, packed.numbered(inputs))
        with torch.no_grad():
            tokens, _, lag, mask = packed.projected(inputs, int(self.state.global_step), kl_bound=math.inf)
            self._log_tokens(tokens, tokens.metrics(mask), lag, mask)
        return loss
