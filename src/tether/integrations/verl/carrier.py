"""How the old policy's distributions travel through TransferQueue: ragged, and nothing empty.

A batch in verl is a TensorDict of jagged tensors, one row a sequence. Four of them carry the
distributions; `pack` makes them from one row a counted token, `unpack` turns them back.

| field | each sequence | bytes |
|---|---|---|
| `troll_old_count` | ids kept of each response token, 0 where the token does not count | 2 a token |
| `troll_old_log_tail` | log of the mass of all other ids | 4 a counted token |
| `troll_old_ids`, `troll_old_log_probs` | ids and log-probabilities, token after token | 8 an id |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tether.errors import TetherError
from tether.projection import SparseLogProbs
from tether.projection.sparse import EMPTY

COUNT, LOG_TAIL = "troll_old_count", "troll_old_log_tail"
IDS, LOG_PROBS = "troll_old_ids", "troll_old_log_probs"
FIELDS = (COUNT, LOG_TAIL, IDS, LOG_PROBS)


def pack(old: SparseLogProbs, response_mask: Tensor) -> dict[str, Tensor]:
    """Make the four fields of a batch.

    Args:
        old: distributions of the tokens that count, in the order of the mask, [N, K].
        response_mask: jagged [B, j]; positive where a token counts.

    Returns:
        Jagged tensors [B, j], by field.

    Example:
        >>> import torch
        >>> rows = [torch.tensor([1, 0]), torch.tensor([1])]
        >>> mask = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        >>> old = SparseLogProbs.from_logits(torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]]), top_k=2)
        >>> [row.tolist() for row in pack(old, mask)["troll_old_ids"].unbind()]
        [[0, 1], [1, 2]]
    """
    counted = response_mask.values() > 0
    held = old.ids != EMPTY
    per_token = torch.zeros(counted.shape, dtype=torch.int16, device=counted.device)
    per_token[counted] = held.sum(-1).to(torch.int16)
    tokens = _lengths(response_mask)
    ids = [int(row.sum()) for row in per_token.split(tokens)]
    counted_tokens = [int(row.sum()) for row in counted.split(tokens)]
    return {
        COUNT: _jagged(per_token, tokens),
        LOG_TAIL: _jagged(old.log_tail.float(), counted_tokens),
        IDS: _jagged(old.ids[held].to(torch.int32), ids),
        LOG_PROBS: _jagged(old.log_probs[held].float(), ids),
    }


def unpack(batch: Mapping[str, Any], response_mask: Tensor) -> SparseLogProbs:
    """The distributions of the tokens that count now, [N, K] with K the longest.

    A token that counted when the old policy was recorded may have been masked since (rejection
    sampling); the reverse is refused.

    Raises:
        TetherError: a token counts of which nothing was recorded.
    """
    per_token, flat = batch[COUNT], {name: _values(batch[name]) for name in (LOG_TAIL, IDS, LOG_PROBS)}
    count = _values(per_token).long()
    recorded = count > 0
    counts = _values(response_mask) > 0
    if bool((counts & ~recorded).any()):
        raise TetherError(
            f"{int((counts & ~recorded).sum())} response tokens count in this update but did not when the "
            "old policy was recorded. Whatever changes response_mask in between may only remove tokens."
        )
    width = int(count.max()) if count.numel() else 1
    held = torch.arange(max(1, width), device=count.device) < count[recorded][:, None]
    ids = torch.full(held.shape, EMPTY, dtype=torch.int32, device=held.device)
    log_probs = torch.full(held.shape, -torch.inf, device=held.device)
    ids = ids.masked_scatter(held, flat[IDS])
    log_probs = log_probs.masked_scatter(held, flat[LOG_PROBS])
    return SparseLogProbs(ids, log_probs, flat[LOG_TAIL])[counts[recorded]]


def payload_bytes(fields: Mapping[str, Tensor]) -> int:
    """Bytes of the values the four fields hold."""
    return sum(_values(fields[name]).numel() * _values(fields[name]).element_size() for name in FIELDS)


def _values(tensor: Tensor) -> Tensor:
    # Rows of equal lengths may come back stacked.
    return tensor.values() if tensor.is_nested else tensor.flatten()


def _lengths(tensor: Tensor) -> list[int]:
    return tensor.offsets().diff().tolist()  # type: ignore[attr-defined]


def _jagged(values: Tensor, lengths: list[int]) -> Tensor:
    offsets = torch.tensor([0, *lengths], device=values.device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)
