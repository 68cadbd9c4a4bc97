"""Any loss of `tether.losses` in TRL's GRPO trainer: the rivals of TROLL, trained on the same work.

TRL generates, scores, batches and logs as always; the chosen loss takes the place of its surrogate, averaged
over tokens and sequences as TRL's `loss_type` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tether.errors import ConfigError, warn
from tether.integrations.loss_options import check_loss_options, given_to
from tether.integrations.trl_evaluation import Evaluation
from tether.integrations.trl_old_policy import loss_mask, old_support, weighted_advantages
from tether.integrations.trl_one_pass import obstacle_of_loss
from tether.integrations.trl_trainer import AVERAGES, ObjectiveTrainer
from tether.losses import PolicyLoss, ProjectedTokens, find_loss
from tether.losses.linear import REACH, Reach

# Far apart, so that neighbouring seeds of a run never share a step's random numbers.
_SEED_STRIDE = 1_000_003
_OF_COVARIANCES = ("clip_cov", "kl_cov")


class PolicyLossTrainer(ObjectiveTrainer):
    """`GRPOTrainer` with a loss of `tether.losses.LOSSES` in place of the clip.

    Takes the arguments of `GRPOTrainer` and two keywords:

        policy_loss: a name of `tether.losses.LOSSES` other than "troll", whose trainer is `TROLLTrainer`; or
            where your own is, "package.module:function" (docs/own_loss.md).
        loss_options: its settings, such as {"clip_ratio_high": 0.28}; see
            `tether.integrations.loss_options.loss_options`.

    `args` is TRL's `GRPOConfig`. Its `loss_type` (grpo, bnpo, dr_grpo, dapo or luspo) chooses the
    average alone, which is therefore the same for every method. Where vLLM samples, TRL's correction of
    its log-probabilities weighs each advantage, and so each token's loss as in TRL. `beta`, the entropy
    bonus, LoRA, gradient accumulation and checkpointing work as in `GRPOTrainer`; what would change TRL's
    own surrogate is refused.

    Logs what the loss measures as `trust_region/clipped`, `ratio_mean`, `ratio_max` and so on, and
    like all trainers here `trust_region/kl_mean` and `kl_max`, of KL(new || old).

    Raises:
        ConfigError: an unknown loss or option, or a setting of TRL that would be without effect.

    Source: each loss names its paper.

    Example:
        ```python
        from trl import GRPOConfig

        from tether.integrations.trl_losses import PolicyLossTrainer

        trainer = PolicyLossTrainer(
            model="Qwen/Qwen3-0.6B",
            reward_funcs=reward,
            args=GRPOConfig(output_dir="out", steps_per_generation=8),
            train_dataset=dataset,
            policy_loss="dppo",
            loss_options={"divergence": "top-k-kl"},
        )
        trainer.train()
        ```
    """

    _learns_without_old_policy = True

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *rest: Any,
        policy_loss: str,
        loss_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if policy_loss == "troll":
            raise ConfigError("TROLL has a trainer of its own: tether.integrations.trl.TROLLTrainer.")
        self.policy_loss = policy_loss
        self.loss_options = dict(loss_options or {})
        check_loss_options(policy_loss, self.loss_options)
        if args is not None:
            _check_settings(args)
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        if policy_loss in _OF_COVARIANCES and self.args.per_device_train_batch_size == 1:
            warn(
                f"per_device_train_batch_size=1: {policy_loss} compares the tokens of a micro-batch, and "
                "those of one sequence have one advantage, so that all covariances are 0 and it does nothing "
                "that it is for (unless a critic gives each token its own). Use larger micro-batches."
            )
        if self.anchor == "trainer" and "lag" in given_to(policy_loss, self.loss_options):
            self._check_whole_updates()  # or nobody could say how old a batch is

    def _obstacle(self) -> str | None:
        return obstacle_of_loss(self.policy_loss, self.loss_options)

    @property
    def _depends_on(self) -> Reach:
        return REACH[self.policy_loss]

    def _objective(
        self, tokens: ProjectedTokens, evaluation: Evaluation | None, inputs: dict[str, Any]
    ) -> PolicyLoss:
        available: dict[str, Callable[[], Any]] = {
            "response_ids": lambda: inputs["completion_ids"],
            "new": lambda: evaluation and evaluation.support,
            "old": lambda: old_support(inputs),
            "lag": lambda: self._lag(inputs) if self.anchor == "sampler" else self._updates_since_scoring(),
            "proximal_log_probs": lambda: None,
            "generator": self._generator,
        }
        given = {name: available[name]() for name in given_to(self.policy_loss, self.loss_options)}
        result = find_loss(self.policy_loss)(
            tokens.new_log_probs,
            inputs["old_per_token_logps"],
            weighted_advantages(inputs),
            loss_mask(inputs),
            **self.loss_options,
            **given,
            **self._averaging(),
        )
        return PolicyLoss(result.loss * self._share(inputs), result.metrics)

    def _updates_since_scoring(self) -> int:
        """Of the batch that is in use; one policy scored all of its completions."""
        return int(self.state.global_step % self._updates_a_rollout)

    def _generator(self) -> torch.Generator:
        """Random numbers of this micro-batch alone, the same after a resume."""
        micro_batch = self.state.global_step * self.args.gradient_accumulation_steps
        micro_batch += self._step % self.args.gradient_accumulation_steps
        return torch.Generator().manual_seed(self.args.seed * _SEED_STRIDE + micro_batch)


def _check_settings(args: Any) -> None:
    """Refuse what acts on TRL's own surrogate and would silently do nothing."""
    if args.loss_type not in AVERAGES:
        raise ConfigError(
            f"loss_type={args.loss_type!r} is a policy loss of TRL's. PolicyLossTrainer has its own, and "
            f"reads from loss_type how to average: one of {', '.join(AVERAGES)}."
        )
    if args.importance_sampling_level != "token":
        raise ConfigError(
            f"importance_sampling_level={args.importance_sampling_level!r} belongs to TRL's clip. Losses of "
            'sequences are methods of their own: choose policy_loss="gspo", or leave it at "token".'
        )
    if args.epsilon != 0.2 or args.epsilon_high is not None or args.delta is not None:
        raise ConfigError(
            f"epsilon={args.epsilon}, epsilon_high={args.epsilon_high} and delta={args.delta} belong to "
            "TRL's clip. "
            'Use loss_options, such as {"clip_ratio_high": 0.28} of policy_loss="ppo_clip".'
        )
    without_effect = {
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
    }
    for name, chosen in without_effect.items():
        if chosen:
            raise ConfigError(
                f"{name}={getattr(args, name)} reshapes TRL's own surrogate, which PolicyLossTrainer "
                "replaces. Leave it off."
            )
