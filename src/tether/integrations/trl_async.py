"""TROLL for TRL's asynchronous GRPO: the region is around the policy that sampled, however old that is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

# First, because they say what to install where TRL is missing or another version.
from tether.integrations import trl_async_seam  # noqa: F401
from tether.integrations.trl_config import RegionFields, lag_bound

# isort: split
import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.trainer.utils import maybe_gather_lm_head_ctx

from tether.errors import ConfigError, InvalidInputError, TetherWarning
from tether.integrations.lag_metrics import lag_means, lag_sums
from tether.integrations.sampler_reports import at_reported_ids
from tether.integrations.sparse_head import SparseHeadOutput, add_sparse_head
from tether.integrations.trl_async_cpu import attend_on_cpu, without_peak_flops
from tether.integrations.trl_async_records import (
    IDS,
    LOG_PROBS,
    LOG_TAIL,
    STEP,
    CheckedQueue,
    RecordCollator,
    record,
)
from tether.integrations.trl_card import PAPER
from tether.losses import ProjectedTokens, project_tokens, troll_objective
from tether.projection import SampledPolicy, SparseLogProbs
from tether.projection.sparse import EMPTY
from tether.settings import TROLLSettings

__all__ = ["AsyncTROLLConfig", "AsyncTROLLTrainer"]


@dataclass
class AsyncTROLLConfig(RegionFields, AsyncGRPOConfig):
    """`AsyncGRPOConfig` with the settings of the projection around the sampler.

    Raises:
        ConfigError: a value out of range, or one that belongs to the clip, with the remedy.
    """

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        try:
            TROLLSettings(self.troll_kl_bound, self.troll_alpha, self.troll_top_k, region=self.troll_region)
            lag_bound(self)
        except InvalidInputError as error:
            raise ConfigError(f"troll_{error}") from error
        if self.epsilon != 0.2 or self.epsilon_high is not None:
            raise ConfigError(
                f"epsilon={self.epsilon} and epsilon_high={self.epsilon_high} belong to the clip, which "
                "TROLL replaces. Leave them at their defaults and set troll_kl_bound."
            )
        if self.top_k > self.troll_top_k:
            raise ConfigError(
                f"top_k={self.top_k} keeps more ids than troll_top_k={self.troll_top_k} are reported of. Set "
                f"troll_top_k={self.top_k}."
            )
        if self.repetition_penalty != 1.0:
            warnings.warn(
                f"repetition_penalty={self.repetition_penalty} makes the sampler another policy than the "
                "network it is compared with. Leave it at 1 while training.",
                TetherWarning,
                stacklevel=3,
            )

    @property
    def truncates(self) -> bool:
        """Whether sampling keeps a set of ids."""
        return self.top_k > 0 or self.top_p < 1.0 or bool(self.min_p)


class AsyncTROLLTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` whose trust region is the projection around the policy that really sampled.

    Takes the arguments of `AsyncGRPOTrainer`, with `args` an `AsyncTROLLConfig`. TRL's rollout worker asks
    the vLLM server for the `troll_top_k` likeliest ids of each token; the server needs ``vllm serve
    --logprobs-mode processed_logprobs --max-logprobs -1``. A rollout worker of one's own puts
    `tether.integrations.trl_async_records.SamplerRecords` in the place of its samples' ``old_log_probs``.
    Staleness limit, tools, several turns, resuming and weight transfers are TRL's. On a CPU attention over
    packed rows is computed in plain torch.

    Logs what `TROLLTrainer` does with ``troll_anchor="sampler"``, `trust_region/lag` among them: in
    optimizer steps, of the weights that were published when a prompt's group began, so an upper bound for
    sequences that went on over a transfer. TRL's `clip_ratio/*` stay at zero.

    Source: TROLL (arXiv 2510.03817), around the behaviour policy.

    Raises:
        ConfigError: other settings than an `AsyncTROLLConfig`.

    Example:
        ```python
        from tether.integrations.trl_async import AsyncTROLLConfig, AsyncTROLLTrainer

        trainer = AsyncTROLLTrainer(
            model="Qwen/Qwen3-0.6B",
            reward_funcs=reward,
            args=AsyncTROLLConfig(output_dir="out", troll_lag_growth="linear", troll_lag_rate=0.25),
            train_dataset=dataset,
        )
        trainer.train()
        ```
    """

    _tag_names = ["trl", "async-grpo", "troll"]  # noqa: RUF012 (TRL's class attribute)
    _name = "AsyncTROLL"
    _paper = PAPER
    rollout_queue: Any
    _signature_columns: Any

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        if not isinstance(args, AsyncTROLLConfig):
            raise ConfigError(
                f"AsyncTROLLTrainer needs args=AsyncTROLLConfig(output_dir=...), got {type(args).__name__}. "
                "It takes every argument of AsyncGRPOConfig."
            )
        #: The optimizer step at which each version of the policy was published.
        self._published: dict[int, int] = {}
        with without_peak_flops(active=args.device.type == "cpu"):
            super().__init__(model, reward_funcs, args, *rest, **kwargs)
        whole = self.accelerator.unwrap_model(self.model)
        base = whole.get_base_model() if is_peft_model(whole) else whole
        add_sparse_head(base, self.temperature, maybe_gather_lm_head_ctx)
        if self.accelerator.device.type == "cpu":
            attend_on_cpu(base)
        if not self.accelerator.is_main_process:
            return
        if isinstance(self.rollout_worker, AsyncRolloutWorker):
            record(self.rollout_worker, args.troll_top_k)
        vocabulary = int(base.config.get_text_config().vocab_size)
        self.rollout_queue = CheckedQueue(
            self.rollout_queue, self._published, truncated=args.truncates, vocabulary_size=vocabulary
        )

    def _sync_weight(self) -> None:
        super()._sync_weight()
        self._published[self.model_version] = int(self.state.global_step)

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

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """TROLL's objective of a packed row; TRL's own loss is taken of nothing, for its metrics."""
        chosen = inputs["token_index"] >= 0
        packed = _Packed(model, inputs, chosen)
        numbered = torch.where(chosen, chosen.long().cumsum(-1) - 1, -1)
        without = {"token_index": numbered, "advantages": torch.zeros_like(inputs["advantages"])}
        super().compute_loss(packed, {**inputs, **without})
        loss = self._troll(packed, inputs, chosen)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * packed.output.aux_loss
        return loss / self.current_gradient_accumulation_steps

    def _troll(self, packed: _Packed, inputs: dict[str, Any], chosen: Tensor) -> Tensor:
        """The objective's part of an update, averaged over tokens as TRL does."""
        rows = _Sequences(inputs["segment_id"][chosen])
        mask = rows.spread(torch.ones_like(inputs["old_log_probs"][chosen]), 0.0)
        lag = (int(self.state.global_step) - inputs[STEP][chosen]).clamp_min(0)
        response_ids, lag = rows.spread(packed.labels, 0), rows.spread(lag, 0)
        old = SparseLogProbs(
            rows.spread(inputs[IDS][chosen], EMPTY),
            rows.spread(inputs[LOG_PROBS][chosen], -torch.inf),
            rows.spread(inputs[LOG_TAIL][chosen], 0.0),
        )
        seen = packed.output.support(len(packed.labels))[0]
        new = SparseLogProbs(
            old.ids, rows.spread(seen.log_probs, -torch.inf), rows.spread(seen.log_tail, 0.0)
        )
        bound = lag_bound(self.args)
        tokens = project_tokens(
            new, SampledPolicy(old, response_ids, lag), response_ids, mask,
            log_probs=rows.spread(packed.log_probs, 0.0), region=self.args.troll_region,
            kl_bound=bound.kl_bound if bound.growth == "constant" else bound,
        )  # fmt: skip
        advantages = rows.spread(inputs["advantages"][chosen], 0.0)
        objective = troll_objective(tokens, advantages, mask, alpha=self.args.troll_alpha)
        self._log_tokens(tokens, objective.metrics, lag, mask)
        share = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1.0)
        return torch.where(mask > 0, objective.token_loss, 0.0).sum() / share

    @torch.no_grad()
    def _log_tokens(
        self, tokens: ProjectedTokens, metrics: dict[str, Tensor], lag: Tensor, mask: Tensor
    ) -> None:
        sink = self._metrics["train"]
        acted = (tokens.projected & (mask > 0)).sum()
        row = torch.stack([mask.sum(), acted, *metrics.values()]).float()
        counted_by, acted_by, *columns = self.accelerator.gather(row[None]).t().tolist()
        for name, values in zip(metrics, columns, strict=True):
            key = f"trust_region/{name}"
            if name.endswith("_max"):
                sink[key].append(max(values))
            else:  # TRL reduces a pair to the ratio of its sums
                weights = acted_by if name == "mean_step" else counted_by
                weights = weights if sum(weights) else [1.0] * len(weights)  # a default, of next to no weight
                sink[key].append((sum(v * w for v, w in zip(values, weights, strict=True)), sum(weights)))
        sums = self.accelerator.gather(lag_sums(tokens, lag.amax(1), mask)[None]).sum(0)
        oldest = self.accelerator.gather(lag.max()).max().item()
        for name, mean in {**lag_means(sums), "lag": float(oldest)}.items():
            sink[f"trust_region/{name}"].append(mean)


class _Packed:
    """Stands in for the model in TRL's loss: evaluates it where the sampler reported, at the loss terms."""

    def __init__(self, model: Any, inputs: dict[str, Any], chosen: Tensor) -> None:
        self._model = model
        self._positions = inputs["token_index"][chosen]
        self._asked = at_reported_ids(inputs[IDS][chosen][None], inputs[LOG_TAIL][chosen][None])
        self.labels: Tensor
        self.log_probs: Tensor  # of the labels, [M]
        self.output: SparseHeadOutput

    def __call__(self, *, shift_labels: Tensor, **kwargs: Any) -> SparseHeadOutput:
        """What TRL reads: log-probabilities and entropies of the loss terms, without their graph."""
        self.labels = shift_labels[0, self._positions]
        self.output = self._model(
            **kwargs, labels=self.labels[None], label_positions=self._positions, **self._asked
        )
        output = self.output
        assert output.log_probs is not None
        assert output.entropy is not None
        self.log_probs = output.log_probs[0]
        return SparseHeadOutput(
            log_probs=output.log_probs.detach(), entropy=output.entropy.detach(), aux_loss=output.aux_loss
        )


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
