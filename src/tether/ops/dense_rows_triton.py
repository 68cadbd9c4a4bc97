"""Blocks of dense rows on an accelerator: measured and projected by one kernel, their gradient by another.

The functions of `dense_rows.py`, which holds the formulas and takes the rows that are left to it: those where
one policy alone holds a zero, or so far from their old policy that digits are lost. A row that turns out to
be inside the bound is read three times: to measure it, to compare it and for its gradient. A projected one is
read once more for each evaluation of its curve, four at most, and once more for its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tether.ops import dense_rows
from tether.ops.backlog import Backlog
from tether.ops.dense_rows import Compared, ProjectedUpstream, by_reference
from tether.ops.dense_rows_triton_kernels import (
    LEFT,
    PROJECTED,
    compare_kernel,
    projected_gradient_kernel,
)
from tether.ops.head import Head
from tether.ops.linear import empty_results
from tether.ops.policy_pair import rows_at_a_time
from tether.ops.rows import Upstream
from tether.ops.rows_triton import reduce_kept
from tether.ops.token_state import ProjectedRows
from tether.projection.anchored import LARGEST_CHANGE

# Logits of each policy that a program works on at a time, and its warps: what an H200 is quickest with and
# fits its registers.
COMPARED = {torch.float32: (4096, 4), torch.float64: (2048, 8)}
TO_GRADIENT = (2048, 8)
# Numbers that `compare_kernel` finds of a row.
_FOUND = 7


def measure(logits: Tensor, vocabulary: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`dense_rows.measure`, in one pass."""
    out = empty_results(logits, ids[:, None], 0, with_min=False)
    reduce_kept(Head(vocabulary_size=vocabulary), logits, None, ids[:, None], out)
    return out.log_probs.squeeze(-1), out.entropy, out.largest + out.log_total


def compare_rows(
    new: Tensor, old: Tensor, ids: Tensor, kl_bound: float, *, project: bool, rows: Tensor | None = None,
    meanwhile: Backlog | None = None,
) -> Compared:  # fmt: skip
    """`dense_rows.compare_rows`; the host waits once for how many rows are projected and how many left."""
    meanwhile = Backlog() if meanwhile is None else meanwhile
    found = new.new_empty((len(old), _FOUND))
    bound = found.new_full((1,), kl_bound if project else torch.inf, dtype=torch.float64)
    outcome = new.new_empty(len(old), dtype=torch.int8)
    block, warps = COMPARED[new.dtype]
    with torch.cuda.device_of(new):
        compare_kernel[(len(old),)](
            new, old, ids.contiguous(), rows, bound, found, outcome,
            old.shape[-1], new.stride(0), old.stride(0),
            CHANGE=LARGEST_CHANGE[new.dtype], FOUND=_FOUND, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    counts = [(outcome == code).sum() for code in (LEFT.value, PROJECTED.value)]
    left, projected = meanwhile.read(torch.stack(counts))
    order = outcome.argsort(descending=True)
    hard, easy = order[:left], order[left : left + projected]
    kl = found[:, 0].contiguous()
    projections = by_reference(new, old, ids, kl_bound, kl, hard, project=project, rows=rows) if left else []
    if projected:
        projections.append((easy, _read_off(found[easy])))
    return Compared(kl, projections, plain=left > 0)


def _read_off(found: Tensor) -> ProjectedRows:
    """In the order in which `compare_kernel` writes."""
    _, log_prob, kl, regression, step, centred, variance = found.unbind(-1)
    always = torch.ones_like(step, dtype=torch.bool)
    return ProjectedRows(
        projected_log_probs=log_prob,
        projected_kl=kl,
        regression=regression,
        step=step,
        constrained=always,
        converged=always,
        centred=centred,
        variance=variance,
    )


def to_gradient(
    head: Head, logits: Tensor, grad: Tensor, own: Upstream, old: Tensor | None, old_rows: Tensor,
    ids: Tensor, upstream: ProjectedUpstream, kl_bound: float, *, plain: bool = True,
) -> None:  # fmt: skip
    """`dense_rows.to_gradient`; where rows may be left to it, the host waits once for which they are."""
    ((_, arrived),) = own.gathered  # for the sampled token
    left = torch.empty_like(ids, dtype=torch.int8)
    held = logits if old is None else old  # which nobody reads where no row acts
    block, warps = TO_GRADIENT
    with torch.cuda.device_of(logits):
        projected_gradient_kernel[(len(logits),)](
            logits, held, grad, old_rows, ids.contiguous(), own.log_sum, own.entropy, own.total,
            own.grad_entropy, arrived, *upstream[:4], left,
            logits.shape[-1], logits.stride(0), held.stride(0), grad.stride(0),
            SLOPE=head.constant_slope, CAP=0.0 if head.softcap is None else head.softcap / head.temperature,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    if old is None or not plain:
        return
    rows = left.nonzero().squeeze(-1)
    for part in rows_at_a_time(logits[: len(rows)]):
        at = rows[part]
        some = logits[at]
        dense_rows.to_gradient(
            head, some, some, own.at(at), old[old_rows[at]], torch.arange(len(at), device=at.device), ids[at],
            upstream.at(at), kl_bound,
        )  # fmt: skip
        grad[at] = some.to(grad.dtype)
