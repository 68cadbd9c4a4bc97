"""What a TRL trainer keeps of the old policy between scoring it and the updates on its rollouts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tether.integrations.trl_evaluation import Evaluation
from tether.projection import CompactLogProbs, SparseLogProbs
from tether.projection.sparse import EMPTY

# Entries of TRL's batch, a row a completion: TRL shuffles and splits them with everything else.
IDS, LOG_PROBS, LOG_TAIL = "old_support_ids", "old_support_log_probs", "old_support_log_tail"
LOG_TAIL_MIN, HIDDEN = "old_support_log_tail_min", "old_hidden"
# Takes the place of them all once the batch is split.
_PACKED = "old_policy"


@dataclass(frozen=True)
class Recorded:
    """One scoring pass: the sampled tokens' log-probabilities and the distributions they came from."""

    log_probs: Tensor
    support: SparseLogProbs
    hidden: Tensor | None

    @classmethod
    def of(cls, evaluation: Evaluation) -> Recorded:
        """What a pass said."""
        return cls(evaluation.log_probs, evaluation.support, evaluation.hidden)

    def entries(self) -> dict[str, Tensor]:
        """For TRL's batch."""
        support = self.support
        entries = {IDS: support.ids.int(), LOG_PROBS: support.log_probs, LOG_TAIL: support.log_tail}
        if support.log_tail_min is not None:
            entries[LOG_TAIL_MIN] = support.log_tail_min
        if self.hidden is not None:
            counted = (support.ids != EMPTY).any(-1, keepdim=True)
            entries[HIDDEN] = torch.where(counted, self.hidden, 0.0)
        return entries


def old_support(inputs: dict[str, Any]) -> SparseLogProbs:
    """The old policy's distributions on their supports, [B, T, K]."""
    return SparseLogProbs(inputs[IDS].long(), inputs[LOG_PROBS], inputs[LOG_TAIL], inputs.get(LOG_TAIL_MIN))


@dataclass(frozen=True)
class _Packed:
    """The old policy of a micro-batch in the memory its tokens need."""

    support: CompactLogProbs
    counted: Tensor
    """Tokens that have a distribution, [B, T] bool."""
    hidden: Tensor | None
    """Of those tokens, [N, D], in the model's precision."""

    @property
    def nbytes(self) -> int:
        hidden = 0 if self.hidden is None else self.hidden.nbytes
        return self.support.nbytes + self.counted.nbytes + hidden


def pack(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with the old policy packed, if it holds one that is not."""
    if IDS not in batch:
        return batch
    support = old_support(batch)
    counted = (support.ids != EMPTY).any(-1)
    hidden = batch[HIDDEN][counted] if HIDDEN in batch else None
    kept = {k: v for k, v in batch.items() if k not in (IDS, LOG_PROBS, LOG_TAIL, LOG_TAIL_MIN, HIDDEN)}
    return {**kept, _PACKED: _Packed(CompactLogProbs.pack(support), counted, hidden)}


def unpack(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as it was before `pack`; supports are as wide as the widest of their tokens."""
    if _PACKED not in batch:
        return batch
    packed: _Packed = batch[_PACKED]
    hidden = None
    if packed.hidden is not None:
        hidden = packed.hidden.new_zeros((*packed.counted.shape, packed.hidden.shape[-1]))
        hidden.masked_scatter_(packed.counted[..., None], packed.hidden)  # unlike an index, without waiting
    support = packed.support.unpack()
    kept = {k: v for k, v in batch.items() if k != _PACKED}
    return {**kept, **Recorded(support.log_tail, support, hidden).entries()}


def packed_to_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    """A packed batch with the old policy as plain tensors, for a file; `packed_from_tensors` undoes it."""
    if _PACKED not in batch:
        return batch
    packed: _Packed = batch[_PACKED]
    support = {
        name: value if isinstance(value, Tensor) else torch.tensor(value)  # the shape and the width
        for name, value in vars(packed.support).items()
        if value is not None
    }
    parts = {**support, "counted": packed.counted}
    if packed.hidden is not None:
        parts["hidden"] = packed.hidden
    rest = {name: value for name, value in batch.items() if name != _PACKED}
    return {**rest, **{f"{_PACKED}.{name}": value for name, value in parts.items()}}


def packed_from_tensors(entries: dict[str, Any]) -> dict[str, Any]:
    """The batch that `packed_to_tensors` took apart."""
    prefix = f"{_PACKED}."
    parts = {n.removeprefix(prefix): value for n, value in entries.items() if n.startswith(prefix)}
    if not parts:
        return entries
    counted, hidden = parts.pop("counted"), parts.pop("hidden", None)
    shape, width = torch.Size(parts.pop("shape").tolist()), int(parts.pop("width"))
    names = [field.name for field in fields(CompactLogProbs) if field.name not in ("shape", "width")]
    tensors: dict[str, Any] = {name: parts.get(name) for name in names}
    support = CompactLogProbs(**tensors, shape=shape, width=width)
    rest = {name: value for name, value in entries.items() if not name.startswith(prefix)}
    return {**rest, _PACKED: _Packed(support, counted, hidden)}


def bytes_a_token(batches: list[dict[str, Any]]) -> float | None:
    """Memory that packed batches keep for each token; None if there is none."""
    packed = [batch[_PACKED] for batch in batches if _PACKED in batch]
    if not packed:
        return None
    tokens = int(torch.stack([part.counted.sum() for part in packed]).sum())
    return sum(part.nbytes for part in packed) / tokens if tokens else None


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """The tokens TRL's loss counts: those of the completion, without what tools wrote."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def weighted_advantages(inputs: dict[str, Any]) -> Tensor:
    """[B] or [B, T]; weighed by how much likelier the trainer finds a token than the sampler did."""
    advantages: Tensor = inputs["advantages"]
    ratio = inputs.get("importance_sampling_ratio")
    if ratio is None:
        return advantages
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    return advantages * ratio
