"""The LM head: how hidden states become logits, and the library products on both sides of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection.solve import may_ask

# Rows of a half-precision head that are widened to float32 at a time.
VOCABULARY_BLOCK = 1 << 12
# Rows of the head a CPU multiplies with at a time: its library is 5 to 8 % faster where these and their
# logits fit the cache than on the whole head.
_CACHED_BLOCK = 1 << 10


@dataclass(frozen=True)
class Head:
    """How hidden states become logits, apart from the weights."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    vocabulary_size: int | None = None
    weights_at_hand: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        for name in ("temperature", "logit_scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidInputError(f"{name} must be positive and finite, got {value!r}.")

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
        """Transformed logits of a block of tokens, [n, V], in the first rows of `buffer`."""
        return self.transform_(raw_logits(hidden, weight, buffer), bias)

    def transform_(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Turn the head's raw output into logits, in place."""
        if bias is not None:
            logits += bias.to(logits.dtype)
        if self.softcap is not None:
            logits.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.logit_scale != self.temperature:
            logits.mul_(self.logit_scale / self.temperature)
        if self.vocabulary_size is not None:
            logits[:, self.vocabulary_size :] = -torch.inf
        return logits

    @property
    def constant_slope(self) -> float:
        """`slope` without a soft cap."""
        return self.logit_scale / self.temperature

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of the transformed logits with respect to the head's raw output."""
        slope = self.constant_slope
        if self.softcap is None:
            return slope
        capped = logits * (self.temperature / self.softcap)
        return torch.where(torch.isneginf(logits), 0.0, slope * (1 - capped * capped))


def raw_logits(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    """``hidden @ weight.T`` in the precision of `buffer`, in its first rows."""
    logits = buffer[: hidden.shape[0]]
    if _tensor_cores_take(hidden, weight):
        return torch.mm(hidden, weight.t(), out_dtype=buffer.dtype, out=logits)
    hidden = hidden.to(buffer.dtype)
    if weight.dtype == buffer.dtype and not may_ask(weight):
        return torch.mm(hidden, weight.t(), out=logits)
    size = VOCABULARY_BLOCK if weight.dtype != buffer.dtype else _CACHED_BLOCK
    for start in range(0, weight.shape[0], size):
        block = weight[start : start + size].to(buffer.dtype)
        torch.mm(hidden, block.t(), out=logits[:, start : start + block.shape[0]])
    return logits


def times_weight(grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad @ weight`` in `dtype`, widening a half-precision head block by block."""
    if _tensor_cores_take(grad, weight):
        return torch.mm(grad, weight, out_dtype=dtype)
    if weight.dtype == grad.dtype == dtype:
        return grad @ weight
    product = grad.new_zeros((grad.shape[0], weight.shape[1]), dtype=dtype)
    for start in range(0, weight.shape[0], VOCABULARY_BLOCK):
        block = weight[start : start + VOCABULARY_BLOCK].to(dtype)
        product.addmm_(grad[:, start : start + block.shape[0]].to(dtype), block)
    return product


def add_weight_gradient(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """``total += grad.T @ hidden``, summed in the precision of `total`."""
    if _tensor_cores_take(grad, hidden):
        torch.addmm(total, grad.t(), hidden, out_dtype=total.dtype, out=total)
        return
    hidden = hidden.to(total.dtype)
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), hidden)
        return
    for start in range(0, grad.shape[1], VOCABULARY_BLOCK):
        block = slice(start, start + VOCABULARY_BLOCK)
        total[block].addmm_(grad[:, block].t().to(total.dtype), hidden)


def gradient_dtype(hidden: Tensor, weight: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """Precision in which the kernels hand the logits' gradient to the library's products: half if both of
    their other inputs are, which an accelerator multiplies ten times as fast."""
    return hidden.dtype if _both_half(hidden, weight) else otherwise


def _tensor_cores_take(first: Tensor, second: Tensor) -> bool:
    """Whether the library multiplies these as they are and adds up in float32."""
    return first.is_cuda and _both_half(first, second)


def _both_half(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and first.dtype in (torch.bfloat16, torch.float16)


class HeadGradients:
    """Gradients of hidden states, weight and bias, added up a block of tokens at a time.

    Made and used where the weights are at hand, and as precise as `dtype` until they are rounded.
    """

    def __init__(
        self, needed: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        needs_hidden, needs_weight, needs_bias = needed
        self._inputs = hidden, weight, bias
        self.hidden = hidden.new_zeros(hidden.shape, dtype=dtype) if needs_hidden else None
        # Not zeroed before it is first written: it is as large as the head.
        self.weight = weight.new_empty(weight.shape, dtype=dtype) if needs_weight else None
        self._written = False
        self.bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needs_bias else None

    def add(self, rows: Any, grad: Tensor) -> None:
        """What follows from the gradient of the head's raw output for some tokens, none of them twice."""
        hidden, weight, _ = self._inputs
        if self.hidden is not None:
            self.hidden[rows] = times_weight(grad, weight, self.hidden.dtype)
        if self.weight is not None:
            self._add_weight(self.weight, grad, hidden[rows])
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)

    def _add_weight(self, total: Tensor, grad: Tensor, hidden: Tensor) -> None:
        if self._written:
            add_weight_gradient(total, grad, hidden)
        elif grad.dtype == total.dtype:
            torch.mm(grad.t(), hidden.to(total.dtype), out=total)
        else:
            add_weight_gradient(total.zero_(), grad, hidden)
        self._written = True

    def scale(self, factor: Tensor) -> None:
        """Multiply all of them."""
        for total in (self.hidden, self.weight, self.bias):
            if total is not None:
                total.mul_(factor.to(total.dtype))

    def rounded(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the precision of what they belong to; None for what needs none."""
        if self.weight is not None and not self._written:
            self.weight.zero_()
        hidden, weight, bias = (
            None if total is None or value is None else total.to(value.dtype)
            for total, value in zip((self.hidden, self.weight, self.bias), self._inputs, strict=True)
        )
        return hidden, weight, bias
