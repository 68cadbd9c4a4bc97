"""Any loss of `tether.losses` in TRL's GRPO trainer: the rivals of TROLL, trained on the same work.

TRL generates, scores, batches and logs as always. Its own surrogate is made to vanish (advantages of
zero at a ratio of one) and the chosen loss is added in its place, averaged over tokens and sequences
as TRL's `loss_type` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tether.errors import ConfigError
from tether.integrations.loss_options import check_loss_options, looks_at_distributions
from tether.integrations.trl import (
    OldPolicyTrainer,
    _loss_mask,
    _weighted_mean,
)
from tether.integrations.trl_old_policy import IDS, LOG_PROBS, LOG_TAIL, old_support
from tether.losses import LOSSES, LossAggMode, PolicyLoss, ProjectedTokens
from tether.projection import SparseLogProbs

# How each of TRL's loss types averages.
_AVERAGES: dict[str, LossAggMode] = {
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "grpo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
}

# Measured for every trainer, always as KL(new || old); a loss may mean another divergence by the name.
_MEASURED_ALREADY = ("kl_mean", "kl_max")

# Far apart, so that neighbouring seeds of a run never share a step's random numbers.
_SEED_STRIDE = 1_000_003


class PolicyLossTrainer(OldPolicyTrainer):
    """`GRPOTrainer` with a loss of `tether.losses.LOSSES` in place of the clip.

    Takes the arguments of `GRPOTrainer` and two keywords:

        policy_loss: a name of `LOSSES` other than "troll", whose trainer is `TROLLTrainer`.
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
        self._result: PolicyLoss | None = None
        self._penalty: Tensor | None = None
        self._beta = self.beta

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if "rollout_row" not in output and self.model.training:
            # Without an old policy nobody numbered them; a report wants to name the problem all the same.
            output["rollout_row"] = torch.arange(len(inputs), device=output["completion_ids"].device)
            self.rollout_rows = list(inputs)
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # Where each batch serves one update TRL records no old policy: it is the present one (`_constrain`).
        inputs = inputs if IDS in inputs else {**inputs, IDS: None}
        # TRL would correct the reference penalty by the ratio that it gets to see, which is one.
        self._beta, self.beta = self.beta, 0.0
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta = self._beta
            self._result = self._penalty = None

    def _evaluation_keywords(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if inputs[IDS] is None:
            return {"support_top_k": self.support_top_k, "support_mass": self.support_mass}
        return super()._evaluation_keywords(inputs)

    def _constrain(self, log_probs: Tensor, new: SparseLogProbs, inputs: dict[str, Any]) -> Tensor:
        if inputs[IDS] is None:
            inputs["old_per_token_logps"] = log_probs.detach()
            inputs[IDS], inputs[LOG_PROBS] = new.ids.int(), new.log_probs.detach()
            inputs[LOG_TAIL] = new.log_tail.detach()
        super()._constrain(log_probs, new, inputs)
        self._result = self._policy_loss(log_probs, new, inputs)
        self._penalty = self._reference_penalty(log_probs, inputs) if self._beta != 0.0 else None
        # TRL's surrogate of these is zero, with zero gradient, whatever the policies are.
        inputs["advantages"] = torch.zeros_like(inputs["advantages"])
        inputs["old_per_token_logps"] = log_probs.detach()
        return log_probs

    def _policy_loss(self, log_probs: Tensor, new: SparseLogProbs, inputs: dict[str, Any]) -> PolicyLoss:
        given: dict[str, Any] = {}
        if looks_at_distributions(self.policy_loss, self.loss_options):
            given = {"new": new, "old": old_support(inputs)}
        if self.policy_loss == "clip_cov":
            given["generator"] = self._generator()
        return LOSSES[self.policy_loss](
            log_probs,
            inputs["old_per_token_logps"],
            _weighted_advantages(inputs),
            _loss_mask(inputs),
            **self.loss_options,
            **given,
            loss_agg_mode=_AVERAGES[self.loss_type],
            max_response_length=self.max_completion_length,
        )

    def _generator(self) -> torch.Generator:
        """Random numbers of this micro-batch alone, the same after a resume."""
        micro_batch = self.state.global_step * self.args.gradient_accumulation_steps
        micro_batch += self._step % self.args.gradient_accumulation_steps
        return torch.Generator().manual_seed(self.args.seed * _SEED_STRIDE + micro_batch)

    def _extra_loss(self, tokens: ProjectedTokens, inputs: dict[str, Any]) -> Tensor | float:
        assert self._result is not None
        self._log_result(self._result, inputs)
        loss = self._result.loss * self._scale(inputs)
        if self._penalty is not None:
            loss = loss + self._beta * self._aggregate(self._penalty, inputs)
        return loss

    def _reference_penalty(self, log_probs: Tensor, inputs: dict[str, Any]) -> Tensor:
        """TRL's estimate (k3) of KL(new || reference) for each token, [B, T]; logged as `kl`."""
        difference = inputs["ref_per_token_logps"] - log_probs
        penalty = difference.exp() - difference - 1
        if self.args.use_bias_correction_kl:  # the tokens are the old policy's, the divergence the new one's
            penalty = penalty * (log_probs - inputs["old_per_token_logps"]).exp()
        mask = _loss_mask(inputs)
        totals = torch.stack([(penalty.detach() * mask).sum(), mask.sum().to(penalty.dtype)])
        total, count = self.accelerator.reduce(totals, reduction="sum").tolist()
        self._metrics["train" if self.model.training else "eval"]["kl"].append(total / max(count, 1.0))
        return penalty

    def _scale(self, inputs: dict[str, Any]) -> Tensor | float:
        """From the average over a micro-batch to its share in an update, as TRL weighs it."""
        training = self.model.training
        accumulation = self.current_gradient_accumulation_steps if training else 1.0
        if self.loss_type != "dapo":
            return 1.0 / accumulation
        # TRL divides by the tokens of a mean update of this batch of rollouts, not of this one.
        items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if training:
            items = items * accumulation / self.args.steps_per_generation
        return _loss_mask(inputs).sum().clamp(min=1.0) / items

    def _log_result(self, result: PolicyLoss, inputs: dict[str, Any]) -> None:
        metrics = {name: value for name, value in result.metrics.items() if name not in _MEASURED_ALREADY}
        row = torch.stack([_loss_mask(inputs).sum(), *metrics.values()]).float()
        counts, *columns = self.accelerator.gather(row[None]).t().tolist()
        mode = "train" if self.model.training else "eval"
        for name, values in zip(metrics, columns, strict=True):
            combined = max(values) if name.endswith("_max") else _weighted_mean(values, counts)
            self._metrics[mode][f"trust_region/{name}"].append(combined)


def _weighted_advantages(inputs: dict[str, Any]) -> Tensor:
    """[B] or [B, T]; weighed by how much likelier the trainer finds a token than the sampler did."""
    advantages: Tensor = inputs["advantages"]
    ratio = inputs.get("importance_sampling_ratio")
    if ratio is None:
        return advantages
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    return advantages * ratio


def _check_settings(args: Any) -> None:
    """Refuse what acts on TRL's own surrogate and would silently do nothing."""
    if args.loss_type not in _AVERAGES:
        raise ConfigError(
            f"loss_type={args.loss_type!r} is a policy loss of TRL's. PolicyLossTrainer has its own, and "
            f"reads from loss_type how to average: one of {', '.join(_AVERAGES)}."
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
