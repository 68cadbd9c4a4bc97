"""The old policy as fields of verl's batch, whether they travel with it or wait on a worker: nothing empty.

A batch in verl is a TensorDict of jagged tensors, one row a sequence. Five of them carry what
`CompactLogProbs` keeps; `pack` makes them from one row a counted token, `unpack` turns them back. Two more
carry the hidden states of the exact trust region.

| field | each sequence | bytes |
|---|---|---|
| `troll_old_count` | ids kept of each response token, 0 where the token does not count | 2 a token |
| `troll_old_log_tail` | log of the mass of all other ids | 4 a counted token |
| `troll_old_log_tail_min` | lower bound of their log-probabilities, for certificates | 4 a counted token |
| `troll_old_ids`, `troll_old_log_probs` | ids and log-probabilities, token after token | 8 an id |
| `troll_old_hidden` | hidden states of the counted tokens that this process has | 2 D a token in bfloat16 |
| `troll_old_place` | which of the sequence's counted tokens those are | 4 a token |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tether.errors import TetherError
from tether.projection import SparseLogProbs
from tether.projection.compact import CompactLogProbs

COUNT, LOG_TAIL, LOG_TAIL_MIN = "troll_old_count", "troll_old_log_tail", "troll_old_log_tail_min"
IDS, LOG_PROBS = "troll_old_ids", "troll_old_log_probs"
FIELDS = (COUNT, LOG_TAIL, LOG_TAIL_MIN, IDS, LOG_PROBS)
HIDDEN, PLACE = "troll_old_hidden", "troll_old_place"


def pack(old: SparseLogProbs, response_mask: Tensor) -> dict[str, Tensor]:
    """Make the five fields of a batch.

    Args:
        old: distributions of the tokens that count, in the order of the mask, [N, K], with `log_tail_min`.
        response_mask: jagged [B, j]; positive where a token counts.

    Returns:
        Jagged tensors [B, j], by field.

    Example:
        >>> import torch
        >>> rows = [torch.tensor([1, 0]), torch.tensor([1])]
        >>> mask = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        >>> logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
        >>> few = SparseLogProbs.from_logits(logits, top_k=2)
        >>> old = SparseLogProbs(few.ids, few.log_probs, few.log_tail, few.log_tail)
        >>> [row.tolist() for row in pack(old, mask)["troll_old_ids"].unbind()]
        [[0, 1], [1, 2]]
    """
    compact = CompactLogProbs.pack(old)
    assert compact.log_tail_min is not None
    counted = response_mask.values() > 0
    count = torch.zeros(counted.shape, dtype=torch.int16, device=counted.device)
    count[counted] = compact.offsets.diff().to(torch.int16)
    tokens = response_mask.offsets()  # type: ignore[attr-defined]
    counted_tokens, ids = _starts(counted, tokens), _starts(count, tokens)
    return {
        COUNT: _jagged(count, tokens),
        LOG_TAIL: _jagged(compact.log_tail, counted_tokens),
        LOG_TAIL_MIN: _jagged(compact.log_tail_min, counted_tokens),
        IDS: _jagged(compact.ids, ids),
        LOG_PROBS: _jagged(compact.log_probs, ids),
    }


def unpack(batch: Mapping[str, Any], response_mask: Tensor) -> SparseLogProbs:
    """The distributions of the tokens that count now, [N, K] with K the longest.

    A token that counted when the old policy was recorded may have been masked since (rejection
    sampling); the reverse is refused.

    Raises:
        TetherError: a token counts of which nothing was recorded.
    """
    count = flat(batch[COUNT]).long()
    recorded, counts = count > 0, flat(response_mask) > 0
    if bool((counts & ~recorded).any()):
        raise TetherError(
            f"{int((counts & ~recorded).sum())} response tokens count in this update but did not when the "
            "old policy was recorded. Whatever changes response_mask in between may only remove tokens."
        )
    lengths = count[recorded]
    compact = CompactLogProbs(
        ids=flat(batch[IDS]),
        log_probs=flat(batch[LOG_PROBS]),
        offsets=torch.cat((lengths.new_zeros(1), lengths.cumsum(0))),
        log_tail=flat(batch[LOG_TAIL]),
        log_tail_min=flat(batch[LOG_TAIL_MIN]),
        kept=None,
        kept_log_probs=None,
        shape=lengths.shape,
        width=int(lengths.max()) if lengths.numel() else 1,
    )
    return compact.unpack()[counts[recorded]]


def pack_hidden(hidden: Tensor, index: Tensor, per_sequence: Tensor) -> dict[str, Tensor]:
    """Make the two fields of hidden states.

    Args:
        hidden: of the tokens this process has, in the order of the batch, [n, D].
        index: their places among all counted tokens, [n].
        per_sequence: counted tokens of each sequence, [B].

    Example:
        >>> import torch
        >>> fields = pack_hidden(torch.ones(3, 2), torch.tensor([1, 2, 4]), torch.tensor([2, 3]))
        >>> [row.tolist() for row in fields["troll_old_place"].unbind()]
        [[1], [0, 2]]
    """
    ends = per_sequence.cumsum(0)
    sequence = torch.searchsorted(ends, index, right=True)
    here = torch.zeros_like(ends).index_add_(0, sequence, torch.ones_like(sequence))
    offsets = torch.cat((ends.new_zeros(1), here.cumsum(0)))
    place = (index - (ends - per_sequence)[sequence]).int()
    return {HIDDEN: _jagged(hidden.detach(), offsets), PLACE: _jagged(place, offsets)}


def unpack_hidden(batch: Mapping[str, Any], response_mask: Tensor, group: Any = None) -> Tensor:
    """Hidden states of the tokens that count now, [N, D], those of all processes of `group` together."""
    recorded, counts = flat(batch[COUNT]) > 0, flat(response_mask) > 0
    tokens = response_mask.offsets()  # type: ignore[attr-defined]
    ends = torch.cat((tokens.new_zeros(1), recorded.cumsum(0)))[tokens]
    hidden, place = flat(batch[HIDDEN]), flat(batch[PLACE])
    here = [len(row) for row in batch[PLACE].unbind()]
    index = torch.repeat_interleave(ends[:-1], torch.tensor(here, device=ends.device)) + place
    whole = hidden.new_zeros((int(ends[-1]), hidden.shape[-1])).index_copy_(0, index.long(), hidden)
    if group is not None:  # each token is on one process, so that a sum puts it in its place
        torch.distributed.all_reduce(whole, group=group)
    return whole[counts[recorded]]


def payload_bytes(fields: Mapping[str, Tensor]) -> int:
    """Bytes of the values the fields hold."""
    return sum(flat(fields[name]).nbytes for name in (*FIELDS, HIDDEN, PLACE) if name in fields)


def flat(tensor: Tensor) -> Tensor:
    """The values of a jagged field, row after row."""
    # Rows of equal lengths may come back stacked.
    return tensor.values() if tensor.is_nested else tensor.flatten(0, 1)


def _starts(counts: Tensor, tokens: Tensor) -> Tensor:
    """Where each sequence's entries start and the last one's end, from how many each token has, [B + 1]."""
    ends = counts.cumsum(0, dtype=torch.long)
    return torch.cat((ends.new_zeros(1), ends))[tokens]


def _jagged(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values.contiguous(), offsets)
