"""A step on the pretended GPU and on the CPU: the same numbers, and the waits that a table says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pretend_gpu import PretendGPU, values_of
from rounding import SUMMED_ANOTHER_WAY, unit_of

Put = Callable[[Tensor], Tensor]
Step = Callable[[Put], list[Tensor]]
#: By place (``file:function``) and cause, how often the host waits.
Waits = dict[tuple[str, str], int]


def assert_step(
    step: Step, waits: Waits, *, terms: int, reference: Step | None = None, kernels: bool = False
) -> None:
    """Run a step on both devices.

    Args:
        step: given what moves an input to the device, returns tensors that are on it.
        waits: exactly those there may be.
        terms: numbers in the longest sum, which either device may add up in its own order.
        kernels: as in `PretendGPU`.
        reference: the step on the CPU, where another one is meant to give the same.
    """
    expected = (reference or step)(
        lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
    )
    with PretendGPU(kernels=kernels) as gpu:
        found = step(gpu.put)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        values = values_of(ours)
        assert values.dtype == theirs.dtype
        if not values.is_floating_point():
            assert torch.equal(values, theirs.detach())
            continue
        unit = unit_of(theirs, values.dtype, terms=terms)
        torch.testing.assert_close(
            values, theirs.detach(), rtol=0, atol=SUMMED_ANOTHER_WAY * unit, equal_nan=True
        )
    assert_waits(gpu.waits, waits)


def assert_waits(found: Mapping[tuple[str, str], int], expected: Waits) -> None:
    """Exactly these, or a message that says what is new and what is gone."""
    new = {wait: count for wait, count in found.items() if count > expected.get(wait, 0)}
    gone = {wait: count for wait, count in expected.items() if count > found.get(wait, 0)}
    assert not new, f"the host waits for the GPU where it did not; avoid it or note it in the table: {new}"
    assert not gone, f"the host no longer waits so often for the GPU; correct the table: {gone}"
