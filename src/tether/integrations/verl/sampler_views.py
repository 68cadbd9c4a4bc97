"""What the region around the sampler sees of a micro-batch: the network at the ids the sampler reported.

From verl's logits, or from hidden states and the LM head, so that no logits are formed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tether.errors import ConfigError
from tether.integrations.logits_hooks import TokenLayout
from tether.integrations.verl import sampler_fields
from tether.integrations.verl.layout import CountedTokens
from tether.integrations.verl.sampler_clock import Lags
from tether.integrations.verl.settings import TROLLPolicyLossConfig, bound
from tether.integrations.verl.views import HiddenView, LogitsView, Projected, Recorded, sequence_lengths
from tether.integrations.verl_switch import SAMPLER_SWITCH
from tether.losses import project_tokens
from tether.ops import linear_log_probs
from tether.ops.logits import logits_log_probs
from tether.projection import SampledPolicy, SparseLogProbs


@dataclass(frozen=True)
class SamplerKept:
    """What an update needs of its batch: everything travels with it, nothing waits here."""

    nbytes: int = 0
    record_seconds: float = 0.0
    needed: tuple[str, ...] = (*sampler_fields.FIELDS, "old_log_probs")
    remedy: str = (
        "the policy that sampled was not recorded. troll_anchor=sampler needs verl's sync, colocate_async or "
        f"separate_async trainer and the agent loop that records, which {SAMPLER_SWITCH} sets (agent."
        "agent_loop_manager_class); without them use troll_anchor=trainer and "
        "algorithm.rollout_correction.bypass_mode=False."
    )

    def take(self, batch: Any, device: Any) -> Mapping[str, Any]:
        """The micro-batch itself."""
        fields: Mapping[str, Any] = batch
        return fields


def refuse_scoring() -> None:
    """Refuse the pass that scores the rollouts, and the weights that verl would make of it.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "policy_loss.troll_anchor=sampler takes the old policy from the sampler's records, and verl scores "
        "the rollouts all the same: a pass for nothing, from which its rollout correction would correct for "
        "the sampler a second time. Set algorithm.rollout_correction.bypass_mode=True."
    )


class _AroundSampler:
    """Shared by both views: the projection, once the network is known at the reported ids."""

    _settings: TROLLPolicyLossConfig
    _partition: Any
    _lags: Lags

    def record(self, rows: Tensor, tokens: CountedTokens, data: Any) -> Recorded:
        """Never: the sampler recorded."""
        raise NotImplementedError

    def _sampler(self, tokens: CountedTokens, data: Any, vocabulary_size: int) -> SampledPolicy:
        """Of this process's tokens, [n]."""
        return sampler_fields.unpack(data, vocabulary_size, self._lags.of(data))[tokens.index]

    def _project(
        self, found: Tensor, old: SampledPolicy, tokens: CountedTokens, vocabulary_size: int
    ) -> Projected:
        """`found` are log-probabilities of the drawn tokens, then of the reported ids, [n, 1 + K]."""
        new = SparseLogProbs.from_log_probs(old.support.ids, found[:, 1:], vocabulary_size=vocabulary_size)
        lengths = sequence_lengths(self._settings, self._partition, tokens)
        layout = TokenLayout(tokens.sampled_ids.shape[0], lengths, found.device)
        policy = SampledPolicy(
            layout.pad_distribution(old.support),
            layout.pad(tokens.sampled_ids),
            None if old.lag is None else layout.pad(old.lag),
        )
        projected = project_tokens(
            layout.pad_distribution(new), policy, policy.sampled_ids, layout.mask,
            log_probs=layout.pad(found[:, 0]), kl_bound=bound(self._settings),
            region=self._settings.troll_region,  # type: ignore[arg-type]
        )  # fmt: skip
        return projected.each(layout.flatten), found[:, 0]


def _wanted(tokens: CountedTokens, old: SampledPolicy) -> Tensor:
    return torch.cat((tokens.sampled_ids[:, None].long(), old.support.ids), -1)


class SamplerLogitsView(_AroundSampler, LogitsView):
    """Around the sampler, from the engine's logits."""

    def __init__(self, *args: Any, lags: Lags, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lags = lags

    def project(self, rows: Tensor, tokens: CountedTokens, data: Any, fields: Mapping[str, Any]) -> Projected:
        """See `View`."""
        shard = self._partition.vocabulary(rows.shape[-1])
        vocabulary = rows.shape[-1] if shard is None else shard.vocabulary_size
        old = self._sampler(tokens, data, vocabulary)
        found = logits_log_probs(rows[0], _wanted(tokens, old), rows=tokens.rows, shard=shard)
        return self._project(found, old, tokens, vocabulary)


class SamplerHiddenView(_AroundSampler, HiddenView):
    """Around the sampler, from hidden states and the LM head."""

    def __init__(self, *args: Any, lags: Lags, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lags = lags

    def project(self, rows: Tensor, tokens: CountedTokens, data: Any, fields: Mapping[str, Any]) -> Projected:
        """See `View`."""
        hidden, weight, bias = self._read(rows, tokens, data)
        old = self._sampler(tokens, data, weight.shape[0])
        found = linear_log_probs(
            hidden, weight, _wanted(tokens, old), bias=bias, temperature=self._temperature
        )
        projected, log_probs = self._project(found.log_probs, old, tokens, weight.shape[0])
        return replace(projected, entropy=found.entropy), log_probs
