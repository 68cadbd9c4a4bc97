"""The projection of token distributions as one kernel: a program a row, in registers or chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tether.projection.categorical_triton_chunks import (
    KNOWN,
    project_wide_backward_kernel,
    project_wide_kernel,
)
from tether.projection.categorical_triton_kernels import project_backward_kernel, project_kernel
from tether.projection.first_derivative import first_derivative
from tether.projection.solve import TOLERANCE

# Outcomes a program holds in registers; of a wider row it holds a chunk of so many at a time.
_IN_REGISTERS = 4096
_CHUNK = 4096


def project_rows(new: Tensor, old: Tensor, kl_bound: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Projected log-probabilities [N, V], and [N] each: step, KL before the projection, whether the solver
    converged; see `_Project`."""
    return _ProjectRows.apply(new, old, kl_bound)


class _ProjectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, old: Tensor, kl_bound: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        new, old, bound = new.contiguous(), old.contiguous(), new.new_full((1,), kl_bound)
        log_probs, step, kl = torch.empty_like(new), new.new_empty(len(new)), new.new_empty(len(new))
        constrained, converged = (torch.empty_like(step, dtype=torch.int8) for _ in range(2))
        numbers = torch.finfo(new.dtype)
        wide = new.shape[-1] > _IN_REGISTERS
        kernel = project_wide_kernel if wide else project_kernel
        known = [new.new_empty((len(new), KNOWN))] if wide else []
        with torch.cuda.device_of(new):
            kernel[(len(new),)](
                new, old, bound, log_probs, step, kl, constrained, converged, *known, new.shape[-1],
                TOLERANCE=TOLERANCE[new.dtype], EPSILON=numbers.eps, TINY=numbers.tiny, **_sizes(new),
            )  # fmt: skip
        ctx.save_for_backward(new, old, bound, step, kl, constrained, *known)
        converged = converged != 0
        ctx.mark_non_differentiable(step, kl, converged)
        return log_probs, step, kl, converged

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        new, *saved = ctx.saved_tensors
        numbers = torch.finfo(new.dtype)
        grad, grad_in = grad.contiguous(), torch.empty_like(new)
        kernel = project_wide_backward_kernel if new.shape[-1] > _IN_REGISTERS else project_backward_kernel
        with torch.cuda.device_of(new):
            kernel[(len(new),)](
                new, *saved, grad, grad_in, new.shape[-1],
                EPSILON=numbers.eps, TINY=numbers.tiny, **_sizes(new),
            )  # fmt: skip
        return grad_in, None, None


def _sizes(rows: Tensor) -> dict[str, int]:
    """The outcomes a program takes at a time, and its warps: about 8 outcomes a thread."""
    if rows.shape[-1] > _IN_REGISTERS:
        return {"BLOCK": _CHUNK, "num_warps": min(16, max(1, _CHUNK // 256))}
    width = triton.next_power_of_2(rows.shape[-1])
    return {"WIDTH": width, "num_warps": min(16, max(1, width // 256))}
