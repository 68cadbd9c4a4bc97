"""How many logits are held at a time, and which of them outlive a forward pass."""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from tether.projection.solve import may_ask

# Logits of one policy held at a time, in elements: 64 MiB of float32. The backward pass turns them into their
# gradient in place.
WORKSPACE_ELEMENTS = 1 << 24
# Tokens an accelerator takes at a time at least: fewer leave its matrix units idle.
ACCELERATOR_ROWS = 1 << 10
# And at most, of what a CUDA device has memory for. The gradient of the head is read and written once a
# block, and what the host does for a block hides only behind the products of more than a thousand tokens.
MOST_ACCELERATOR_ROWS = 1 << 13
# The part of a CUDA device's memory that the logits of these tokens may take, in float32.
_DEVICE_SHARE = 1 / 64


def tokens_at_a_time(hidden: Tensor, vocabulary: int, tokens: int, *, part: float = 1.0) -> int:
    """As few blocks as the workspace allows, all of about one size: a last block of one row costs a pass over
    the whole head.

    Args:
        part: of the workspace, that is taken.
    """
    most = max(1, int(part * WORKSPACE_ELEMENTS) // vocabulary)
    most = most if may_ask(hidden) else max(most, _accelerator_rows(hidden.device, vocabulary))
    blocks = max(1, -(-tokens // most))
    return -(-tokens // blocks)


def _accelerator_rows(device: torch.device, vocabulary: int) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return ACCELERATOR_ROWS
    return rows_that_fit(_device_bytes(device), vocabulary)


def rows_that_fit(device_bytes: int, vocabulary: int) -> int:
    """Tokens that a CUDA device of so many bytes takes at a time."""
    rows = int(_DEVICE_SHARE * device_bytes) // (4 * vocabulary)
    return min(MOST_ACCELERATOR_ROWS, max(ACCELERATOR_ROWS, rows))


@functools.cache
def _device_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


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


class Workspace:
    """Memory for logits that a CPU process does not give back between one pass and the next.

    Mapping 64 MiB anew takes longer than a softmax over them. One buffer at most waits here to be used again,
    the last that came back; a second that is wanted meanwhile is new.
    """

    def __init__(self) -> None:
        self._idle: deque[UntypedStorage] = deque(maxlen=1)  # its operations are atomic

    def take(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An empty tensor where `like` is. It comes back by itself with the last view of it.

        What is detached from it is no view: hold the tensor itself for as long as that is used.
        """
        # Views of inference tensors do not keep what they are views of.
        if not may_ask(like) or torch.is_inference_mode_enabled():
            return like.new_empty(shape, dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        try:
            storage = self._idle.pop()
        except IndexError:
            storage = UntypedStorage(0, device=like.device)
        if storage.nbytes() < size:
            storage = UntypedStorage(size, device=like.device)
        taken = torch.empty(0, dtype=dtype, device=like.device).set_(storage, 0, shape, _strides(shape))
        weakref.finalize(taken, self._idle.append, storage).atexit = False
        return taken

    def release(self) -> None:
        """Give back what is waiting: to measure, or before work that needs the memory."""
        self._idle.clear()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


#: Those of this process.
KEPT = KeptBuffer()
WORKSPACE = Workspace()
