"""The bound of `tether.step_back` in TRL: after the updates on a batch of rollouts the network is within a
budget of the policy that wrote them, measured over the whole vocabulary.

It works with every trainer built on `OldPolicyTrainer`, and so with every method: the old policy's hidden
states are kept with the rollouts, whatever the loss looks at, and the network is measured against them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.errors import CheckpointError, ConfigError, InvalidInputError
from tether.integrations.exact_head import HeadSnapshot, OldTokens
from tether.integrations.trl_evaluation import Evaluation
from tether.integrations.trl_old_policy import HIDDEN, loss_mask, old_support, unpack
from tether.integrations.trl_resume import as_sharded, write_tensors
from tether.step_back import StepBack
from tether.step_back_search import PASSES, Statistic, check_step_back

# isort: split
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import GRPOTrainer


@dataclass(frozen=True)
class StepBackOptions:
    """A budget of divergence for the network itself: give it to a trainer as `step_back`.

    After the last update on a batch of rollouts (and after every `every`-th) KL(new || old) of the batch's
    response tokens is measured over the whole vocabulary. Where it exceeds the budget, the trained weights
    go back along the line to those that sampled, as `tether.step_back.StepBack` describes: at most `passes`
    forward passes over the batch, no copy of the weights on the accelerator, and only a point that was
    measured is kept.

    Logs, in the rows of updates after which it was measured, `step_back/kl_before` and `step_back/kl` (the
    statistic before and after, in nats), `step_back/fraction` (of the way that was kept) and
    `step_back/passes`. A checkpoint between two updates on a batch holds the old weights in
    `step_back-<process>.safetensors`.

    Works with every trust region and estimator around the trainer's own policy, under DDP and FSDP2, with
    LoRA (the adapters move), gradient accumulation and packing. With a method that keeps a few likely ids
    alone, the hidden states of the response tokens are kept as well. Dropout would be measured as divergence.

    Raises:
        ConfigError: settings out of range; the sampler as the anchor; a batch that serves one update, or
            updates that span batches; DeepSpeed, FSDP1 or a schedule-free optimizer, which keep weights of
            their own.
        CheckpointError: on resuming inside a batch without the old weights.

    Example:
        ```python
        trainer = TROLLTrainer(
            model, reward, args, train_dataset=dataset, step_back=StepBackOptions(budget=0.02)
        )
        ```
    """

    budget: float
    """In nats: what KL(new || old) of a batch's response tokens must not exceed after its updates."""
    statistic: Statistic = "mean"
    """Of the tokens: "mean", "max", or a quantile such as 0.99."""
    passes: int = PASSES
    """Passes over the batch that bringing it back may take; the first is at the new weights."""
    every: int | None = None
    """Updates between two measurements within a batch; by default there is one, after the last."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        try:
            check_step_back(self.budget, self.statistic, self.passes)
        except InvalidInputError as error:
            raise ConfigError(str(error)) from error
        whole = isinstance(self.every, int) and not isinstance(self.every, bool)
        if self.every is not None and not (whole and self.every >= 1):
            raise ConfigError(f"every must be a whole number of updates of at least 1, got {self.every!r}.")


class StepBackCallback(TrainerCallback):
    """Notes the weights that sample, and holds the network to them; trainers add it to themselves."""

    def __init__(self, trainer: Any, options: StepBackOptions | float) -> None:
        if not isinstance(options, StepBackOptions):
            options = StepBackOptions(options)
        _check_trainer(trainer, options)
        self.options = options
        self._trainer = trainer
        self._updates = trainer._updates_a_rollout
        self._step_back: StepBack | None = None
        self._enforced: int | None = None  # after which update the network was last held to the budget
        if not trainer.keep_hidden:
            trainer.keep_hidden = True
            trainer.keep_head = False  # it is among the weights that are noted here

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Now the parameters are those that the optimizer moves, sharded ones included."""
        o = self.options
        self._step_back = StepBack(self._trainer.model, o.budget, statistic=o.statistic, passes=o.passes)
        if state.global_step % self._updates:
            self._take_up(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the first update on a batch, which begins with writing it."""
        if state.global_step % self._updates == 0:
            self._at_work.record()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before anything sees the new weights: a reference policy, an evaluation, a checkpoint."""
        done = state.global_step + 1
        in_batch, every = done % self._updates, self.options.every
        if in_batch and done != state.max_steps and not (every and in_batch % every == 0):
            return
        self._enforce(done)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training that another callback ended inside a batch, unless it loaded other weights at its end."""
        step = state.global_step
        if step % self._updates and step != self._enforced and not args.load_best_model_at_end:
            self._enforce(step)
            self._trainer.log({})

    def _enforce(self, step: int) -> None:
        self._enforced = step
        head = self._old_head()
        result = self._at_work.enforce(lambda: self._measure(head))
        metrics = self._trainer._metrics["train"]
        metrics["step_back/fraction"].append(result.fraction)
        metrics["step_back/kl_before"].append(result.divergence_before)
        metrics["step_back/kl"].append(result.divergence)
        metrics["step_back/passes"].append(float(result.passes))

    def save(self, folder: Path) -> None:
        """A checkpoint inside a batch holds the weights that sampled it."""
        if self._trainer.state.global_step % self._updates:
            write_tensors(self._file(folder), self._at_work.state_dict())

    @property
    def _at_work(self) -> StepBack:
        assert self._step_back is not None, "training has not begun"
        return self._step_back

    def _file(self, folder: Path) -> Path:
        return folder / f"step_back-{self._trainer.accelerator.process_index}.safetensors"

    def _take_up(self, step: int) -> None:
        folder = self._trainer.resumed_from
        file = None if folder is None else self._file(folder)
        if file is None or not file.is_file():
            before = step - step % self._updates
            raise CheckpointError(
                f"The checkpoint {folder} was written inside a batch of rollouts without a bound on the "
                "network, so the weights that sampled the batch are not in it. Continue from a checkpoint "
                f"at a multiple of {self._updates} updates, such as {before} or {before + self._updates}."
            )
        try:
            self._at_work.load_state_dict(load_file(file))
        except InvalidInputError as error:
            raise CheckpointError(f"{file}: {error}") from error

    def _old_head(self) -> HeadSnapshot | None:
        """The LM head that sampled: the trainer's, or the one noted here; None where it is frozen."""
        if self._trainer._old_head is not None:
            kept: HeadSnapshot = self._trainer._old_head
            return kept
        head = self._trainer._base_model.get_output_embeddings()
        parameters = head.weight, head.bias
        noted = [None if p is None else self._at_work.recorded(p) for p in parameters]
        if noted[0] is None and noted[1] is None:
            return None
        weight, bias = (
            p if p is None or n is None else as_sharded(n.to(p.device), p)
            for p, n in zip(parameters, noted, strict=True)
        )
        return HeadSnapshot(weight, bias)

    @torch.no_grad()
    def _measure(self, head: HeadSnapshot | None) -> Tensor:
        """KL(new || old) of the response tokens of this process's batch."""
        found = []
        for batch in self._trainer._buffered_inputs:
            inputs = unpack(batch)
            mask = loss_mask(inputs)
            old = OldTokens(
                inputs[HIDDEN], old_support(inputs), mask, head, math.inf, region="token", only_kl=True
            )
            found.append(_evaluate(self._trainer, inputs, old).kl[mask > 0])
        return torch.cat(found)


def _evaluate(trainer: Any, inputs: dict[str, Any], old: OldTokens) -> Evaluation:
    """One pass of the network over a micro-batch, through TRL's scoring loop."""
    packing = {"pack_sequences": trainer.pack_sequences} if trainer.pack_sequences else {}
    evaluation = Evaluation(trainer.model, {"old_tokens": old, **packing})
    score: Callable[..., Any] = trainer._get_per_token_logps_and_entropies
    known = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    score(
        evaluation,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].shape[1],
        **{name: value for name, value in inputs.items() if name in known},  # images and what belongs to them
    )
    return evaluation


def _check_trainer(trainer: Any, options: StepBackOptions) -> None:
    if trainer.anchor == "sampler":
        raise ConfigError(
            "step_back measures the network against the hidden states of the old policy, and "
            'anchor="sampler" makes no pass that has them. Use anchor="trainer", or kl_stop, which reads the '
            "records."
        )
    trainer._check_whole_updates()
    if trainer._micro_batches_a_rollout == trainer.args.gradient_accumulation_steps:
        raise ConfigError(
            "Each batch of rollouts serves one update here, for which TRL records no old policy, so there is "
            "nothing to measure the network against. Set steps_per_generation or num_iterations higher."
        )
    updates = trainer._updates_a_rollout
    if options.every is not None and options.every > updates:
        raise ConfigError(f"every={options.every} is more than the {updates} updates on a batch of rollouts.")
    _check_weights(trainer)


def _check_weights(trainer: Any) -> None:
    """Refuse what keeps weights of its own, which would not go back."""
    remedy = None
    if trainer.is_deepspeed_enabled:
        remedy = "DeepSpeed keeps its own copies of the weights: train with DDP or FSDP2"
    elif trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        remedy = 'FSDP1 keeps flat shards of the weights: use FSDP2 ("fsdp_version": 2)'
    elif "schedule_free" in (optim := getattr(trainer.args.optim, "value", trainer.args.optim)):
        remedy = f"optim={optim} averages weights of its own: choose another, such as adamw_torch"
    if remedy is not None:
        raise ConfigError(f"The network cannot be taken back to the weights that sampled. {remedy}.")
