"""What outlives a forward pass."""

from __future__ import annotations

import weakref

from torch import Tensor

from tether.projection.solve import may_ask


class KeptBuffer:
    """At most one buffer of logits at a time outlives its forward pass, to be used by the backward pass.

    A batch that fits the workspace is then not multiplied with the head a second time. More than one graph
    may be alive, a chunk of tokens each, and all their logits together would be what must not be held. An
    accelerator forms them again: there the product is cheap and memory is not.
    """

    def __init__(self) -> None:
        self._kept: weakref.ref[Tensor] | None = None

    def offer(self, buffer: Tensor) -> Tensor | None:
        """The buffer, to be kept until the backward pass lets go of it, or None."""
        if not may_ask(buffer) or (self._kept is not None and self._kept() is not None):
            return None
        self._kept = weakref.ref(buffer)
        return buffer


#: The one of this process.
KEPT = KeptBuffer()
