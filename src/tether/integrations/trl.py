"""TROLL as a drop-in for TRL's GRPO: `TROLLConfig` for `GRPOConfig`, `TROLLTrainer` for `GRPOTrainer`.

What happens in a step:

1. Generation is TRL's. When TRL scores the fresh completions with the policy that made them, the
   most likely ids of every token are kept beside the sampled token's log-probability.
2. In each update, the current policy is evaluated at those ids, projected, and the sampled token's
   projected log-probability is handed to TRL's own loss with the clip switched off. TRL computes
   ratios, advantages, aggregation, masks and metrics as always.
3. The regression towards the projection is added under the same aggregation.

Four methods of `GRPOTrainer` are overridden, each around a call of the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.errors import ConfigError, TetherError

# First, because it says what to install where TRL is missing or another version.
from tether.integrations.trl_config import TROLLConfig
from tether.losses import ProjectedTokens, project_tokens
from tether.projection import SparseLogProbs

# isort: split
from accelerate.utils import is_peft_model
from trl.trainer.utils import maybe_gather_lm_head_ctx

from tether.integrations.exact_head import HeadSnapshot, OldTokens, take_snapshot
from tether.integrations.packing import add_packing
from tether.integrations.sparse_head import add_sparse_head
from tether.integrations.trl_card import PAPER, name_tether
from tether.integrations.trl_old_policy import (
    HIDDEN,
    IDS,
    Recorded,
    Tap,
    bytes_a_token,
    old_support,
    pack,
    unpack,
)
from tether.integrations.trl_resume import ResumableTrainer
from tether.integrations.trl_warnings import warn_of_settings


class OldPolicyTrainer(ResumableTrainer):
    """`GRPOTrainer` that also knows the old policy's token distributions, not just sampled tokens.

    On its own it trains exactly as `GRPOTrainer` with the same settings (clip and all) and logs how
    far the new distributions are from the old ones: `trust_region/kl_mean`, `kl_max`. It is the
    baseline to compare with, and the base of `TROLLTrainer`.
    """

    support_top_k: int = 64
    support_mass: float = 1.0
    #: Whether the old policy's hidden states and LM head are kept, to compare over the whole vocabulary.
    keep_hidden: bool = False
    #: Whether a micro-batch goes through the model without its padding; see `tether.integrations.packing`.
    pack_sequences: bool = False
    #: Called with (trainer, inputs, projected tokens) after each loss in training; for reports.
    on_tokens: Callable[[Any, dict[str, Any], ProjectedTokens], None] | None = None
    beta: float  # GRPOTrainer's: weight of the reference penalty

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorded: list[Recorded] | None = None
        self._old_head: HeadSnapshot | None = None
        self._loss_inputs: dict[str, Any] | None = None
        self._tokens: ProjectedTokens | None = None
        #: The dataset rows of the current rollouts; `inputs["rollout_row"]` indexes them.
        self.rollout_rows: list[dict[str, Any]] = []
        add_sparse_head(self._base_model, self.temperature, maybe_gather_lm_head_ctx)
        if self.pack_sequences:
            add_packing(self._base_model)
            if self.ref_model is not None:
                add_packing(self.accelerator.unwrap_model(self.ref_model))
        warn_of_settings(self, self._base_model)

    @property
    def _base_model(self) -> Any:
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._recorded = []
        training = self.model.training  # an evaluation in between leaves the rollouts in use alone
        if training:
            self._old_head = None  # before the next one is taken, and before generation needs the memory
        try:
            output = super()._generate_and_score_completions(inputs)
            if "old_per_token_logps" in output:
                output.update(self._old_policy_pass(output["old_per_token_logps"]).entries())
                if training:
                    # Follows its row through TRL's shuffle, so that a report can name the problem.
                    output["rollout_row"] = torch.arange(len(output[IDS]), device=output[IDS].device)
                    self.rollout_rows = list(inputs)
                    self._old_head = self._snapshot() if self.keep_hidden else None
        finally:
            self._recorded = None
        return output

    def _old_policy_pass(self, log_probs: Tensor) -> Recorded:
        """Where the old policy's log-probabilities came from: the first pass through the model.

        With adapters the reference policy goes through the same model, but after the old one. What an
        override makes of the log-probabilities that it gets from here is its own business.
        """
        if self._recorded and self._recorded[0].log_probs.shape == log_probs.shape:
            return self._recorded[0]
        raise TetherError(
            "TRL has the old policy's log-probabilities, but the model was not evaluated here for them, so "
            "there is nothing to project on. An override of _get_per_token_logps_and_entropies must call "
            "super() with the model and the whole batch."
        )

    def _snapshot(self) -> HeadSnapshot | None:
        head = self._base_model.get_output_embeddings()
        return take_snapshot(head.weight, head.bias, maybe_gather_lm_head_ctx)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """As TRL's; between updates the old policy takes the memory of its tokens, not of their padding."""
        inputs = super()._prepare_inputs(generation_batch)
        buffered = self._buffered_inputs or []
        if self.model.training and any(IDS in batch for batch in buffered):
            self._buffered_inputs = [pack(batch) for batch in buffered]
            size = bytes_a_token(self._buffered_inputs)
            if size is not None:
                self._metrics["train"]["trust_region/old_policy_bytes"].append(size)
        return unpack(inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        score = super()._get_per_token_logps_and_entropies
        packing = {"pack_sequences": True} if self.pack_sequences else {}
        if self._loss_inputs is not None:
            tap = Tap(model, {**packing, **self._evaluation_keywords(self._loss_inputs)})
            log_probs, *rest = score(tap, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            return (self._constrain_tapped(log_probs, tap, logits_to_keep, self._loss_inputs), *rest)
        if self._recorded is not None and model is self.model:
            keywords = {"support_top_k": self.support_top_k, "support_mass": self.support_mass}
            tap = Tap(model, {**packing, **keywords, "keep_hidden": self.keep_hidden})
            result = score(tap, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            recorded = Recorded(result[0], tap.support(logits_to_keep), tap.hidden(logits_to_keep))
            self._recorded.append(recorded)
            return result
        plain = Tap(model, packing) if packing else model  # the reference, or updates without an old policy
        return score(plain, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def _evaluation_keywords(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """On which ids the new policy is evaluated: by default those of the old one."""
        return {"support_ids": inputs[IDS]}

    def _constrain_tapped(self, log_probs: Tensor, tap: Tap, tokens: int, inputs: dict[str, Any]) -> Tensor:
        """From what the model's forward returned to what TRL's loss is to see."""
        return self._constrain(log_probs, tap.support(tokens), inputs)

    def _constrain(self, log_probs: Tensor, new: SparseLogProbs, inputs: dict[str, Any]) -> Tensor:
        """The sampled tokens' log-probabilities as TRL's loss is to see them: here, as they are."""
        with torch.no_grad():
            self._tokens = project_tokens(
                new.detach(), old_support(inputs), inputs["completion_ids"], _loss_mask(inputs),
                log_probs=log_probs.detach(), old_log_probs=inputs["old_per_token_logps"], kl_bound=math.inf,
            )  # fmt: skip
        return log_probs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if IDS not in inputs:  # no old policy: every ratio is 1
            return super()._compute_loss(model, inputs)
        self._loss_inputs = dict(inputs)
        try:
            loss = super()._compute_loss(model, self._loss_inputs)
            tokens = self._tokens
        finally:  # nothing of this batch's graph may outlive it, whatever happened
            self._loss_inputs = self._tokens = None
        assert tokens is not None
        self._log_tokens(tokens, inputs)
        if self.on_tokens is not None and self.model.training:
            self.on_tokens(self, inputs, tokens)
        return loss + self._extra_loss(tokens, inputs)

    def _extra_loss(self, tokens: ProjectedTokens, inputs: dict[str, Any]) -> Tensor | float:
        """What is added to TRL's loss: nothing."""
        return 0.0

    def _log_tokens(self, tokens: ProjectedTokens, inputs: dict[str, Any]) -> None:
        mask = _loss_mask(inputs)
        metrics = tokens.metrics(mask)
        acted = (tokens.projected & (mask > 0)).sum()
        row = torch.stack([mask.sum(), acted, *metrics.values()]).float()
        # One column a process and one wait: the numbers that follow are plain Python.
        counted_by, acted_by, *columns = self.accelerator.gather(row[None]).t().tolist()
        mode = "train" if self.model.training else "eval"
        for name, values in zip(metrics, columns, strict=True):
            if name.endswith("_max"):
                combined = max(values)
            else:
                combined = _weighted_mean(values, acted_by if name == "mean_step" else counted_by)
            self._metrics[mode][f"trust_region/{name}"].append(combined)

    def _aggregate(self, values: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Reduce per-token values [B, T] exactly as TRL reduces its per-token loss (1.16)."""
        mask = _loss_mask(inputs)
        mode = "train" if self.model.training else "eval"
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        kept = values * mask
        if self.loss_type == "dapo":
            items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            if mode == "train":
                items = items * accumulation / self.args.steps_per_generation
            return kept.sum() / items
        if self.loss_type == "grpo":
            loss = (kept.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        elif self.loss_type == "bnpo":
            loss = kept.sum() / mask.sum().clamp(min=1.0)
        elif self.loss_type == "dr_grpo":
            loss = kept.sum() / (values.size(0) * self.max_completion_length)
        else:  # luspo, the last of the loss types that are let in
            loss = kept.sum(-1).mean()
        return loss / accumulation


class TROLLTrainer(OldPolicyTrainer):
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

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        args = self._settings(model, args)
        if not isinstance(args, TROLLConfig):
            raise ConfigError(
                f"TROLLTrainer needs args=TROLLConfig(output_dir=...), got {type(args).__name__}. "
                "TROLLConfig takes every argument of GRPOConfig."
            )
        self.support_top_k, self.support_mass = args.troll_top_k, args.troll_mass
        self.keep_hidden = args.troll_support == "exact"
        self.pack_sequences = args.troll_pack_sequences
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        self._new_log_probs: Tensor | None = None
        self._beta = self.beta
        # The projection replaces the clip. An unbounded clip is exactly the plain ratio.
        self.epsilon_low = self.epsilon_high = math.inf

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, which cites TROLL, and Tether's version."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            name_tether(Path(self.args.output_dir) / "README.md")

    def _evaluation_keywords(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if self.args.troll_support == "paper":  # which compares the union of both policies' own ids
            return {"support_top_k": self.support_top_k, "support_mass": self.support_mass}
        if self.args.troll_support == "bucket":
            return super()._evaluation_keywords(inputs)
        return {
            "old_tokens": OldTokens(
                hidden=inputs[HIDDEN],
                support=old_support(inputs),
                mask=_loss_mask(inputs),
                # In evaluation the policy is its own old policy, and so is its head.
                head=self._old_head if self.model.training else None,
                kl_bound=self.args.troll_kl_bound,
                region=self.args.troll_region,
            )
        }

    def _constrain_tapped(self, log_probs: Tensor, tap: Tap, tokens: int, inputs: dict[str, Any]) -> Tensor:
        if self.args.troll_support != "exact":
            return super()._constrain_tapped(log_probs, tap, tokens, inputs)
        self._new_log_probs = log_probs
        self._tokens = tap.projected(tokens, log_probs, inputs["old_per_token_logps"], _loss_mask(inputs))
        return self._tokens.projected_log_probs

    def _constrain(self, log_probs: Tensor, new: SparseLogProbs, inputs: dict[str, Any]) -> Tensor:
        self._new_log_probs = log_probs
        self._tokens = project_tokens(
            new,
            old_support(inputs),
            inputs["completion_ids"],
            _loss_mask(inputs),
            log_probs=log_probs,
            old_log_probs=inputs["old_per_token_logps"],
            kl_bound=self.args.troll_kl_bound,
            support=self.args.troll_support,
            region=self.args.troll_region,
        )
        # TRL reads the old log-probabilities after this call; only the paper's support changes them.
        inputs["old_per_token_logps"] = self._tokens.old_log_probs
        return self._tokens.projected_log_probs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if IDS not in inputs:
            return super()._compute_loss(model, inputs)
        # TRL would compute the reference penalty from projected log-probabilities; `_extra_loss` does it.
        self._beta, self.beta = self.beta, 0.0
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta = self._beta
            self._new_log_probs = None

    def _extra_loss(self, tokens: ProjectedTokens, inputs: dict[str, Any]) -> Tensor | float:
        extra = self.args.troll_alpha * self._aggregate(tokens.regression, inputs)
        if self._beta != 0.0:
            extra = extra + self._beta * self._aggregate(self._reference_penalty(inputs), inputs)
        return extra

    def _reference_penalty(self, inputs: dict[str, Any]) -> Tensor:
        """TRL's estimate (k3) of KL(new || reference) for each token, [B, T]; logged as `kl`."""
        new_log_probs, mask = self._new_log_probs, _loss_mask(inputs)
        assert new_log_probs is not None
        difference = inputs["ref_per_token_logps"] - new_log_probs
        penalty = difference.exp() - difference - 1
        if self.args.use_bias_correction_kl:  # the tokens are the old policy's, the divergence the new one's
            log_ratio = new_log_probs - inputs["old_per_token_logps"]
            if self.importance_sampling_level == "sequence":
                log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
            penalty = penalty * log_ratio.exp()
        totals = torch.stack([(penalty.detach() * mask).sum(), mask.sum().to(penalty.dtype)])
        total, count = self.accelerator.reduce(totals, reduction="sum").tolist()
        self._metrics["train" if self.model.training else "eval"]["kl"].append(total / max(count, 1.0))
        return penalty


def _loss_mask(inputs: dict[str, Any]) -> Tensor:
    """The tokens TRL's loss counts: those of the completion, without what tools wrote."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _weighted_mean(values: list[float], weights: list[float]) -> float:
    """Over processes; where nothing weighs anything, every process reports the same default."""
    total = sum(weights)
    if total == 0:
        return values[0]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
