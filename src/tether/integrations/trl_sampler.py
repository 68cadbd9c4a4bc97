"""GRPOTrainer whose rollouts come with the sampler's own distributions, from vLLM or from Transformers.

TRL asks vLLM for the sampled token's log-probability alone and Transformers for none. Here both report the
likeliest ids besides, and the records follow their tokens through TRL's lists (`sampler_reports`). With
``anchor="sampler"`` they are the old policy, and TRL's scoring pass of it is answered from them.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from tether.errors import ConfigError, InvalidInputError, warn
from tether.integrations.decoding import beyond_attention, decode
from tether.integrations.sampler_check import SamplerCheck
from tether.integrations.sampler_reports import (
    GenerationRecorder,
    Reported,
    StepRecorder,
    collect,
    ids_to_ask_for,
    report_sequence,
)
from tether.integrations.trl_config import (
    TRUNCATING,
    changed_sampling,
    check_kept_ids,
    check_penalties,
    check_sampler_tolerance,
    check_sampler_weight,
)
from tether.integrations.trl_lag import LaggedTrainer
from tether.integrations.trl_old_policy import loss_mask
from tether.integrations.vllm_on_cpu import reload_weights
from tether.projection import SampledPolicy
from tether.settings import Anchor, check_choice

#: The optimizer step whose weights sampled a completion, in TRL's batch.
VERSION = "sampler_version"


class ReportingTrainer(LaggedTrainer):
    """`GRPOTrainer` that can know the policy which sampled.

    Args besides those of `GRPOTrainer`:

        anchor: which policy the trust region is around; see `tether.settings.Anchor`.
        sampler_weight: with ``anchor="trainer"``, the largest weight pi / sampler of a token's policy
            gradient, pi being the trainer's policy when the rollouts began (the decoupled form); None for no
            correction.
        sampler_tolerance: of vLLM, see `sampler_check.SamplerCheck`.
        compact_rollouts: write responses with `decoding.decode` where Transformers would: each prompt is read
            once for its group, and rows that have ended leave the batch. The same policy, other random
            numbers.

    Raises:
        ConfigError: a way to generate that does not report, truncated sampling with a reference penalty, or
            compact rollouts of what `decoding` does not do.
        StaleSamplerError: a sampler without the weights it was given.
    """

    support_top_k: int
    support_mass: float
    #: Whether the objective is computed where the policy is its own old policy, and TRL's is a plain policy
    #: gradient.
    _learns_without_old_policy: bool = False

    def __init__(
        self,
        *args: Any,
        anchor: Anchor = "trainer",
        sampler_weight: float | None = None,
        sampler_tolerance: float | None = None,
        compact_rollouts: bool = False,
        **kwargs: Any,
    ) -> None:
        check_choice("anchor", anchor, get_args(Anchor))
        check_sampler_tolerance(sampler_tolerance)
        self.anchor, self.sampler_weight, self.sampler_tolerance = anchor, sampler_weight, sampler_tolerance
        self.compact_rollouts = compact_rollouts
        super().__init__(*args, **kwargs)
        check_sampler_weight(self.args, sampler_weight, anchor)
        if sampler_weight is not None and not (self._learns_without_old_policy or self._trl_scores):
            raise ConfigError(
                f"sampler_weight={sampler_weight} weighs by the policy that TRL scores, and it scores none "
                "where each batch of rollouts serves one update. Raise steps_per_generation or "
                'num_iterations, take anchor="sampler", or a PolicyLossTrainer, as of "unclipped".'
            )
        if compact_rollouts:
            _check_compact(self)
        self._reported: list[list[float]] | None = None
        self._sampler: SampledPolicy | None = None  # of the batch being scored
        self._answers = 0  # scoring passes of TRL's that the records answer
        if self.use_vllm and self.vllm_mode == "colocate" and self.accelerator.device.type == "cpu":
            reload_weights(self.vllm_generation)
        if not self._reports:
            if self.lag:
                warn(
                    f"Completions are sampled {self.lag} updates ago and the trust region is around the "
                    "present policy, which sampled none of them. Set anchor='sampler', or sampler_weight=2 "
                    "to weigh by it."
                )
            return
        if self.use_transformers_continuous_batching:
            raise ConfigError(
                "use_transformers_continuous_batching=True does not report what it samples from, which "
                f"anchor={self.anchor!r} with sampler_weight={self.sampler_weight} needs. Leave it off, or "
                "use vLLM."
            )
        if (beams := (self.args.generation_kwargs or {}).get("num_beams")) not in (None, 1):
            raise ConfigError(f"num_beams={beams} searches, and samples from no distribution. Set it to 1.")
        self._truncates = changed_sampling(self.args, TRUNCATING)
        if self._truncates and self.beta != 0.0:
            raise ConfigError(
                f"beta={self.beta} compares whole distributions with the reference policy, but sampling is "
                "truncated "
                f"({self._truncates}) and the network is compared renormalised on what it keeps. Set "
                "beta=0, or "
                "sample without truncation."
            )
        if self.use_vllm:
            check_penalties(self.args, self.sampler_tolerance)
            check_kept_ids(self.args, self.support_top_k)
            kept = self._truncates.get("top_k")
            asked = ids_to_ask_for(self.support_top_k, kept, self._vocabulary_size)
            report_top_k(self.vllm_generation, asked)
            self._check = SamplerCheck(self, self.sampler_tolerance)

    @property
    def _reports(self) -> bool:
        return self.anchor == "sampler" or self.sampler_weight is not None

    @property
    def _sampling_model(self) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if is_peft_model(model) else model

    @property
    def _vocabulary_size(self) -> int:
        return int(self._sampling_model.config.get_text_config().vocab_size)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        with self._sampling_weights() as version:
            self._version = version
            if self.compact_rollouts:
                return self._decode(prompt_ids)
            if not self._reports or self.use_vllm:
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
            recorder = GenerationRecorder(
                self._sampling_model, self.support_top_k, truncated=bool(self._truncates)
            )
            with recorder:
                completion_ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            return completion_ids, recorder.records(completion_ids)

    def _decode(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[Reported]] | None]:
        training = self.model.training
        recorder = StepRecorder(self.support_top_k) if self._reports else None
        self.model.eval()  # dropout is no part of the policy
        try:
            with self.accelerator.autocast():
                said = decode(
                    self._sampling_model, prompt_ids, max_new_tokens=self.max_completion_length,
                    temperature=self.temperature, end_ids=self.eos_token_ids,
                    watch=None if recorder is None else recorder.note,
                )  # fmt: skip
        finally:
            self.model.train(training)
        return said, None if recorder is None else recorder.records(said)

    def _generate(self, prompts: Any) -> Any:
        self._version = int(self.state.global_step)  # unless older weights are put in their place
        output = super()._generate(prompts)
        if self._reports:
            self._reported = output[4]  # a list of log-probabilities for each completion
        return output

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._sampler, self._answers = None, int(self.anchor == "sampler" and self._trl_scores)
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            if self._reports:
                ids, mask = output["completion_ids"], loss_mask(output)
                sampled = self._drawn_alone(ids, mask)
                if sampled is None:
                    self._sampler = self._collect(ids, mask)
                    sampled = self._sampler.log_probs
                output["sampling_per_token_logps"] = torch.where(mask > 0, sampled, 0.0)
                output[VERSION] = torch.full((len(ids),), self._version, device=ids.device)
                if self.use_vllm and self._sampler is not None:
                    self._check.after_generation(output, self._sampler)
        finally:
            self._reported, self._answers = None, 0
        return output

    def _drawn_alone(self, completion_ids: Tensor, mask: Tensor) -> Tensor | None:
        """The drawn tokens' log-probabilities, [B, T], where a `rollout_func` reports nothing else of them.

        Weights need no more; a region around the sampler does, and says so (None).

        Raises:
            ConfigError: not even those.
            InvalidInputError: one that is missing or above 0, by sequence and position.
        """
        if self.anchor == "sampler" or self.rollout_func is None:
            return None
        if self._reported is None:
            raise ConfigError(
                f"sampler_weight={self.sampler_weight} weighs by the log-probabilities of the drawn tokens, "
                'and the rollout_func returned none. Let it return them as "logprobs".'
            )
        if all(isinstance(value, Reported) for values in self._reported for value in values):
            return None
        sampled = self._reported_log_probs(*completion_ids.shape)
        wrong = (mask > 0) & ~(sampled <= 0)
        if bool(wrong.any()):
            row, position = (int(i) for i in wrong.nonzero()[0])
            raise InvalidInputError(
                f"sequence {row}, position {position}: {sampled[row, position].item()} is no log-probability "
                f"of a drawn token ({int(wrong.sum())} in all). sampler_weight needs one of each."
            )
        return sampled

    def _collect(self, completion_ids: Tensor, mask: Tensor) -> SampledPolicy:
        assert self._reported is not None
        policy = collect(self._reported, completion_ids, mask, truncated=bool(self._truncates),
                         vocabulary_size=self._vocabulary_size)  # fmt: skip
        # As few ids as of a scored policy: what an update costs grows with them.
        return policy.trimmed(self.support_mass)

    @property
    def _trl_scores(self) -> bool:
        """Whether TRL asks for the old policy's log-probabilities of a batch of rollouts."""
        together = self.args.steps_per_generation * self.num_iterations
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        return bool(self.args.gradient_accumulation_steps % together != 0 or corrects)

    def _answers_scoring(self, model: Any) -> bool:
        """Whether this is TRL's scoring pass of the old policy, and the sampler has the answer."""
        if self._answers == 0 or model is not self.model or self._reported is None:
            return False
        self._answers -= 1  # a reference policy with adapters goes through the same model afterwards
        return True

    def _reported_log_probs(self, rows: int, tokens: int) -> Tensor:
        """Of the drawn tokens under the sampler, [B, T]."""
        own = torch.zeros(rows, tokens, device=self.accelerator.device)
        assert self._reported is not None
        for row, values in zip(own, self._reported, strict=True):
            numbers = [
                math.nan if value is None else value for value in values
            ]  # TRL's mark of a missing one
            row[: len(values)] = torch.tensor(numbers, device=row.device)
        return own

    def _lag(self, inputs: dict[str, Any]) -> Tensor:
        """Optimizer steps since the weights that sampled, [B]; zero in evaluation."""
        version: Tensor = inputs[VERSION]
        if not self.model.training:
            return torch.zeros_like(version)
        return (int(self.state.global_step) - version).clamp_min(0)


def report_top_k(generation: Any, top_k: int) -> None:
    """Have TRL's `VLLMGeneration` report the likeliest ids of each token beside the drawn one.

    Its `generate` then returns, in the place where TRL looks for the drawn token's log-probability, one that
    carries its record. Any object with the same attribute and method will do.
    """
    generation.logprobs = top_k
    if getattr(generation, "llm", None) is not None:
        # A colocated engine allows 20, and TRL has no setting for it; a server is started with
        # --max-logprobs.
        model_config = generation.llm.llm_engine.model_config
        if 0 <= model_config.max_logprobs < top_k:
            model_config.max_logprobs = top_k
    generate = generation.generate

    def with_records(*args: Any, **kwargs: Any) -> Any:
        prompt_ids, completion_ids, log_probs, ids = generate(*args, **kwargs)
        if log_probs is None or ids is None:
            raise ConfigError(
                f"vLLM was asked for the {top_k} likeliest ids of each token and reported none. A server "
                "must be "
                "`vllm serve --logprobs-mode processed_logprobs --max-logprobs -1`."
            )
        records = [
            [[one] for one in report_sequence(drawn, some_ids, numbers, sequence)]
            for sequence, (drawn, some_ids, numbers) in enumerate(
                zip(completion_ids, ids, log_probs, strict=True)
            )
        ]
        return prompt_ids, completion_ids, records, [[[i] for i in drawn] for drawn in completion_ids]

    generation.generate = with_records


def _check_compact(trainer: Any) -> None:
    """Refuse what `decode` does not do.

    Raises:
        ConfigError: naming it.
    """
    args, truncated = trainer.args, changed_sampling(trainer.args, TRUNCATING)
    other = beyond_attention(trainer._sampling_model)
    against = {
        "vLLM writes the responses (use_vllm=True)": trainer.use_vllm,
        "use_transformers_continuous_batching=True": trainer.use_transformers_continuous_batching,
        "a rollout_func writes the responses": trainer.rollout_func is not None,
        f"{trainer.accelerator.num_processes} processes": trainer.accelerator.num_processes > 1,
        f"sampling is truncated ({truncated})": bool(truncated),
        f"repetition_penalty={args.repetition_penalty}": args.repetition_penalty != 1.0,
        f"generation_kwargs={args.generation_kwargs}": bool(args.generation_kwargs),
        "max_completion_length=None": args.max_completion_length is None,
        "the model reads more than text": getattr(trainer, "_is_vlm", False),
        f"the model remembers more of a row than keys and values: {other}": other is not None,
    }
    for reason, holds in against.items():
        if holds:
            raise ConfigError(f"compact_rollouts cannot be had: {reason}. Leave it off, or change that.")
