"""Backward passes that are written by hand: of first derivatives, and as precise as their forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tether.errors import InvalidInputError


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of a `torch.autograd.Function` that is not differentiable itself.

    As ``torch.autograd.function.once_differentiable``, which lets a second derivative through as zero where
    the arriving gradient depends on nothing. And outside autocast: whoever calls ``loss.backward()`` inside
    it would have half precision where the forward pass had none.

    Raises:
        InvalidInputError: when called, with ``create_graph=True``.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise InvalidInputError(
                "Second derivatives (create_graph=True) were asked for, and this operation has its first "
                "alone. Leave it out of what is differentiated twice."
            )
        arrived = next((grad for grad in grads if grad is not None), None)
        if arrived is None:
            return backward(ctx, *grads)
        with torch.autocast(arrived.device.type, enabled=False):
            return backward(ctx, *grads)

    return once
