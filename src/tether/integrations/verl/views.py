"""What the trust region sees of a micro-batch: the engine's logits, or hidden states and the LM head.

Both record the old policy in the pass that scores the rollouts, and project the new one in every update.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tether.errors import ConfigError
from tether.integrations.exact_head import evaluate_on_support
from tether.integrations.logits_hooks import TokenLayout, project_on_old_policy, record_old_policy
from tether.integrations.verl import carrier
from tether.integrations.verl.head import HiddenStatesHead
from tether.integrations.verl.layout import CountedTokens, Partition
from tether.integrations.verl.settings import TROLLPolicyLossConfig
from tether.integrations.verl.store import OldPolicyStore
from tether.losses import project_tokens
from tether.ops import linear_kl, linear_log_probs
from tether.ops.head import Head
from tether.ops.hidden_states import HiddenStates
from tether.ops.logits import logits_log_probs
from tether.projection import SparseLogProbs
from tether.projection.tokens import ProjectedTokens


@dataclass(frozen=True)
class Recorded:
    """What is kept of a micro-batch's old policy."""

    log_probs: Tensor
    """Of the sampled tokens of this process, [n]."""
    support: SparseLogProbs
    """Of all counted tokens of the micro-batch, [N, K]."""
    entropy: Tensor | None = None
    """[n]; None if verl computes it."""
    fields: Mapping[str, Tensor] | None = None
    """Of the batch, besides those of the support."""


Projected = tuple[ProjectedTokens, Tensor]
"""And the log-probabilities of the sampled tokens over the whole vocabulary: for the rest of verl's loss."""

_OPEN_SEAM = {"distillation_use_topk": True, "distillation_only": True}


class View(Protocol):
    """Rows [1, positions, ...] as the engine hands them to the loss function."""

    seam: dict[str, Any]
    """What verl's engine reads from the batch so that it does."""
    with_entropy: bool
    """Whether entropies are this view's to give, since verl's would be of something else."""

    def watching(self) -> AbstractContextManager[Any]:
        """For the micro-batches of one pass."""

    def record(self, rows: Tensor, tokens: CountedTokens, data: Any) -> Recorded:
        """Keep the old policy."""

    def project(self, rows: Tensor, tokens: CountedTokens, data: Any, fields: Mapping[str, Any]) -> Projected:
        """Project the new policy onto the old one's ball; a value a token of this process, [n]."""


class LogitsView:
    """Logits, temperature included; the old policy as the mass of a few ids and that of all others."""

    seam = _OPEN_SEAM
    with_entropy = False

    def __init__(self, settings: TROLLPolicyLossConfig, partition: Partition) -> None:
        self._settings, self._partition = settings, partition

    def watching(self) -> AbstractContextManager[Any]:
        """See `View`."""
        return nullcontext()

    def record(self, rows: Tensor, tokens: CountedTokens, data: Any) -> Recorded:
        """See `View`."""
        old = record_old_policy(
            rows[0],
            tokens.sampled_ids,
            top_k=self._settings.troll_top_k,
            mass=self._settings.troll_mass,
            rows=tokens.rows,
            shard=self._partition.vocabulary(rows.shape[-1]),
        )
        log_probs = old.log_prob_of(tokens.sampled_ids)
        return Recorded(log_probs, on_all_processes(old, tokens, self._partition))

    def project(self, rows: Tensor, tokens: CountedTokens, data: Any, fields: Mapping[str, Any]) -> Projected:
        """See `View`."""
        shard = self._partition.vocabulary(rows.shape[-1])
        projected = project_on_old_policy(
            rows[0],
            tokens.sampled_ids,
            carrier.unpack(fields, data["response_mask"])[tokens.index],
            kl_bound=self._settings.troll_kl_bound,
            support=self._settings.troll_support,  # type: ignore[arg-type]
            top_k=self._settings.troll_top_k,
            mass=self._settings.troll_mass,
            rows=tokens.rows,
            shard=shard,
            sequence_lengths=sequence_lengths(self._settings, self._partition, tokens),
        )
        if self._settings.troll_support != "paper":
            return projected, projected.new_log_probs
        # The paper's are renormalised on the ids kept, and the rest of verl's loss is of the network itself.
        whole = logits_log_probs(rows[0], tokens.sampled_ids[:, None], rows=tokens.rows, shard=shard)
        return projected, whole[:, 0]


class HiddenView:
    """Hidden states in the logits' place, and the LM head; the old policy as its own of both."""

    def __init__(
        self,
        settings: TROLLPolicyLossConfig,
        partition: Partition,
        head: HiddenStatesHead,
        temperature: float,
        store: OldPolicyStore,
        *,
        with_entropy: bool = False,
    ) -> None:
        self._settings, self._partition, self._head = settings, partition, head
        self._temperature, self._store, self.with_entropy = temperature, store, with_entropy
        # The sampling temperature and entropies are of logits.
        self.seam = {**_OPEN_SEAM, "temperature": 1.0, "calculate_entropy": False}

    def watching(self) -> AbstractContextManager[Any]:
        """See `View`."""
        return self._head.handing_over()

    def score(self, rows: Tensor, tokens: CountedTokens, data: Any) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies of the tokens, of which nothing is kept."""
        hidden, weight, bias = self._read(rows, tokens, data)
        found = linear_log_probs(
            hidden, weight, tokens.sampled_ids[:, None], bias=bias, temperature=self._temperature
        )
        return found.log_probs[:, 0], found.entropy if self.with_entropy else None

    def record(self, rows: Tensor, tokens: CountedTokens, data: Any) -> Recorded:
        """See `View`."""
        hidden, weight, bias = self._read(rows, tokens, data)
        support, log_probs, entropy = evaluate_on_support(
            hidden, weight, bias, tokens.sampled_ids, None, Head(self._temperature),
            self._settings.troll_top_k, self._settings.troll_mass,
        )  # fmt: skip
        index = tokens.index
        if (
            not self._store.local and self._partition.sequence()[1] > 1
        ):  # one process of the group answers verl
            total = int(tokens.per_sequence.sum())
            hidden, index = _on_all(hidden, tokens), torch.arange(total, device=index.device)
        return Recorded(
            log_probs,
            on_all_processes(support, tokens, self._partition),
            entropy if self.with_entropy else None,
            carrier.pack_hidden(hidden, index, tokens.per_sequence),
        )

    def project(self, rows: Tensor, tokens: CountedTokens, data: Any, fields: Mapping[str, Any]) -> Projected:
        """See `View`."""
        lengths = sequence_lengths(self._settings, self._partition, tokens)
        new, old, old_log_probs, layout = self.policies(rows, tokens, data, fields, lengths)
        projected = project_tokens(
            new,
            old,
            layout.pad(tokens.sampled_ids),
            layout.mask,
            old_log_probs=old_log_probs,
            kl_bound=self._settings.troll_kl_bound,
            region=self._settings.troll_region,  # type: ignore[arg-type]
        )
        projected = projected.each(layout.flatten)
        return projected, projected.new_log_probs

    def divergence(self, rows: Tensor, tokens: CountedTokens, data: Any, fields: Mapping[str, Any]) -> Tensor:
        """KL(new || old) of the tokens over the whole vocabulary, whatever a certificate would say, [n]."""
        new, old, _, _ = self.policies(rows, tokens, data, fields, None)
        assert new.weight is not None
        return linear_kl(
            new.hidden.flatten(0, 1), new.weight, old.hidden.flatten(0, 1), bias=new.bias,
            old_weight=old.weight, old_bias=old.bias, temperature=self._temperature,
        )  # fmt: skip

    def policies(
        self,
        rows: Tensor,
        tokens: CountedTokens,
        data: Any,
        fields: Mapping[str, Any],
        lengths: Tensor | None,
    ) -> tuple[HiddenStates, HiddenStates, Tensor, TokenLayout]:
        """The new policy, the old one, its log-probabilities of the sampled tokens, and how all are laid out:
        a row a sequence of these lengths [B], or without them one long row."""
        hidden, weight, bias = self._read(rows, tokens, data)
        mask, (_, size) = data["response_mask"], self._partition.sequence()
        support = carrier.unpack(fields, mask)[tokens.index]
        group = _sequence_group() if self._store.local and size > 1 else None
        old_hidden = carrier.unpack_hidden(fields, mask, group)[tokens.index]
        layout = TokenLayout(tokens.sampled_ids.shape[0], lengths, hidden.device)
        old_weight, old_bias = self._head.gathered(self._store.head, hidden.device)
        return (
            HiddenStates(layout.pad(hidden), weight, bias, head=Head(self._temperature)),
            HiddenStates(layout.pad(old_hidden), old_weight, old_bias, layout.pad_distribution(support)),
            layout.pad(support.log_prob_of(tokens.sampled_ids)),
            layout,
        )

    def _read(self, rows: Tensor, tokens: CountedTokens, data: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states of the tokens [n, D], and the weights of this forward pass, in one precision."""
        weight, bias = self._head.weights(rows[0], data["input_ids"].offsets().diff())
        return rows[0][tokens.rows].to(weight.dtype), weight, bias


def sequence_lengths(
    settings: TROLLPolicyLossConfig, partition: Partition, tokens: CountedTokens
) -> Tensor | None:
    """Counted tokens of each sequence [B] where these share a bound.

    Raises:
        ConfigError: a sequence's tokens are not all on one process.
    """
    if settings.troll_region != "sequence":
        return None
    _, size = partition.sequence()
    if size > 1:
        raise ConfigError(
            "actor_rollout_ref.actor.policy_loss.troll_region=sequence needs whole sequences on each "
            f"process, but sequence parallelism cuts them over {size}. Use troll_region=token or "
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1."
        )
    return tokens.per_sequence


def on_all_processes(old: SparseLogProbs, tokens: CountedTokens, partition: Partition) -> SparseLogProbs:
    """The distributions of the whole micro-batch from the slices of all processes."""
    if partition.sequence()[1] == 1:
        return old
    assert old.log_tail_min is not None
    return SparseLogProbs(
        _on_all(old.ids, tokens),
        _on_all(old.log_probs, tokens),
        _on_all(old.log_tail, tokens),
        _on_all(old.log_tail_min, tokens),
    )


def _on_all(values: Tensor, tokens: CountedTokens) -> Tensor:
    # Every token is on one process only, so that a sum puts each in its place.
    total = int(tokens.per_sequence.sum())
    places = values.new_zeros((total, *values.shape[1:])).index_copy(0, tokens.index, values.detach())
    torch.distributed.all_reduce(places, group=_sequence_group())
    return places


def _sequence_group() -> Any:
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group

    return get_ulysses_sequence_parallel_group()
