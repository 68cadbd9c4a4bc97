"""What the engine calls in place of verl's loss: once with the logits, once with everything else.

verl made this seam for distillation: with `distillation_use_topk` in the batch its engine first hands
the temperature-scaled logits of a micro-batch to the loss function and keeps what comes back, one value a
position, as model outputs; then it calls the loss function again with these. `distillation_only` makes
it leave the sampled tokens' log-probabilities to the first call, which computes them in float32 anyway.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from tether.errors import ConfigError
from tether.integrations.logits_hooks import (
    VocabularyShard,
    project_on_old_policy,
    record_old_policy,
)
from tether.integrations.verl import carrier
from tether.integrations.verl.layout import CountedTokens, counted_tokens, refuse_padded_batch, spread
from tether.integrations.verl.settings import LOSS_MODE, MODEL_TYPE, TROLLPolicyLossConfig
from tether.losses.troll import troll_objective
from tether.projection import SparseLogProbs
from tether.projection.tokens import ProjectedTokens, masked_max, masked_mean

SequenceShard = Callable[[], tuple[int, int]]
_LOG_PROBS = "log_probs"


@dataclass(frozen=True)
class Partition:
    """How the logits of a micro-batch are spread over processes."""

    sequence: SequenceShard
    """Rank and size of the group each sequence is cut over."""
    vocabulary: Callable[[int], VocabularyShard | None]
    """From the columns of this process's logits to the shard they are."""
    alignment: int = 1
    """Each packed sequence is padded to a multiple of this many positions."""


class RecordOldPolicy:
    """Stands in for the loss in the pass that scores the rollouts, and keeps what it sees."""

    def __init__(self, settings: TROLLPolicyLossConfig, partition: Partition) -> None:
        self._settings = settings
        self._partition = partition
        self._recorded: SparseLogProbs | None = None

    def __call__(
        self,
        model_output: dict[str, Any] | None = None,
        data: Any = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        data_format: str = "thd",
    ) -> Any:
        """First call: the sampled tokens' log-probabilities. Second: the four fields of `carrier`."""
        if student_logits is not None:
            return self._record(student_logits, data, data_format)
        assert model_output is not None
        recorded, self._recorded = self._recorded, None
        assert recorded is not None
        model_output.update(carrier.pack(recorded, data["response_mask"]))
        return torch.zeros(()), {}

    def _record(self, logits: Tensor, data: TensorDict, data_format: str) -> dict[str, Tensor]:
        refuse_data_format(data_format)
        rank, size = self._partition.sequence()
        tokens = counted_tokens(data, logits.shape[1], (rank, size), self._partition.alignment)
        old = record_old_policy(
            logits[0],
            tokens.sampled_ids,
            top_k=self._settings.troll_top_k,
            mass=self._settings.troll_mass,
            rows=tokens.rows,
            shard=self._partition.vocabulary(logits.shape[-1]),
        )
        log_probs = old.log_prob_of(tokens.sampled_ids)
        self._recorded = old if size == 1 else self._gather(old, tokens)
        return {_LOG_PROBS: spread(log_probs, tokens.rows, logits.shape[1])}

    def _gather(self, old: SparseLogProbs, tokens: CountedTokens) -> SparseLogProbs:
        """The distributions of the whole micro-batch from the slices of all processes."""
        from verl.utils.ulysses import get_ulysses_sequence_parallel_group

        group = get_ulysses_sequence_parallel_group()
        total = int(tokens.per_sequence.sum())

        def whole(values: Tensor) -> Tensor:
            # Every token is on one process only, so that a sum puts each in its place.
            places = values.new_zeros((total, *values.shape[1:])).index_copy(0, tokens.index, values)
            torch.distributed.all_reduce(places, group=group)
            return places

        assert old.log_tail_min is not None
        return SparseLogProbs(
            whole(old.ids), whole(old.log_probs), whole(old.log_tail), whole(old.log_tail_min)
        )


# What the second call does not need, and so does not travel.
_STAYS = ("new_log_probs", "step", "entropy")
_PREFIX = "troll_"


def _as_outputs(tokens: ProjectedTokens, tokens_of_batch: CountedTokens, columns: int) -> dict[str, Tensor]:
    """The projection as model outputs, one value a position: how the engine keeps it for the second call."""
    values = {name: value for name, value in tokens.known().items() if name not in _STAYS}
    return {
        _PREFIX + name: spread(value.to(tokens.kl.dtype), tokens_of_batch.rows, columns)
        for name, value in values.items()
    } | {_LOG_PROBS: spread(tokens.new_log_probs, tokens_of_batch.rows, columns)}


def _from_outputs(model_output: dict[str, Any], data: TensorDict) -> ProjectedTokens:
    """The projection again, [B, T]."""
    found = {
        name.removeprefix(_PREFIX): no_padding_2_padding(value, data)
        for name, value in model_output.items()
        if name.startswith(_PREFIX)
    }
    found["projected"] = found["projected"] > 0
    log_probs = no_padding_2_padding(model_output[_LOG_PROBS], data)
    return ProjectedTokens(new_log_probs=log_probs, step=torch.ones_like(log_probs), **found)


#: Handed from `TROLLLoss` to the policy loss through verl's loss function between them.
_tokens: contextvars.ContextVar[ProjectedTokens | None] = contextvars.ContextVar("troll_tokens", default=None)


class TROLLLoss:
    """Wraps verl's `ppo_loss`: projects when called with logits, delegates when called for the loss.

    Entropy bonus, reference penalty, aggregation and rollout weights stay verl's.
    """

    def __init__(
        self, ppo_loss: Callable[..., Any], settings: TROLLPolicyLossConfig, partition: Partition
    ) -> None:
        self._ppo_loss = ppo_loss
        self._settings = settings
        self._partition = partition

    def __call__(
        self,
        model_output: dict[str, Any] | None = None,
        data: Any = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        data_format: str = "thd",
    ) -> Any:
        """First call: what the projection says of each token. Second: the loss and its metrics."""
        if student_logits is not None:
            return self._project(student_logits, data, data_format)
        assert model_output is not None
        tokens = _from_outputs(model_output, data)
        before = _tokens.set(tokens)
        try:
            loss, metrics = self._ppo_loss(model_output=model_output, data=data, dp_group=dp_group)
        finally:
            _tokens.reset(before)
        return loss, metrics | _metrics(tokens, data, self._settings)

    def _project(self, logits: Tensor, data: TensorDict, data_format: str) -> dict[str, Tensor]:
        refuse_data_format(data_format)
        rank, size = self._partition.sequence()
        tokens = counted_tokens(data, logits.shape[1], (rank, size), self._partition.alignment)
        sequence_lengths = None
        if self._settings.troll_region == "sequence":
            if size > 1:
                raise ConfigError(
                    "actor_rollout_ref.actor.policy_loss.troll_region=sequence needs whole sequences on each "
                    f"process, but sequence parallelism cuts them over {size}. Use troll_region=token or "
                    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1."
                )
            sequence_lengths = tokens.per_sequence
        projection = project_on_old_policy(
            logits[0],
            tokens.sampled_ids,
            carrier.unpack(data, data["response_mask"])[tokens.index],
            kl_bound=self._settings.troll_kl_bound,
            support=self._settings.troll_support,  # type: ignore[arg-type]
            mass=self._settings.troll_mass,
            rows=tokens.rows,
            shard=self._partition.vocabulary(logits.shape[-1]),
            sequence_lengths=sequence_lengths,
        )
        return _as_outputs(projection, tokens, logits.shape[1])


def refuse_data_format(data_format: str) -> None:
    """Refuse Megatron's padded layout, in which positions are somewhere else."""
    if data_format != "thd":
        raise ConfigError(
            f"TROLL reads packed sequences, and the engine runs padded ones (data format {data_format}). Set "
            "actor_rollout_ref.model.use_remove_padding=True."
        )


@register_policy_loss(LOSS_MODE)
def troll_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """TROLL's objective in the form verl's `ppo_loss` asks for; see `tether.losses.troll`.

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T].
        loss_agg_mode: any of verl's.
        config: verl's actor configuration, `policy_loss` with TROLL's settings.
        rollout_is_weights: weights of the policy gradient [B, T]; the regression is not weighted.

    Raises:
        ConfigError: the engine is not TROLL's, so that nothing was projected.
    """
    tokens = _tokens.get()
    if tokens is None:
        raise ConfigError(
            f"policy_loss.loss_mode={LOSS_MODE} ran in an engine that does not project. Add "
            "actor_rollout_ref.model.external_lib=tether.integrations.verl and "
            f"+actor_rollout_ref.model.model_type={MODEL_TYPE}."
        )
    settings = config.policy_loss
    objective = troll_objective(
        tokens,
        advantages,
        response_mask,
        alpha=settings.troll_alpha,
        ratio_level=settings.troll_ratio,
        policy_weights=rollout_is_weights,
    )
    loss = agg_loss(objective.token_loss, response_mask, loss_agg_mode, **config.global_batch_info)
    # verl's estimate of KL(old || new), of the network itself, so that runs with other losses compare.
    return loss, {"actor/ppo_kl": masked_mean((old_log_prob - log_prob).detach(), response_mask).item()}


def _metrics(tokens: ProjectedTokens, data: TensorDict, settings: Any) -> dict[str, Metric]:
    """Means over the tokens of the global mini-batch, whatever the micro-batches; maxima over all."""
    mask = data["response_mask"].to_padded_tensor(0).to(tokens.kl.dtype)
    ratio = troll_objective(tokens, mask, mask, ratio_level=settings.troll_ratio).ratio.detach()
    share = data["dp_size"] / max(1, data["batch_num_tokens"])
    means = {
        "kl_mean": tokens.kl,
        "kl_projected_mean": tokens.projected_kl,
        "projected": tokens.projected,
        "regression": tokens.regression.detach(),
        "tail_mass": tokens.tail_mass,
        "ratio_mean": ratio,
        "certified": tokens.certified,
        "uncertain": tokens.uncertain,
    }
    result = {
        f"actor/troll/{name}": Metric(AggregationType.SUM, torch.where(mask > 0, value, 0.0).sum() * share)
        for name, value in means.items()
        if value is not None
    }
    maxima = {"kl_max": tokens.kl, "kl_projected_max": tokens.projected_kl, "ratio_max": ratio}
    for name, value in maxima.items():
        if value is not None:
            result[f"actor/troll/{name}"] = Metric(AggregationType.MAX, masked_max(value, mask))
    return result


def refuse_missing_old_policy(data: TensorDict) -> None:
    """Refuse to update without what the old pass records."""
    refuse_padded_batch(data)
    missing = [name for name in carrier.FIELDS if name not in data.keys()]  # noqa: SIM118  (a TensorDict)
    if missing:
        raise ConfigError(
            f"The batch lacks {', '.join(missing)}: the old policy was not scored by this engine. TROLL "
            "needs algorithm.rollout_correction.bypass_mode=False, so that verl recomputes old "
            "log-probabilities, and trainer.use_v1=True, which keeps what is recorded beside them."
        )
