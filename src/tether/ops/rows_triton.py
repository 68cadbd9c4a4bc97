"""Rows of logits and what is kept of them, and their gradient: one pass a row on an accelerator.

The products stay with the library; everything between them is here. `rows.py` is the reference beside
these kernels, takes the same arguments, and holds the formulas without the bookkeeping.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tether.ops.head import Head, gradient_dtype, raw_logits
from tether.ops.rows import Reduced, Upstream
from tether.ops.rows_triton_kernels import (
    gradient_at_ids_kernel,
    gradient_kernel,
    reduce_kernel,
    scatter_kernel,
    select_kernel,
    square_norm_kernel,
)
from tether.ops.top_k import top_k_by_groups

# Logits a program works on at a time, and ids.
_BLOCK = 4096
_BLOCK_IDS = 64
# Values among which one program selects, all in registers.
_MAX_CANDIDATES = 1 << 14


def reduce_block(
    head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, buffer: Tensor, out: Reduced
) -> None:
    """Reduce the logits of a block of tokens to what `out` has room for, read once."""
    reduce_kept(head, raw_logits(hidden, weight, buffer), bias, ids, out)


def reduce_kept(head: Head, raw: Tensor, bias: Tensor | None, ids: Tensor, out: Reduced) -> None:
    """The same of the head's raw output [n, V]."""
    (tokens, vocabulary), top_k = raw.shape, out.top_ids.shape[-1]
    group = _group_size(vocabulary, top_k)
    groups = triton.cdiv(vocabulary, group)
    maxima = raw.new_empty((tokens, groups if top_k else 0))
    ids = ids.contiguous()
    with torch.cuda.device_of(raw):
        reduce_kernel[(tokens,)](
            raw, bias, ids, out.log_probs, maxima, out.largest, out.log_total, out.entropy,
            out.smallest if out.smallest.shape[-1] else None,
            vocabulary, _real(head, vocabulary), ids.shape[-1], maxima.shape[-1],
            **_settings(head, bias), GROUP=group, BLOCK=_BLOCK, BLOCK_IDS=_BLOCK_IDS, num_warps=4,
        )  # fmt: skip
        if top_k:
            _select(head, raw, bias, maxima, group, out)


def gradient_block(
    head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor, upstream: Upstream
) -> Tensor:
    """Gradient that reaches the head's raw output for a block of tokens, [n, V].

    In `gradient_dtype`; in place of the logits if that is theirs.
    """
    raw = raw_logits(hidden, weight, buffer)
    dtype = gradient_dtype(hidden, weight, raw.dtype)
    return gradient_of_kept(head, raw, upstream, bias=bias, dtype=dtype)


def gradient_of_kept(
    head: Head, raw: Tensor, upstream: Upstream, *, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same, in `dtype`, from the head's raw output that `reduce_block` left in its buffer."""
    tokens, vocabulary = raw.shape
    grad = raw if dtype == raw.dtype else raw.new_empty(raw.shape, dtype=dtype)
    rows = [
        None if row is None else row.contiguous()
        for row in (upstream.log_sum, upstream.entropy, upstream.total, upstream.grad_entropy)
    ]
    real, settings = _real(head, vocabulary), _settings(head, bias)
    with torch.cuda.device_of(raw):
        if upstream.gathered:
            ids, arrived = (torch.cat(parts, -1) for parts in zip(*upstream.gathered, strict=True))
            at_ids, slots = torch.empty_like(arrived), ids.shape[-1]
            grid = (tokens, triton.cdiv(slots, _BLOCK_IDS))
            gradient_at_ids_kernel[grid](
                raw, bias, ids, arrived, at_ids, *rows, vocabulary, real, slots,
                **settings, BLOCK=_BLOCK_IDS, num_warps=4,
            )  # fmt: skip
        gradient_kernel[(tokens, triton.cdiv(vocabulary, _BLOCK))](
            raw, bias, grad, *rows, vocabulary, real, **settings, BLOCK=_BLOCK, num_warps=8
        )
        if upstream.gathered:
            scatter_kernel[grid](grad, ids, at_ids, vocabulary, real, slots, BLOCK=_BLOCK_IDS, num_warps=1)
    return grad


def largest_row(weight: Tensor, minus: Tensor | None = None, minus_row: Tensor | None = None) -> Tensor:
    """The largest norm of a row of ``weight - minus - minus_row``; `policy_pair.py` has the reference."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    squares = weight.new_empty(len(weight), dtype=dtype)
    with torch.cuda.device_of(weight):
        square_norm_kernel[(len(weight),)](
            weight, minus, minus_row, squares, weight.shape[1], weight.stride(0),
            0 if minus is None else minus.stride(0), BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return squares.amax().double().sqrt()


def _select(head: Head, raw: Tensor, bias: Tensor | None, maxima: Tensor, group: int, out: Reduced) -> None:
    """Fill in the top-K: the groups with the largest maxima first, then the ids within them."""
    (tokens, top_k), vocabulary = out.top_ids.shape, raw.shape[-1]
    chosen = min(top_k, maxima.shape[-1])
    widths = _select_widths(vocabulary, top_k, group)
    if not _fits(widths, raw.dtype):
        out.top_ids.copy_(top_k_by_groups(head.transform_(raw, bias), top_k))
        out.top_logits.copy_(raw.gather(-1, out.top_ids.long()))
    else:
        # Zeros: a row of NaN may fill less than its slots, and what is left must still be ids.
        picked = torch.zeros((tokens, chosen), dtype=torch.int32, device=raw.device)
        ids = torch.zeros((tokens, top_k), dtype=torch.int32, device=raw.device)
        logits = raw.new_zeros((tokens, top_k))
        select_kernel[(tokens,)](
            maxima, None, None, picked, None, maxima.shape[-1], maxima.shape[-1], 0, chosen,
            SCALE=1.0, CAP=0.0, HAS_BIAS=False, GROUP=0, WIDTH=widths[0], PARTS=_parts(widths[0], chosen),
            num_warps=_warps(widths[0]),
        )  # fmt: skip
        select_kernel[(tokens,)](
            raw, bias, picked, ids, logits, vocabulary, _real(head, vocabulary), chosen, top_k,
            **_settings(head, bias), GROUP=group, WIDTH=widths[1], PARTS=_parts(widths[1], top_k),
            num_warps=_warps(widths[1]),
        )  # fmt: skip
        # They come by rising id, so a stable sort breaks ties by the lowest.
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        out.top_ids.copy_(ids.gather(-1, order))
        out.top_logits.copy_(logits)
    torch.sub(out.top_logits, out.largest[:, None], out=out.top_log_probs)
    out.top_log_probs.sub_(out.log_total[:, None])


def _settings(head: Head, bias: Tensor | None) -> dict[str, float | bool]:
    """Settings of the head, compiled into the kernels: logits = CAP tanh(SCALE raw), or SCALE raw."""
    if head.softcap is None:
        return {"SCALE": head.logit_scale / head.temperature, "CAP": 0.0, "HAS_BIAS": bias is not None}
    cap = head.softcap / head.temperature
    return {"SCALE": head.logit_scale / head.softcap, "CAP": cap, "HAS_BIAS": bias is not None}


def _real(head: Head, vocabulary: int) -> int:
    """Ids from here on are padding."""
    return vocabulary if head.vocabulary_size is None else head.vocabulary_size


def _group_size(vocabulary: int, top_k: int) -> int:
    """Ids in a group: as many as make both selections, among groups and within them, small."""
    if not top_k:
        return 128
    return min((128, 64, 32, 16), key=lambda group: max(_select_widths(vocabulary, top_k, group)))


def _select_widths(vocabulary: int, top_k: int, group: int) -> tuple[int, int]:
    """Among how many values is selected: maxima of groups, then ids of the selected groups."""
    groups = triton.cdiv(vocabulary, group)
    return triton.next_power_of_2(groups), triton.next_power_of_2(min(top_k, groups) * group)


def _fits(widths: tuple[int, int], dtype: torch.dtype) -> bool:
    return max(widths) <= _MAX_CANDIDATES and dtype == torch.float32


def _parts(width: int, count: int) -> int:
    """Parts of a row whose largest values say where to look for its `count` largest."""
    return min(width, triton.next_power_of_2(count))


def _warps(width: int) -> int:
    """About 32 values a thread: more, and they do not fit its registers."""
    return min(16, max(1, width // 1024))
