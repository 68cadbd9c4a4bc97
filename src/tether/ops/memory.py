"""Large buffers that a CPU does not spend its time mapping.

Fresh memory is mapped a page at a time when it is first written: for the gradient of a head of 49152 x 576
that takes three times as long as filling it. In pages of 2 MiB the cost is gone. Linux gives them to who
asks (numpy does so for its arrays); elsewhere, and where they are switched off, nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tether.projection.solve import may_ask

_HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE = 14
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def new_empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``like.new_empty(shape, dtype=dtype)``, on a CPU in huge pages where they can be had.

    Example:
        >>> new_empty(torch.zeros(1), (2, 3), torch.float64).shape
        torch.Size([2, 3])
    """
    tensor = like.new_empty(tuple(shape), dtype=dtype)
    _ask_for_huge_pages(tensor)
    return tensor


def new_zeros(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``like.new_zeros(shape, dtype=dtype)``, likewise."""
    return new_empty(like, shape, dtype).zero_()


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


def _ask_for_huge_pages(tensor: Tensor) -> None:
    """Advise the kernel about the whole huge pages inside a tensor, which must not have been written yet."""
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    length = (start + size) // _HUGE_PAGE * _HUGE_PAGE - first
    if _LIBC is None or tensor.device.type != "cpu" or length <= 0:
        return
    # An advice: a kernel that refuses it maps small pages, as it would have done unasked.
    _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
