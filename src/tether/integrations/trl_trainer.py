"""TRL's GRPO trainer with the old policy's token distributions at hand, and with a policy loss of ours.

What happens in a step:

1. Generation is TRL's. When TRL scores the fresh completions with the policy that made them, the most
   likely ids of every token (or its hidden states) are kept beside the sampled token's log-probability.
2. In each update TRL evaluates the network through an `Evaluation`, which asks the forward for the same.
3. What the network is compared with, and what is learnt from that, is `_project` and `_objective`: TRL's
   own surrogate is made to vanish (advantages of zero), and the objective is added, averaged as TRL's
   `loss_type` says. Reference penalty, entropy bonus, auxiliary losses and metrics stay TRL's.
4. Where none of TRL's own terms needs the network's log-probabilities (`trl_one_pass.py`), the forward is
   given the objective itself, and computes its gradient while the logits are at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.errors import TetherError

# First, because it says what to install where TRL is missing or another version.
from tether.integrations.trl_config import TROLLConfig  # noqa: F401
from tether.losses import LossAggMode, PolicyLoss, ProjectedTokens, project_tokens, truncated_weights
from tether.projection import SparseLogProbs
from tether.settings import TROLLSettings

# isort: split
from accelerate.utils import is_peft_model
from trl.trainer.utils import maybe_gather_lm_head_ctx

from tether.integrations.exact_head import HeadSnapshot, OldTokens, take_snapshot
from tether.integrations.lag_metrics import by_process, lag_metrics, largest_of_logged, weighted_mean
from tether.integrations.one_pass_head import LossOfTokens
from tether.integrations.packing import Packing, add_packing
from tether.integrations.sampler_reports import at_reported_ids
from tether.integrations.sparse_head import add_sparse_head
from tether.integrations.trl_evaluation import Evaluation
from tether.integrations.trl_old_policy import (
    IDS,
    LOG_TAIL,
    Recorded,
    bytes_a_token,
    loss_mask,
    old_support,
    pack,
    unpack,
    weighted_advantages,
)
from tether.integrations.trl_one_pass import loss_in_forward
from tether.integrations.trl_sampler import ReportingTrainer
from tether.integrations.trl_seam import scoring_of
from tether.integrations.trl_step_back import StepBackCallback, StepBackOptions
from tether.integrations.trl_step_scale import StepScale
from tether.integrations.trl_warnings import warn_of_settings

#: How each of TRL's loss types averages.
AVERAGES: dict[str, LossAggMode] = {
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "grpo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
}

# Measured for every trainer, always as KL(new || old); a loss may mean another divergence by the name.
_MEASURED_ALREADY = ("kl_mean", "kl_max")


class OldPolicyTrainer(ReportingTrainer):
    """`GRPOTrainer` that also knows the old policy's token distributions, not just sampled tokens.

    On its own it trains exactly as `GRPOTrainer` with the same settings (clip and all) and logs how
    far the new distributions are from the old ones: `trust_region/kl_mean`, `kl_max`. It is the
    baseline to compare with, and the base of `TROLLTrainer`.

    Takes the arguments of `GRPOTrainer` and, as all trainers here, these keywords:

        estimator: what replaces TRL's advantages: a name of `tether.advantages.ADVANTAGES`, your own as
            "package.module:function", `trl_advantages.FromRewards` with options, or a critic,
            `trl_critic.CriticOptions`.
        kl_stop: mean KL(new || old) in nats above which the rest of a batch's updates is skipped; see
            `trl_kl_stop.StoppableTrainer`.
        step_back: the divergence in nats that the network itself is held to after each batch, or
            `trl_step_back.StepBackOptions`.
        step_scale: the largest weight of a response, such as 2, for a learning rate that shrinks with the
            effective number of an update's responses; see `trl_step_scale.StepScale`.
        support_top_k, support_mass: ids kept of each old distribution, as in `TROLLSettings`.
        pack_sequences: run the model on a micro-batch without its padding; "shared": and compute once what
            its sequences begin with alike, such as a group's prompt; see `tether.integrations.packing`.
        compact_rollouts: see `trl_sampler.ReportingTrainer`.
        anchor: "sampler" to compare with the policy that sampled, from what its engine reports, instead of
            the one that TRL scores; sampler_weight, sampler_tolerance: see `trl_sampler.ReportingTrainer`.
            (From support_top_k on these are settings of `TROLLConfig` in `TROLLTrainer`.)
        lag: sample from the policy of so many updates ago; see `trl_lag.LaggedTrainer`.
    """

    #: Whether the old policy's hidden states are kept, to compare over the whole vocabulary.
    keep_hidden: bool = False
    #: Whether the LM head is kept with them, on the accelerator.
    keep_head: bool = True
    #: Called with (trainer, inputs, projected tokens) after each loss in training; for reports.
    on_tokens: Callable[[Any, dict[str, Any], ProjectedTokens], None] | None = None
    beta: float  # GRPOTrainer's: weight of the reference penalty

    def __init__(
        self,
        *args: Any,
        support_top_k: int = TROLLSettings.top_k,
        support_mass: float = 1.0,
        pack_sequences: Packing = False,
        step_back: StepBackOptions | float | None = None,
        step_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.support_top_k, self.support_mass = support_top_k, support_mass
        self.pack_sequences = pack_sequences
        super().__init__(*args, **kwargs)
        self._recording = False  # while fresh completions are scored
        self._recorded: Recorded | None = None
        self._old_head: HeadSnapshot | None = None
        #: The dataset rows of the current rollouts; `inputs["rollout_row"]` indexes them.
        self.rollout_rows: list[dict[str, Any]] = []
        reference = [] if self.ref_model is None else [self.accelerator.unwrap_model(self.ref_model)]
        for model in (self._base_model, *reference):
            cast = self.args.cast_lm_head_to_fp32
            add_sparse_head(model, self.temperature, maybe_gather_lm_head_ctx, in_float32=cast)
            if self.pack_sequences:
                add_packing(model)
        warn_of_settings(self, self._base_model)
        self._start_estimator()
        self._step_back = None if step_back is None else StepBackCallback(self, step_back)
        self._step_scale = None if step_scale is None else StepScale(self, step_scale)
        for callback in filter(None, (self._step_back, self._step_scale)):
            self.add_callback(callback)

    @property
    def _base_model(self) -> Any:
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._recording, self._recorded = True, None
        training = self.model.training  # an evaluation in between leaves the rollouts in use alone
        if training:
            self._old_head = None  # before the next one is taken, and before generation needs the memory
        try:
            output = super()._generate_and_score_completions(inputs)
            old = self._old_policy(output)
            if old is not None:
                output.update(old.entries(), old_per_token_logps=old.log_probs)
                if training:
                    # Follows its row through TRL's shuffle, so that a report can name the problem.
                    output["rollout_row"] = torch.arange(len(output[IDS]), device=output[IDS].device)
                    self.rollout_rows = list(inputs)
                    self._old_head = self._snapshot() if self.keep_hidden and self.keep_head else None
        finally:
            self._recording, self._recorded = False, None
        return output

    def _old_policy(self, output: dict[str, Any]) -> Recorded | None:
        """What the trust region is around: the policy that sampled, or the one that TRL scored, if it did."""
        if self.anchor == "sampler":
            assert self._sampler is not None
            return Recorded(output["sampling_per_token_logps"], self._sampler.support, None)
        if "old_per_token_logps" not in output:
            return None
        scored = output["old_per_token_logps"]
        output.update(self._weights_of_tokens(output, scored))
        return replace(self._old_policy_pass(scored), log_probs=scored)

    def _weights_of_tokens(self, inputs: dict[str, Any], log_probs: Tensor) -> dict[str, Tensor]:
        """min(pi / sampler, largest) of each token, where that is asked for; pi's log-probabilities given."""
        if self.sampler_weight is None:
            return {}
        sampled = inputs["sampling_per_token_logps"]
        weights = truncated_weights(log_probs, sampled, loss_mask(inputs), largest=self.sampler_weight)
        return {"importance_sampling_ratio": weights}

    def _old_policy_pass(self, log_probs: Tensor) -> Recorded:
        """Where the old policy's log-probabilities came from: the first pass through the model.

        What an override makes of the log-probabilities that it gets from here is its own business.
        """
        if self._recorded is not None and self._recorded.log_probs.shape == log_probs.shape:
            return self._recorded
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
        if self._answers_scoring(model):
            return self._reported_log_probs(len(input_ids), logits_to_keep), None, None
        of_trl = super()._get_per_token_logps_and_entropies
        packing = {"pack_sequences": self.pack_sequences} if self.pack_sequences else {}
        # With adapters the reference policy goes through the same model, after the old one.
        recording = self._recording and self._recorded is None and model is self.model
        if isinstance(model, Evaluation):
            evaluation = model
        elif recording:
            evaluation = Evaluation(model, {**packing, **self._own_support, "keep_hidden": self.keep_hidden})
        else:  # the reference policy, or that of TRL's own loss: by the same head, without distributions
            nothing = input_ids.new_empty((len(input_ids), logits_to_keep, 0))
            evaluation = Evaluation(model, {**packing, "support_ids": nothing})
        log_probs, entropies, *rest = scoring_of(self, of_trl)(
            evaluation, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        evaluation.keep(log_probs, entropies)
        if recording:
            self._recorded = Recorded.of(evaluation)
        return (log_probs, entropies, *rest)

    @property
    def _own_support(self) -> dict[str, Any]:
        """Asks the forward for the network's own most likely ids."""
        return {"support_top_k": self.support_top_k, "support_mass": self.support_mass}

    def _evaluation_keywords(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """On which ids the network is evaluated: those of the old policy, or its own if there is none."""
        if IDS not in inputs:
            return self._own_support
        if self.anchor == "sampler":
            return at_reported_ids(inputs[IDS], inputs[LOG_TAIL])
        return {"support_ids": inputs[IDS]}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if IDS not in inputs and not self._learns_without_old_policy:
            return super()._compute_loss(model, inputs)
        wanted = self._loss_in_forward(inputs)
        keywords = self._evaluation_keywords(inputs) if wanted is None else {"policy_loss": wanted}
        if self.pack_sequences:
            keywords = {**keywords, "pack_sequences": self.pack_sequences}
        evaluation = Evaluation(model, keywords)
        loss: Tensor = super()._compute_loss(evaluation, self._inputs_of_trl(inputs))
        if IDS not in inputs:  # every batch of rollouts serves one update: the policy is its own old policy
            own = Recorded(evaluation.log_probs.detach(), evaluation.support.detach(), None)
            inputs = {**inputs, **own.entries(), "old_per_token_logps": own.log_probs,
                      **self._weights_of_tokens(inputs, own.log_probs)}  # fmt: skip
        if self._step_scale is not None and self.model.training:
            self._step_scale.count(inputs, evaluation.log_probs, inputs["old_per_token_logps"])
        tokens, objective = self._learn(evaluation, inputs)
        self._log_tokens(tokens, objective.metrics, inputs)
        if self._entropy_bonus_enabled:  # TRL then logs what it takes for the whole policy loss
            self._complete_policy_loss(objective.loss.detach())
        if self.on_tokens is not None and self.model.training:
            self.on_tokens(self, inputs, tokens)
        return loss + objective.loss

    def _learn(self, evaluation: Evaluation, inputs: dict[str, Any]) -> tuple[ProjectedTokens, PolicyLoss]:
        """What was found of the tokens, and the loss, if the forward has not computed it already."""
        if evaluation.policy_loss is not None:
            known = inputs["old_per_token_logps"], loss_mask(inputs)
            return evaluation.projected(*known, bounded=self._bounded), evaluation.policy_loss
        tokens = self._project(evaluation, inputs)
        return tokens, self._objective(tokens, evaluation, inputs)

    @property
    def _bounded(self) -> bool:
        """Whether there is a bound that could project anything: here, divergences are measured alone."""
        return False

    def _compared_with(self, inputs: dict[str, Any]) -> OldTokens | SparseLogProbs:
        """What a loss in the forward compares with: here, the distributions on the ids kept."""
        return old_support(inputs)

    def _loss_in_forward(self, inputs: dict[str, Any]) -> LossOfTokens | None:
        """The loss, if the forward is to compute it: here, TRL's own is all there is."""
        return None

    def _complete_policy_loss(self, loss: Tensor) -> None:
        mode = "train" if self.model.training else "eval"
        if self.loss_type != "dapo" and mode == "train":
            loss = loss * self.current_gradient_accumulation_steps
        self._metrics[mode]["policy_loss"][-1] += self.accelerator.gather(loss).nanmean().item()

    def _inputs_of_trl(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What TRL's own loss gets to see: here, everything."""
        if self.sampler_weight is None or self.loss_type == "vespo":  # which weighs by them itself
            return dict(inputs)
        # Else TRL applies weights to what vLLM samples alone; they are positive: the clip commutes with them.
        return {**inputs, "advantages": weighted_advantages(inputs)}

    def _project(self, evaluation: Evaluation, inputs: dict[str, Any]) -> ProjectedTokens:
        """What the trust region says of the tokens: here, only how far they moved."""
        with torch.no_grad():
            tokens = project_tokens(
                evaluation.support.detach(), old_support(inputs), inputs["completion_ids"], loss_mask(inputs),
                log_probs=evaluation.log_probs.detach(), old_log_probs=inputs["old_per_token_logps"],
                kl_bound=math.inf,
            )  # fmt: skip
        return replace(tokens, new_log_probs=evaluation.log_probs)

    def _objective(
        self, tokens: ProjectedTokens, evaluation: Evaluation | None, inputs: dict[str, Any]
    ) -> PolicyLoss:
        """What is added to TRL's loss, as it enters an update, and what to watch: here, nothing.

        Args:
            evaluation: None where the forward itself asks.
        """
        return PolicyLoss(tokens.kl.new_zeros(()), {})

    def _log_tokens(
        self, tokens: ProjectedTokens, of_objective: Mapping[str, Tensor], inputs: dict[str, Any]
    ) -> None:
        mask = loss_mask(inputs)
        self._count_moved(tokens.kl, mask)
        others = {name: value for name, value in of_objective.items() if name not in _MEASURED_ALREADY}
        metrics = {**others, **tokens.metrics(mask)}
        mode = "train" if self.model.training else "eval"
        sink = self._metrics[mode]
        for name, values, weights in by_process(self.accelerator, metrics, tokens, mask):
            combined = max(values) if name.endswith("_max") else weighted_mean(name, values, weights)
            sink[f"trust_region/{name}"].append(combined)
        if self.anchor == "sampler" and mode == "train":
            for name, mean in lag_metrics(self.accelerator, tokens, self._lag(inputs), mask).items():
                sink[f"trust_region/{name}"].append(mean)

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        if self._step_back is not None:
            self._step_back.save(folder)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As TRL's, which averages over micro-batches."""
        largest_of_logged(self._metrics["train" if self.model.training else "eval"])
        super().log(logs, *args, **kwargs)


class ObjectiveTrainer(OldPolicyTrainer):
    """`GRPOTrainer` whose policy loss is `_objective`; TROLL and all its rivals are trained by it."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if "rollout_row" not in output and self.model.training:
            # Without an old policy nobody numbered them; a report wants to name the problem all the same.
            output["rollout_row"] = torch.arange(len(inputs), device=output["completion_ids"].device)
            self.rollout_rows = list(inputs)
        return output

    def _inputs_of_trl(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Those of which TRL's surrogate is zero, with zero gradient, whatever the policies are."""
        without = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        if self.beta == 0.0 or not self.args.use_bias_correction_kl:
            # A ratio of one; the corrected penalty on the reference policy needs the true one.
            without.pop("old_per_token_logps", None)
        return without

    def _loss_in_forward(self, inputs: dict[str, Any]) -> LossOfTokens | None:
        return loss_in_forward(self, inputs)

    def _averaging(self) -> dict[str, Any]:
        """For `tether.losses.aggregate`: as TRL averages."""
        return {
            "loss_agg_mode": AVERAGES[self.loss_type],
            "max_response_length": self.max_completion_length,
        }

    def _share(self, inputs: dict[str, Any]) -> Tensor | float:
        """From the average over a micro-batch to its part in an update, as TRL weighs it."""
        training = self.model.training
        accumulation = self.current_gradient_accumulation_steps if training else 1.0
        if self.loss_type != "dapo":
            return 1.0 / accumulation
        # TRL divides by the tokens of a mean update of this batch of rollouts, not of this one.
        items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if training:
            items = items * accumulation / self.args.steps_per_generation
        return loss_mask(inputs).sum().clamp(min=1.0) / items
