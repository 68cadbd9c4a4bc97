"""What the engine calls in place of verl's loss: once with the logits, once with everything else.

verl made this seam for distillation: with `distillation_use_topk` in the batch its engine first hands
the temperature-scaled logits of a micro-batch to the loss function and keeps what comes back, one value a
position, as model outputs; then it calls the loss function again with these. `distillation_only` makes
it leave the sampled tokens' log-probabilities to the first call, which computes them in float32 anyway.
Under exact support what arrives as logits are hidden states (`head.py`); `views.py` knows the difference.
"""

from __future__ import annotations

import contextvars
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from tether.errors import ConfigError
from tether.integrations.verl import carrier
from tether.integrations.verl.layout import (
    CountedTokens,
    Partition,
    counted_tokens,
    refuse_padded_batch,
    spread,
)
from tether.integrations.verl.one_pass import loss_in_one_pass
from tether.integrations.verl.sampler_clock import Lags
from tether.integrations.verl.settings import LOSS_MODE, MODEL_TYPE, TROLLPolicyLossConfig
from tether.integrations.verl.store import Kept, OldPolicyStore
from tether.integrations.verl.views import HiddenView, Projected, Recorded, View
from tether.losses import PolicyLoss, troll_objective
from tether.projection.tokens import ProjectedTokens, masked_max, masked_mean

_LOG_PROBS, _ENTROPY = "log_probs", "entropy"


class ScorePolicy:
    """Stands in for the loss in a pass that scores and is not recorded: log-probabilities without logits."""

    def __init__(self, view: View, partition: Partition) -> None:
        self.view = view
        self._partition = partition

    def __call__(
        self,
        model_output: dict[str, Any] | None = None,
        data: Any = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        data_format: str = "thd",
    ) -> Any:
        """First call: the sampled tokens' log-probabilities. Second: what else the batch gets."""
        if student_logits is None:
            assert model_output is not None
            model_output.update(self._fields(data))
            return torch.zeros(()), {}
        refuse_data_format(data_format)
        columns = student_logits.shape[1]
        tokens = counted_tokens(data, columns, self._partition.sequence(), self._partition.alignment)
        seen = self._see(student_logits, tokens, data)
        return {name: spread(value, tokens.rows, columns) for name, value in seen.items()}

    def _see(self, rows: Tensor, tokens: CountedTokens, data: Any) -> dict[str, Tensor]:
        """What the batch gets of each token."""
        assert isinstance(self.view, HiddenView)
        return _scores(*self.view.score(rows, tokens, data))

    def _fields(self, data: Any) -> dict[str, Tensor]:
        return {}


class RecordOldPolicy(ScorePolicy):
    """The same in the pass that scores the rollouts, keeping what it sees."""

    def __init__(self, view: View, partition: Partition, store: OldPolicyStore) -> None:
        super().__init__(view, partition)
        self._store = store
        self._recorded: Recorded | None = None

    def _see(self, rows: Tensor, tokens: CountedTokens, data: Any) -> dict[str, Tensor]:
        self._recorded = recorded = self.view.record(rows, tokens, data)
        return _scores(recorded.log_probs, recorded.entropy)

    def _fields(self, data: Any) -> dict[str, Tensor]:
        """By which updates find the old policy again."""
        recorded, self._recorded = self._recorded, None
        assert recorded is not None
        fields = carrier.pack(recorded.support, data["response_mask"])
        return self._store.put({**fields, **(recorded.fields or {})})


def _scores(log_probs: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
    return {_LOG_PROBS: log_probs} if entropy is None else {_LOG_PROBS: log_probs, _ENTROPY: entropy}


# What the second call does not need, and so does not travel.
_STAYS = ("new_log_probs", "step", "entropy")
_PREFIX = "troll_"


def _as_outputs(
    projected: Projected, tokens_of_batch: CountedTokens, columns: int, with_entropy: bool
) -> dict[str, Tensor]:
    """The projection as model outputs, one value a position: how the engine keeps it for the second call."""
    tokens, log_probs = projected
    values = {_PREFIX + name: value for name, value in tokens.known().items() if name not in _STAYS}
    values[_LOG_PROBS] = log_probs
    if with_entropy and tokens.entropy is not None:
        values[_ENTROPY] = tokens.entropy
    return {
        name: spread(value.to(tokens.kl.dtype), tokens_of_batch.rows, columns)
        for name, value in values.items()
    }


def _from_outputs(model_output: dict[str, Any], data: TensorDict) -> ProjectedTokens:
    """The projection again, [B, T]."""
    found = {
        name.removeprefix(_PREFIX): no_padding_2_padding(value, data)
        for name, value in model_output.items()
        if name.startswith(_PREFIX)
    }
    found["projected"] = found["projected"] > 0
    # Nothing more is asked of the network's own, which verl reads beside it, nor of the step.
    log_probs = no_padding_2_padding(model_output[_LOG_PROBS], data)
    return ProjectedTokens(new_log_probs=log_probs, step=torch.ones_like(log_probs), **found)


#: Handed from `TROLLLoss` to the policy loss through verl's loss function between them.
_tokens: contextvars.ContextVar[ProjectedTokens | None] = contextvars.ContextVar("troll_tokens", default=None)


class TROLLLoss:
    """Wraps verl's `ppo_loss`: projects when called with logits, delegates when called for the loss.

    Entropy bonus, reference penalty, aggregation and rollout weights stay verl's.

    Args:
        tokens: response tokens of the mini-batch that count, of all processes.
    """

    def __init__(
        self,
        ppo_loss: Callable[..., Any],
        settings: TROLLPolicyLossConfig,
        view: View,
        partition: Partition,
        store: Kept,
        lags: Lags | None = None,
        *,
        tokens: int,
        in_one_pass: bool = False,
    ) -> None:
        self._ppo_loss = ppo_loss
        self._settings = settings
        self.view = view
        self._partition = partition
        self._store = store
        self._lags = lags
        self._tokens = tokens
        self._in_one_pass = in_one_pass
        self._waiting: Tensor | None = None
        self._seconds = 0.0

    def __call__(
        self,
        model_output: dict[str, Any] | None = None,
        data: Any = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        data_format: str = "thd",
    ) -> Any:
        """First call: what the projection says of each token, or nothing yet. Second: loss and metrics."""
        if student_logits is not None:
            refuse_data_format(data_format)
            if self._in_one_pass and torch.is_grad_enabled():
                self._waiting = student_logits
                return {}
            return self._project(student_logits, data)
        assert model_output is not None
        rows, self._waiting = self._waiting, None
        of_verl = functools.partial(self._loss, model_output, data, dp_group)
        found = of_verl() if rows is None else self._with_the_head(rows, model_output, data, of_verl)
        return found.loss, found.metrics | self._costs()

    def _loss(self, model_output: dict[str, Any], data: TensorDict, dp_group: Any) -> PolicyLoss:
        """verl's, of values a position."""
        tokens = _from_outputs(model_output, data)
        before = _tokens.set(tokens)
        try:
            loss, metrics = self._ppo_loss(model_output=model_output, data=data, dp_group=dp_group)
        finally:
            _tokens.reset(before)
        by_lag = {} if self._lags is None else self._lags.metrics(tokens, data)
        own = _metrics(tokens, data, self._settings, data["dp_size"] / max(1, self._tokens))
        return PolicyLoss(loss, metrics | own | by_lag)

    def _with_the_head(
        self, rows: Tensor, model_output: dict[str, Any], data: TensorDict, of_verl: Callable[[], PolicyLoss]
    ) -> PolicyLoss:
        """The same of hidden states, with the gradient that reaches them."""
        start, columns = time.perf_counter(), rows.shape[1]
        tokens = counted_tokens(data, columns, self._partition.sequence(), self._partition.alignment)

        def verls(found: ProjectedTokens) -> PolicyLoss:
            values = _as_outputs((found, found.new_log_probs), tokens, columns, self.view.with_entropy)
            lengths = data["input_ids"].offsets()
            model_output.update(
                {name: nested_tensor_from_jagged(value[0], lengths) for name, value in values.items()}
            )
            return of_verl()

        assert isinstance(self.view, HiddenView)
        config = self._ppo_loss.keywords["config"]  # type: ignore[attr-defined]
        fields = self._store.take(data, rows.device)
        found = loss_in_one_pass(self.view, rows, tokens, data, fields, config, verls)
        self._seconds = time.perf_counter() - start
        return found

    def _project(self, rows: Tensor, data: TensorDict) -> dict[str, Tensor]:
        start, columns = time.perf_counter(), rows.shape[1]
        tokens = counted_tokens(data, columns, self._partition.sequence(), self._partition.alignment)
        projected = self.view.project(rows, tokens, data, self._store.take(data, rows.device))
        self._seconds = time.perf_counter() - start
        return _as_outputs(projected, tokens, columns, self.view.with_entropy)

    def _costs(self) -> dict[str, Metric]:
        return {
            "actor/troll/store_bytes": Metric(AggregationType.MAX, self._store.nbytes),
            "actor/troll/record_seconds": Metric(AggregationType.MAX, self._store.record_seconds),
            "actor/troll/projection_seconds": Metric(AggregationType.SUM, self._seconds),
        }


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


def _metrics(tokens: ProjectedTokens, data: TensorDict, settings: Any, share: float) -> dict[str, Metric]:
    """Means over the tokens of the global mini-batch, whatever the micro-batches; maxima over all.

    Args:
        share: of a token in a mean that verl first adds up and then averages over processes.
    """
    mask = data["response_mask"].to_padded_tensor(0).to(tokens.kl.dtype)
    ratio = troll_objective(tokens, mask, mask, ratio_level=settings.troll_ratio).ratio.detach()
    after = None if math.isinf(settings.troll_kl_bound) else tokens.projected_kl
    means = {
        "kl_mean": tokens.kl,
        "kl_projected_mean": after,
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
    maxima = {"kl_max": tokens.kl, "kl_projected_max": after, "ratio_max": ratio}
    for name, value in maxima.items():
        if value is not None:
            result[f"actor/troll/{name}"] = Metric(AggregationType.MAX, masked_max(value, mask))
    return result


def refuse_missing_old_policy(data: TensorDict, store: Kept) -> None:
    """Refuse to update without what the old pass records, or the sampler."""
    refuse_padded_batch(data)
    missing = [name for name in store.needed if name not in data.keys()]  # noqa: SIM118  (a TensorDict)
    if missing:
        raise ConfigError(f"The batch lacks {', '.join(missing)}: {store.remedy}")
