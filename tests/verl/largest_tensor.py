"""The largest tensor any operation makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Found:
    """Of everything since."""

    elements: int = 0


class _Watch(TorchDispatchMode):
    def __init__(self, found: Found) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                # What is in memory: an expanded view is not.
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                self._found.elements = max(self._found.elements, min(held, tensor.numel()))
        return result


@contextmanager
def largest_tensor() -> Iterator[Found]:
    """Watches operations, those of the backward pass included."""
    found = Found()
    with _Watch(found):
        yield found
