"""Whether a sampler really has the weights it was given: a few tokens, after each transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tether.errors import StaleSamplerError, warn
from tether.integrations.sampler_reports import at_reported_ids
from tether.integrations.trl_evaluation import Evaluation
from tether.integrations.trl_old_policy import loss_mask
from tether.projection import SampledPolicy

#: Tokens that are compared, from as many sequences as it takes.
_TOKENS = 64
_SEQUENCES = 4

_LOGGED = "trust_region/sampler_mismatch"

#: So many times the first transfer's difference is still arithmetic, in half precision.
_VARIES = 4.0
#: So many times the first transfer's difference is worth a warning, before the tolerance is reached.
_UNUSUAL = 5.0


_CAUSES = (
    "Weights that were not updated (a tied or packed LM head is the usual one), a prefix cache that was not "
    "reset, "
    "another temperature, or a sampler that reports log-probabilities before processing."
)


@dataclass(frozen=True)
class Tolerance:
    """Mean difference of log-probabilities that is put down to arithmetic."""

    usual: float
    """What arithmetic explains of any model."""
    most: float
    """What it explains of one that is rounded more, as the first transfer shows."""

    def after(self, first: float | None) -> float:
        """The limit, given what the first transfer differed by; before it, None.

        The weights of the first transfer are those that the engine has loaded: what it differs by is
        arithmetic, which grows with the model's logits. Weights left behind later grow beyond it.

        >>> half = Tolerance(0.05, 0.15)
        >>> half.after(None), half.after(0.001), half.after(0.03), half.after(0.1)
        (0.15, 0.05, 0.12, 0.15)
        """
        return self.most if first is None else min(self.most, max(self.usual, _VARIES * first))


#: In float32 engines differ by some 1e-6. Where either side rounds to half precision a model of half a
#: million parameters differs by .001, SmolLM2-135M by .03, and by up to .07 over ten tokens.
_SINGLE, _HALF = Tolerance(1e-3, 1e-3), Tolerance(0.05, 0.15)


class Mismatch:
    """Judges how far a sampler's log-probabilities are from the trainer's own after each transfer."""

    def __init__(self) -> None:
        self._first: float | None = None  # difference after the first transfer
        self._engine_began_alike = False  # with the weights that the trainer began with

    def measured(
        self, trainer: Any, tokens: int, mean: float, tolerance: Tolerance, *, comparable: bool = True
    ) -> None:
        """Log and judge what was measured after the transfer of a trainer's present weights.

        A run that goes on from a checkpoint has its first difference in its log. Its engine begins with
        other weights than the trainer's, so that its own first transfer tells nothing about arithmetic.

        Args:
            trainer: with its state, log and metrics.
            tokens: how many were compared.
            mean: |log mu - log pi| over them.
            tolerance: what arithmetic explains.
            comparable: the tokens are of such places as those of other transfers; if not, what they differ
                by is no measure of these, and is not logged.

        Raises:
            StaleSamplerError: the mean difference exceeds the tolerance.
        """
        step, log = int(trainer.state.global_step), trainer.state.log_history
        self._engine_began_alike |= step == 0
        if self._first is None:
            self._first = next((float(row[_LOGGED]) for row in log if _LOGGED in row), None)
            if self._first is None and not self._engine_began_alike:
                tolerance = replace(tolerance, most=tolerance.usual)
        if comparable:
            trainer._metrics["train"][_LOGGED].append(mean)
        self.judge(step, tokens, mean, tolerance, comparable=comparable)

    def judge(
        self, step: int, tokens: int, mean: float, tolerance: Tolerance, *, comparable: bool = True
    ) -> None:
        """Refuse what arithmetic does not explain, and warn of what it did not do before.

        Args:
            step: whose weights were transferred.
            tokens, mean, tolerance, comparable: as for `measured`.

        Raises:
            StaleSamplerError: the mean difference exceeds the tolerance.

        Example:
            >>> mismatch = Mismatch()
            >>> mismatch.judge(step=1, tokens=64, mean=2e-3, tolerance=Tolerance(0.05, 0.15))
            >>> mismatch.judge(step=2, tokens=64, mean=0.1, tolerance=Tolerance(0.05, 0.15))
            Traceback (most recent call last):
            ...
            tether.errors.StaleSamplerError: After the transfer of the weights of step 2, ...
        """
        finding = (
            f"After the transfer of the weights of step {step}, the sampler's log-probabilities of {tokens} "
            f"tokens differ from the trainer's by {mean:.2g} in the mean"
        )
        limit = tolerance.after(self._first)
        if not mean <= limit:
            raise StaleSamplerError(
                f"{finding}; arithmetic explains {limit:g}. {_CAUSES} If it is the engine's precision, "
                "set the tolerance (troll_sampler_tolerance)."
            )
        if not comparable:
            return
        if self._first is None:
            self._first = mean
        elif mean > max(_UNUSUAL * self._first, _SINGLE.usual):
            warn(f"{finding}; after the first transfer it was {self._first:.2g}. {_CAUSES}")


def explained(trainer: Any, engine: torch.dtype | None, chosen: float | None) -> Tolerance:
    """What is put down to arithmetic: what was chosen, or what the coarser side explains.

    Args:
        trainer: with `args` and `model`.
        engine: type of the weights that sample; None if nobody knows.
        chosen: a tolerance of the user's.
    """
    if chosen is not None:
        return Tolerance(chosen, chosen)
    exact = not (trainer.args.bf16 or trainer.args.fp16)
    exact = exact and next(trainer.model.parameters()).dtype == torch.float32
    return _SINGLE if exact and engine == torch.float32 else _HALF


class SamplerCheck:
    """Compares the sampler's log-probabilities of a few drawn tokens with the trainer's own.

    Weights that did not arrive go unnoticed otherwise: rewards come in, losses are finite, and the trust
    region is around a policy that is never updated. Costs a forward pass of a few sequences for each
    transfer.
    """

    def __init__(self, trainer: Any, tolerance: float | None) -> None:
        self._trainer = trainer
        self._tolerance = tolerance
        self._checked_step: int | None = None
        self._mismatch = Mismatch()

    def after_generation(self, output: dict[str, Tensor], policy: SampledPolicy) -> None:
        """Check the first rollouts after new weights.

        Raises:
            StaleSamplerError: the mean difference exceeds the tolerance.
        """
        trainer = self._trainer
        step = int(trainer.state.global_step)
        if not trainer.model.training or step == self._checked_step:
            return
        tolerance = self.tolerance
        if math.isinf(tolerance.most):
            return
        compared = torch.zeros(2, device=trainer.accelerator.device)
        if "pixel_values" not in output:  # whose rows are not those of the batch
            compared += torch.stack(self._difference(output, policy))
        # In every process, also one whose batch has images: the others wait for it.
        totals = trainer.accelerator.reduce(compared, reduction="sum")
        if totals[1] == 0:  # all of them masked: the next rollouts will tell
            return
        self._checked_step = step
        mean = (totals[0] / totals[1]).item()
        self._mismatch.measured(trainer, int(totals[1]), mean, tolerance)

    @property
    def tolerance(self) -> Tolerance:
        """Of the mean difference."""
        trainer = self._trainer
        return explained(trainer, _engine_dtype(trainer.vllm_generation), self._tolerance)

    @torch.no_grad()
    def _difference(self, output: dict[str, Tensor], policy: SampledPolicy) -> tuple[Tensor, Tensor]:
        """Sum over tokens of |log mu - log pi|, and their number."""
        trainer = self._trainer
        rows = slice(0, _SEQUENCES)
        prompt, completion = output["prompt_ids"][rows], output["completion_ids"][rows, :_TOKENS]
        counted = loss_mask(output)[rows, :_TOKENS]
        attention = torch.cat((output["prompt_mask"][rows], output["completion_mask"][rows, :_TOKENS]), 1)
        few = policy[rows, :_TOKENS]
        evaluation = Evaluation(trainer.model, at_reported_ids(few.support.ids, few.support.log_tail))
        ids = torch.cat((prompt, completion), 1)
        trainer._get_per_token_logps_and_entropies(evaluation, ids, attention, completion.shape[1])
        difference = (evaluation.log_probs - few.log_probs).abs()
        return torch.where(counted > 0, difference, 0.0).sum(), counted.sum().to(difference.dtype)


def _engine_dtype(generation: Any) -> torch.dtype | None:
    """Of the weights of a colocated engine, which rounds float32 models unless it is told otherwise."""
    llm = getattr(generation, "llm", None)
    return None if llm is None else llm.llm_engine.model_config.dtype
