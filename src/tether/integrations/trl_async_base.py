"""What our asynchronous trainers on TRL's share: records of the sampler, their checks, and its health."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# First, because it says what to install where TRL is missing or another version.
from tether.integrations import trl_async_seam  # noqa: F401

# isort: split
import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import PreTrainedModel
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.trainer.utils import get_config_model_id, maybe_gather_lm_head_ctx

from tether.integrations.lag_metrics import by_process, lag_totals, lags_of_all
from tether.integrations.sampler_reports import at_reported_ids, ids_to_ask_for
from tether.integrations.sparse_head import SparseHeadOutput, add_sparse_head
from tether.integrations.trl_async_check import TransferCheck
from tether.integrations.trl_async_cpu import attend_on_cpu, without_peak_flops
from tether.integrations.trl_async_records import (
    IDS,
    LOG_PROBS,
    LOG_TAIL,
    STEP,
    CheckedQueue,
    RecordCollator,
)
from tether.integrations.trl_async_worker import abandoning, check_records, record
from tether.integrations.trl_config import check_kept_ids, check_penalties
from tether.integrations.vllm_server import VLLMServer
from tether.losses import ProjectedTokens, project_tokens
from tether.projection import SampledPolicy, SparseLogProbs
from tether.projection.sparse import EMPTY


def truncates(args: Any) -> bool:
    """Whether sampling keeps a set of ids."""
    return args.top_k > 0 or args.top_p < 1.0 or bool(args.min_p)


class RecordedTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` that knows the distributions its sequences were sampled from.

    Args besides those of `AsyncGRPOTrainer`:

        model: may also be a model of Transformers, loaded already.
        support_top_k: ids that the server reports of each token.
        sampler_tolerance: as `troll_sampler_tolerance` of `TROLLConfig`.

    On a CPU attention over packed rows is computed in plain torch.

    Raises:
        ConfigError: penalties, with which the check of the server's weights could not pass; a rollout worker
            with a loop of its own that does not record.
    """

    #: Of the server's weights, where it is known; the server is asked otherwise.
    engine_dtype: torch.dtype | None = None
    rollout_queue: Any
    _signature_columns: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *rest: Any,
        support_top_k: int,
        sampler_tolerance: float | None = None,
        **kwargs: Any,
    ) -> None:
        #: The optimizer step at which each version of the policy was published.
        self._published: dict[int, int] = {}
        self._transfer_check: TransferCheck | None = None
        #: That TRL's worker talks to, in the process that talks to it.
        self._server: VLLMServer | None = None
        worker = kwargs.get("rollout_worker")
        served = self._is_served(worker)
        if isinstance(worker, AsyncRolloutWorker):
            check_records(worker)
        args = self._settings(model) if args is None else args
        check_penalties(args, sampler_tolerance)
        check_kept_ids(args, support_top_k)
        on_cpu = args.device.type == "cpu"
        with without_peak_flops(active=on_cpu), _loaded_already(model, on_cpu=on_cpu) as name:
            super().__init__(name, reward_funcs, args, *rest, **kwargs)
        base = self.base_model
        add_sparse_head(base, self.temperature, maybe_gather_lm_head_ctx)
        if on_cpu:
            attend_on_cpu(base)
        #: Ids the model has logits of.
        self.vocabulary_size = int(base.config.get_text_config().vocab_size)
        server = VLLMServer(args.vllm_server_base_url)
        asked = ids_to_ask_for(support_top_k, args.top_k, self.vocabulary_size)
        if served:
            self._transfer_check = TransferCheck(
                self, server, asked, truncated=truncates(args), tolerance=sampler_tolerance
            )
        if not self.accelerator.is_main_process:
            return
        if served:
            self._server = server
            record(self.rollout_worker, asked, server.check)
        self.rollout_queue = CheckedQueue(
            self.rollout_queue, self._published, truncated=truncates(args),
            vocabulary_size=self.vocabulary_size,
        )  # fmt: skip

    @staticmethod
    def _settings(model: Any) -> AsyncGRPOConfig:
        """TRL's defaults, with its rule for where the results go."""
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return AsyncGRPOConfig(f"{name.split('/')[-1]}-AsyncGRPO")

    @staticmethod
    def _is_served(worker: Any) -> bool:
        """Whether TRL's own worker writes the rollouts, which every process has to know."""
        return worker is None or isinstance(worker, AsyncRolloutWorker)

    @property
    def base_model(self) -> Any:
        """The model of Transformers under wrappers and adapters."""
        whole = self.accelerator.unwrap_model(self.model)
        return whole.get_base_model() if is_peft_model(whole) else whole

    @contextlib.contextmanager
    def attending_plainly(self) -> Iterator[None]:
        """While the model writes text itself: attention as in any model, not over packed rows."""
        base = self.base_model
        packed = base.config._attn_implementation
        base.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            base.set_attn_implementation(packed)

    def _sync_weight(self) -> None:
        with abandoning(self.rollout_worker):
            if self._server is not None and not self._published:  # it may still load its model
                self._server.wait(self.args.vllm_server_timeout)
            super()._sync_weight()
            self._published[self.model_version] = int(self.state.global_step)
            if self._transfer_check is not None:
                latest = self.rollout_queue.latest if self.accelerator.is_main_process else ()
                self._transfer_check.after_transfer(latest)

    def get_train_dataloader(self) -> Any:
        """TRL's, whose batches also hold the sampler's records."""
        loader = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)
        inner.collate_fn = RecordCollator(inner.collate_fn)
        return loader

    def _set_signature_columns_if_needed(self) -> None:
        unset = self._signature_columns is None
        super()._set_signature_columns_if_needed()
        if unset:
            self._signature_columns += [IDS, LOG_PROBS, LOG_TAIL, STEP]

    def see(self, inputs: dict[str, Any]) -> tuple[SparseLogProbs, SparseLogProbs]:
        """The network and the sampler at the loss terms of a packed row, on the sampler's ids, [M, K]."""
        packed = PackedPass(self.model, inputs)
        # It asks for this while a loss is computed, and a check may come before any.
        self.current_gradient_accumulation_steps = getattr(self, "current_gradient_accumulation_steps", 1)
        AsyncGRPOTrainer.compute_loss(self, packed, packed.without_advantages(inputs))
        return packed.seen, packed.old

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As TRL's, which averages over micro-batches, but for the oldest sequence."""
        if lags := self._metrics["train"].get("trust_region/lag"):
            lags[:] = [max(lags)]
        steps = self._metrics["train"].get("trust_region/mean_step")
        if steps and not any(weight for _, weight in steps):  # no token was projected: all steps were whole
            steps[:] = [(1.0, 1.0)]
        super().log(logs, *args, **kwargs)

    def _log_tokens(
        self, tokens: ProjectedTokens, metrics: dict[str, Tensor], lag: Tensor, mask: Tensor
    ) -> None:
        sink = self._metrics["train"]
        for name, values, weights in by_process(self.accelerator, metrics, tokens, mask):
            key = f"trust_region/{name}"
            if name.endswith("_max"):
                sink[key].append(max(values))
            else:  # TRL reduces a pair to the ratio of its sums
                # Without tokens a default of next to no weight; but few tokens are projected, if any.
                some = weights if sum(weights) or name == "mean_step" else [1.0] * len(weights)
                sink[key].append((sum(v * w for v, w in zip(values, some, strict=True)), sum(some)))
        sums, oldest = lags_of_all(self.accelerator, tokens, lag.amax(1), mask)
        sink["trust_region/lag"].append(oldest)
        for name, pair in lag_totals(sums).items():
            sink[f"trust_region/{name}"].append(pair)


class PackedPass:
    """Stands in for the model in TRL's loss: evaluates it where the sampler reported, at the loss terms.

    Args:
        model: that is trained.
        inputs: a packed row with the sampler's records.
        differentiable: TRL's loss gets log-probabilities with their graph.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], *, differentiable: bool = False) -> None:
        self._model, self._differentiable = model, differentiable
        self.chosen = inputs["token_index"] >= 0
        chosen = self.chosen
        self._positions = inputs["token_index"][chosen]
        #: The sampler's distributions, [M, K].
        self.old = SparseLogProbs(inputs[IDS][chosen], inputs[LOG_PROBS][chosen], inputs[LOG_TAIL][chosen])
        self._asked = at_reported_ids(self.old.ids[None], self.old.log_tail[None])
        self.labels: Tensor
        self.log_probs: Tensor  # of the labels, [M]
        self.output: SparseHeadOutput

    def __call__(self, *, shift_labels: Tensor, **kwargs: Any) -> SparseHeadOutput:
        """What TRL reads: log-probabilities and entropies of the loss terms."""
        self.labels = shift_labels[0, self._positions]
        self.output = self._model(
            **kwargs, labels=self.labels[None], label_positions=self._positions, **self._asked
        )
        output = self.output
        assert output.log_probs is not None
        assert output.entropy is not None
        self.log_probs = output.log_probs[0]
        return SparseHeadOutput(
            log_probs=output.log_probs if self._differentiable else output.log_probs.detach(),
            entropy=output.entropy.detach(),
            aux_loss=output.aux_loss,
        )

    @property
    def seen(self) -> SparseLogProbs:
        """The network on the sampler's ids, [M, K]."""
        return self.output.support(len(self.labels))[0]

    def numbered(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What TRL's loss is given, so that it finds the loss terms in what the pass returns."""
        return {**inputs, "token_index": torch.where(self.chosen, self.chosen.long().cumsum(-1) - 1, -1)}

    def without_advantages(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The same, for its metrics alone."""
        return {**self.numbered(inputs), "advantages": torch.zeros_like(inputs["advantages"])}

    def projected(
        self, inputs: dict[str, Any], global_step: int, **region: Any
    ) -> tuple[ProjectedTokens, _Sequences, Tensor, Tensor]:
        """What a trust region around the sampler says of the tokens, [S, T]; also lag and mask."""
        rows = _Sequences(inputs["segment_id"][self.chosen])
        mask = rows.spread(torch.ones_like(inputs["old_log_probs"][self.chosen]), 0.0)
        lag = (global_step - inputs[STEP][self.chosen]).clamp_min(0)
        response_ids, lag = rows.spread(self.labels, 0), rows.spread(lag, 0)
        old = SparseLogProbs(
            rows.spread(self.old.ids, EMPTY),
            rows.spread(self.old.log_probs, -torch.inf),
            rows.spread(self.old.log_tail, 0.0),
        )
        seen = self.seen
        new = SparseLogProbs(
            old.ids, rows.spread(seen.log_probs, -torch.inf), rows.spread(seen.log_tail, 0.0)
        )
        tokens = project_tokens(
            new, SampledPolicy(old, response_ids, lag), response_ids, mask,
            log_probs=rows.spread(self.log_probs, 0.0), **region,
        )  # fmt: skip
        return tokens, rows, lag, mask


class _Sequences:
    """Loss terms [M] of a packed row by their sequences, [S, T], padded on the right."""

    def __init__(self, segment: Tensor) -> None:
        counts = segment.bincount()
        first = counts.cumsum(0) - counts
        self._at = segment, torch.arange(len(segment), device=segment.device) - first[segment]
        self._shape = len(counts), int(counts.max())

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Put [M, ...] at their places [S, T, ...]."""
        whole = values.new_full((*self._shape, *values.shape[1:]), fill)
        return whole.index_put(self._at, values)


@contextlib.contextmanager
def _loaded_already(model: Any, *, on_cpu: bool) -> Iterator[Any]:
    """What to call a model by while TRL makes its trainer, which loads models by name alone."""
    if not isinstance(model, PreTrainedModel):
        yield model
        return

    def take(*_: Any, attn_implementation: str, **__: Any) -> Any:
        if not on_cpu:
            model.set_attn_implementation(attn_implementation)
        return model

    load, async_grpo_trainer.create_model_from_path = async_grpo_trainer.create_model_from_path, take
    try:
        yield model.config._name_or_path
    finally:
        async_grpo_trainer.create_model_from_path = load
