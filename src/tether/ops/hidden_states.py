"""A policy as what makes its distributions: the last hidden states and the LM head of a language model."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tether.ops.head import Head
from tether.projection.sparse import SparseLogProbs


@dataclass(frozen=True)
class HiddenStates:
    """Token distributions that nobody has formed: ``linear_head(hidden, weight, bias).log_softmax(-1)``.

    See `tether.ops.linear_trust_region`, which compares and projects them without the logits in memory.
    """

    hidden: Tensor
    """Last hidden states, [..., D]."""
    weight: Tensor | None = None
    """LM head, [V, D]; None for an old policy whose head is the new one's, since it is frozen."""
    bias: Tensor | None = None
    support: SparseLogProbs | None = None
    """Of an old policy: its distributions on a few ids, [..., K], for certificates."""
    head: Head = field(default_factory=Head)
    """Of the new policy: temperature and scale of both policies' logits."""

    @property
    def rows(self) -> Tensor:
        """What has the leading dimensions of the tokens."""
        return self.hidden
