"""TROLL as a drop-in for TRL's GRPO: `TROLLConfig` for `GRPOConfig`, `TROLLTrainer` for `GRPOTrainer`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from tether.errors import ConfigError

# First, because it says what to install where TRL is missing or another version.
from tether.integrations.trl_config import TROLLConfig, lag_bound
from tether.losses import PolicyLoss, ProjectedTokens, aggregate, project_tokens, troll_objective
from tether.losses.linear import Reach
from tether.projection import SparseLogProbs

# isort: split
from tether.integrations.exact_head import OldTokens
from tether.integrations.trl_card import PAPER, name_tether
from tether.integrations.trl_evaluation import Evaluation
from tether.integrations.trl_old_policy import HIDDEN, old_support
from tether.integrations.trl_one_pass import obstacle_of_region
from tether.integrations.trl_trainer import ObjectiveTrainer, OldPolicyTrainer, loss_mask

__all__ = ["OldPolicyTrainer", "TROLLConfig", "TROLLTrainer"]


class TROLLTrainer(ObjectiveTrainer):
    """`GRPOTrainer` whose trust region is the differentiable KL projection instead of the clip.

    Takes the arguments of `GRPOTrainer`, with `args` a `TROLLConfig`. GRPO, Dr.GRPO, DAPO, BNPO and
    GSPO (`importance_sampling_level="sequence"`) settings, LoRA, gradient checkpointing, bf16,
    gradient accumulation and DDP work as they do there. A penalty on the reference policy (`beta`)
    is computed from the network's own log-probabilities and ratios, not the projected ones. The
    regression acts on every token, also where `top_entropy_quantile` leaves out the policy gradient.

    Logs `trust_region/kl_mean` and `kl_max` (nats, before the projection; of certified tokens a lower
    bound), `kl_projected_mean` and `kl_projected_max` (after it), the fractions `projected`, `certified` and
    `uncertain`, `mean_step`, `regression`, `tail_mass` and `old_policy_bytes` (a token);
    docs/trust_region_modes.md defines them. TRL's `clip_ratio/*` stay at zero: `projected` takes their place.
    docs/trl.md has what differs from `GRPOTrainer` and what works with it.

    Source: TROLL (arXiv 2510.03817).

    Example:
        ```python
        from tether import TROLLConfig, TROLLTrainer

        trainer = TROLLTrainer(
            model="Qwen/Qwen3-0.6B",
            reward_funcs=reward,
            args=TROLLConfig(output_dir="out", troll_kl_bound=0.05),
            train_dataset=dataset,
        )
        trainer.train()
        ```
    """

    _tag_names = ["trl", "grpo", "troll"]  # noqa: RUF012 (TRL's class attribute)
    _name = "TROLL"
    _paper = PAPER
    _config_class = TROLLConfig
    _reads_troll_settings = True

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        args = self._settings(model, args)
        if not isinstance(args, TROLLConfig):
            raise ConfigError(
                f"TROLLTrainer needs args=TROLLConfig(output_dir=...), got {type(args).__name__}. "
                "TROLLConfig takes every argument of GRPOConfig."
            )
        self.keep_hidden = args.troll_support == "exact"
        super().__init__(
            model, reward_funcs, args, *rest, support_top_k=args.troll_top_k, support_mass=args.troll_mass,
            pack_sequences="shared" if args.troll_share_prefixes else args.troll_pack_sequences,
            anchor=args.troll_anchor,
            sampler_weight=args.troll_sampler_weight, sampler_tolerance=args.troll_sampler_tolerance,
            **kwargs,
        )  # fmt: skip

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, which cites TROLL, and Tether's version."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            name_tether(Path(self.args.output_dir) / "README.md")

    def _evaluation_keywords(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if self.args.troll_support == "paper":  # which compares the union of both policies' own ids
            return self._own_support
        if self.args.troll_support == "bucket":
            return super()._evaluation_keywords(inputs)
        return {"old_tokens": self._old_tokens(inputs)}

    def _old_tokens(self, inputs: dict[str, Any]) -> OldTokens:
        return OldTokens(
            hidden=inputs[HIDDEN],
            support=old_support(inputs),
            mask=loss_mask(inputs),
            # In evaluation the policy is its own old policy, and so is its head.
            head=self._old_head if self.model.training else None,
            kl_bound=self.args.troll_kl_bound,
            region=self.args.troll_region,
        )

    def _compared_with(self, inputs: dict[str, Any]) -> OldTokens | SparseLogProbs:
        return self._old_tokens(inputs) if self.args.troll_support == "exact" else old_support(inputs)

    def _obstacle(self) -> str | None:
        return obstacle_of_region(self.args)

    @property
    def _depends_on(self) -> Reach:
        return self.importance_sampling_level

    @property
    def _bounded(self) -> bool:
        return math.isfinite(self.args.troll_kl_bound)

    def _project(self, evaluation: Evaluation, inputs: dict[str, Any]) -> ProjectedTokens:
        mask, settings = loss_mask(inputs), self.args
        if settings.troll_support == "exact":
            return evaluation.projected(inputs["old_per_token_logps"], mask, bounded=self._bounded)
        return project_tokens(
            evaluation.support, old_support(inputs), inputs["completion_ids"], mask,
            log_probs=evaluation.log_probs, old_log_probs=inputs["old_per_token_logps"],
            kl_bound=self._bound(inputs), region=settings.troll_region,
            support="paper" if settings.troll_support == "paper" else "bucket",
        )  # fmt: skip

    def _bound(self, inputs: dict[str, Any]) -> float | Tensor:
        """One for all, or one for each sequence, [B, 1], by how old its sampler is."""
        bound = lag_bound(self.args)
        return bound.kl_bound if bound.growth == "constant" else bound.at(self._lag(inputs))[:, None]

    def _objective(
        self, tokens: ProjectedTokens, evaluation: Evaluation | None, inputs: dict[str, Any]
    ) -> PolicyLoss:
        mask = loss_mask(inputs)
        objective = troll_objective(
            tokens, inputs["advantages"], mask,
            alpha=self.args.troll_alpha, ratio_level=self.importance_sampling_level,
            policy_weights=self._policy_weights(evaluation, inputs),
        )  # fmt: skip
        loss = aggregate(objective.token_loss, mask, **self._averaging())
        return PolicyLoss(loss * self._share(inputs), objective.metrics)

    def _policy_weights(self, evaluation: Evaluation | None, inputs: dict[str, Any]) -> Tensor | None:
        """Which tokens' policy gradients count how much, [B, T]: as TRL weighs them."""
        weights = inputs.get("importance_sampling_ratio")
        if self.top_entropy_quantile < 1.0:
            assert evaluation is not None
            quantile = 1 - self.top_entropy_quantile
            chosen = self.get_high_entropy_mask(evaluation.entropies, loss_mask(inputs), quantile)
            weights = chosen.float() if weights is None else weights * chosen
        return weights
