"""The device code of `dense_rows_triton.py`: one program a row, chunk by chunk for a vocabulary of any size.

Each function names what it repeats; the reasons are told there. A pass is one loop over `_chunk`, which reads
a row of both policies once. What is one number a row is float64.
"""

# Triton reads annotations, so they are not postponed.
import triton
import triton.language as tl

from tether.ops.rows_triton_kernels import taken
from tether.projection import anchored
from tether.projection.categorical_triton_chunks import weights_so_far

# Kernels read globals only as `constexpr`.
_MAX_STEPS: tl.constexpr = tl.constexpr(anchored.MAX_STEPS)
_SMALLEST: tl.constexpr = tl.constexpr(anchored.SMALLEST)
_FAR: tl.constexpr = tl.constexpr(anchored.FAR)
_LARGEST_OFFSET: tl.constexpr = tl.constexpr(anchored.LARGEST_OFFSET)
_SERIES_STEPS: tl.constexpr = tl.constexpr(anchored.SERIES_STEPS)
_LARGEST_MISS: tl.constexpr = tl.constexpr(anchored.LARGEST_MISS)
_ROUNDING: tl.constexpr = tl.constexpr(anchored.ROUNDING)

#: What becomes of a row: it is inside the bound, projected, or left to the reference.
INSIDE: tl.constexpr = tl.constexpr(0)
PROJECTED: tl.constexpr = tl.constexpr(1)
LEFT: tl.constexpr = tl.constexpr(2)


@triton.jit
def compare_kernel(
    new, old, ids, rows, bound, found, outcome, vocabulary, new_stride, old_stride,
    CHANGE: tl.constexpr, FOUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`AnchoredCurve`: measure a row in one pass; if it is outside, solve it in one more an evaluation."""
    row = tl.program_id(0).to(tl.int64)
    at = row
    if rows is not None:
        at = tl.load(rows + row)
    new += at * new_stride
    old += row * old_stride
    found += row * FOUND
    anchor = tl.load(ids + row)
    anchor_new = tl.load(new + anchor)
    anchor_old = tl.load(old + anchor)
    offset = anchor_new - anchor_old
    limit = tl.load(bound)
    top, total, mean, square, old_top, old_total, old_mean, old_square = _ends(
        new, old, offset, vocabulary, BLOCK
    )
    log_new = anchor_new.to(tl.float64) - top - tl.log(total)
    log_old = anchor_old.to(tl.float64) - old_top - tl.log(old_total)
    measured = mean + log_new - log_old
    kl = tl.maximum(measured, 0.0).to(new.dtype.element_ty)
    near = tl.abs(mean) <= (1 + kl) * _FAR
    reliable = near & (log_old > _SMALLEST) & (log_new > _SMALLEST) & (measured < float("inf"))
    became = tl.where(reliable, INSIDE, LEFT)
    tl.store(found, kl)
    if reliable & (kl > limit):
        step, centre = _first_guess(kl.to(tl.float64), limit, mean, square, old_mean, old_square)
        step, log_prob, moved_mean, variance, moved_kl, met = _solve(
            step, centre, limit, new, old, offset, top, anchor_new - top, log_old, vocabulary, CHANGE, BLOCK
        )
        regression = (1 - step) * mean + log_new - log_prob
        tl.store(found + 1, log_prob)
        tl.store(found + 2, moved_kl)
        tl.store(found + 3, tl.maximum(regression, 0.0))
        tl.store(found + 4, step)
        tl.store(found + 5, -step * moved_mean)
        tl.store(found + 6, step * step * variance)
        became = tl.where(met, PROJECTED, LEFT)
    tl.store(outcome + row, became.to(tl.int8))


@triton.jit
def projected_gradient_kernel(
    logits, old, grad, old_rows, ids, log_sum, entropy, total, grad_entropy, arrived,
    sampled, regression, along, step, left, vocabulary, stride, old_stride, grad_stride,
    SLOPE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`to_gradient` of one row, times `Head.slope`; `grad` may be `logits`.

    A row that acts is read twice, first for its normalisation. Where one policy alone holds a zero, nothing
    is written.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    grad += row * grad_stride
    anchor = tl.load(ids + row)
    old_row = tl.load(old_rows + row)
    acts = old_row >= 0
    old += tl.maximum(old_row, 0) * old_stride
    old_width = tl.where(acts, vocabulary, 0)
    base = tl.load(log_sum + row)
    at_anchor = tl.load(arrived + row)
    zero = base * 0
    offset, tilt, top, push, pull, twist = zero, zero, zero, zero, zero, zero
    mass, mean, moved_mass, moved_mean = zero + 1, zero, zero + 1, zero
    lost = old_row < -1
    if acts:
        offset = tl.load(logits + anchor) - tl.load(old + anchor)
        s = tl.load(step + row)
        tilt = s - 1
        mass, mean, top, moved_mass, moved_mean = _both(logits, old, offset, base, tilt, vocabulary, BLOCK)
        push = tl.load(sampled + row) * s
        twist = tl.load(along + row) * s
        pull = tl.load(regression + row) * (1 - s)
        at_anchor += push
        lost = ~(tl.abs(mean + moved_mean) < float("inf"))
    tl.store(left + row, lost.to(tl.int8))
    for first in range(0, tl.where(lost, 0, vocabulary), BLOCK):
        column, values, _, ratio = _chunk(logits, old, offset, first, vocabulary, old_width, BLOCK)
        probs = tl.exp(values - base) / mass
        moved = tl.exp(values - base + tilt * ratio - top) / moved_mass
        result = taken(values, row, log_sum, entropy, total, grad_entropy)
        result += probs * (pull * (ratio - mean)) - moved * (push + twist * (ratio - moved_mean))
        result += tl.where(column == anchor, at_anchor, 0.0)
        if CAP > 0:
            capped = values / CAP
            result = result * tl.where(values == float("-inf"), 0.0, (1 - capped * capped) * SLOPE)
        else:
            result = result * SLOPE
        tl.store(grad + column, result, mask=column < vocabulary)


@triton.jit
def _chunk(new, old, offset, first, vocabulary, old_width, BLOCK: tl.constexpr):
    """Columns, logits of both policies (-inf beyond their widths) and the log-ratio less the anchor's.

    What neither policy can produce is in no sum, as if it were beyond the row.
    """
    column = first + tl.arange(0, BLOCK)
    values = tl.load(new + column, mask=column < vocabulary, other=float("-inf"))
    old_values = tl.load(old + column, mask=column < old_width, other=float("-inf"))
    known = (column < old_width) & ((values > float("-inf")) | (old_values > float("-inf")))
    return column, values, old_values, tl.where(known, values - old_values - offset, 0.0)


@triton.jit
def _add(top, total, first, second, values, ratio):
    """A chunk's part of a normalisation and of two moments, all relative to the largest value so far."""
    top, weights, shrink = weights_so_far(top, values)
    total = total * shrink + tl.sum(weights, 0)
    weights = weights * ratio
    first = first * shrink + tl.sum(weights, 0)
    return top, total, first, second * shrink + tl.sum(weights * ratio, 0)


@triton.jit
def _ends(new, old, offset, vocabulary, BLOCK: tl.constexpr):
    """`AnchoredCurve._measure`: largest logit, sum relative to it and the ratio's moments, of both ends."""
    top = tl.full((), float("-inf"), new.dtype.element_ty)
    old_top = top
    total = tl.full((), 0.0, tl.float64)
    mean, square, old_total, old_mean, old_square = total, total, total, total, total
    for start in range(0, vocabulary, BLOCK):
        _, values, old_values, ratio = _chunk(new, old, offset, start, vocabulary, vocabulary, BLOCK)
        top, total, mean, square = _add(top, total, mean, square, values, ratio)
        old_top, old_total, old_mean, old_square = _add(
            old_top, old_total, old_mean, old_square, old_values, ratio
        )
    return (
        top, total, mean / total, square / total,
        old_top, old_total, old_mean / old_total, old_square / old_total,
    )  # fmt: skip


@triton.jit
def _both(new, old, offset, base, tilt, vocabulary, BLOCK: tl.constexpr):
    """Masses and means of the ratio under a row and its projection, and what the latter is relative to."""
    top = tl.full((), float("-inf"), new.dtype.element_ty)
    total = tl.full((), 0.0, tl.float64)
    mean, moved_total, moved_mean, unused = total, total, total, total
    for start in range(0, vocabulary, BLOCK):
        _, values, _, ratio = _chunk(new, old, offset, start, vocabulary, vocabulary, BLOCK)
        weights = tl.exp(values - base)
        total += tl.sum(weights, 0)
        mean += tl.sum(weights * ratio, 0)
        top, moved_total, moved_mean, unused = _add(
            top, moved_total, moved_mean, unused, values - base + tilt * ratio, ratio
        )
    return (
        total.to(top.dtype), (mean / total).to(top.dtype), top,
        moved_total.to(top.dtype), (moved_mean / moved_total).to(top.dtype),
    )  # fmt: skip


@triton.jit
def _solve(
    step, centre, bound, new, old, offset, base, anchor, log_old, vocabulary,
    CHANGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`AnchoredCurve.solve`: step, the anchor's log-probability, E[u], its variance, divergence, and whether
    all of it can be relied on. The anchor's new logit is `anchor` above `base`."""
    kl = bound * 0
    log_prob, variance = kl, kl
    met = bound < 0
    again = bound > 0
    evaluation = 0
    while (evaluation < _MAX_STEPS) & again:
        start, top, total, mean, spread, third, fourth, sound = _series(
            step, centre, new, old, offset, base, vocabulary, BLOCK
        )
        value = log_old - (anchor.to(tl.float64) - top - tl.log(total))
        delta = bound * 0
        for _ in range(_SERIES_STEPS):
            kl, _, _, variance = _along(delta, start, value, mean, spread, third, fourth)
            root = tl.sqrt(tl.maximum(kl, 1e-300))
            delta -= (root - tl.sqrt(bound)) * 2 * root / ((start + delta) * variance)
        kl, value, centre, variance = _along(delta, start, value, mean, spread, third, fourth)
        step = start + delta
        log_prob = log_old - value
        bent = tl.sqrt(tl.abs(fourth) / (2 * spread))
        change = tl.abs(delta) * tl.maximum(tl.abs(third / spread), bent)
        inside = sound & (step > 0) & (step < 1)
        met = inside & (change <= CHANGE) & (tl.abs(kl - bound) <= bound * _LARGEST_MISS + _ROUNDING)
        again = inside & ~met
        evaluation += 1
    near = (tl.abs(step * centre) <= _FAR) & (log_prob > _SMALLEST) & (variance > 0)
    return step, log_prob, centre, variance, kl, met & near


@triton.jit
def _series(step, centre, new, old, offset, base, vocabulary, BLOCK: tl.constexpr):
    """`AnchoredCurve._series`: the step as it was taken, the curve's normalisation there, relative to `base`,
    cumulants of the ratio, and whether they have their digits."""
    top = tl.full((), float("-inf"), new.dtype.element_ty)
    total = tl.full((), 0.0, tl.float64)
    first, second, third, fourth = total, total, total, total
    tilt, shift = (step - 1).to(top.dtype), centre.to(top.dtype)
    for start in range(0, vocabulary, BLOCK):
        _, values, _, ratio = _chunk(new, old, offset, start, vocabulary, vocabulary, BLOCK)
        top, weights, shrink = weights_so_far(top, values - base + tilt * ratio)
        ratio -= shift
        total = total * shrink + tl.sum(weights, 0)
        weights = weights * ratio
        first = first * shrink + tl.sum(weights, 0)
        weights = weights * ratio
        second = second * shrink + tl.sum(weights, 0)
        weights = weights * ratio
        third = third * shrink + tl.sum(weights, 0)
        fourth = fourth * shrink + tl.sum(weights * ratio, 0)
    first, second, third, fourth = first / total, second / total, third / total, fourth / total
    square = first * first
    variance = second - square
    fourth += 12 * second * square - 4 * first * third - 3 * second * second - 6 * square * square
    third += 2 * first * square - 3 * first * second
    return (
        tilt.to(tl.float64) + 1, top, total, first + shift.to(tl.float64), variance, third, fourth,
        square <= variance * _LARGEST_OFFSET,
    )  # fmt: skip


@triton.jit
def _along(delta, step, value, mean, variance, third, fourth):
    """`_Series.at`."""
    moved_variance = variance + delta * (third + delta * (fourth / 2))
    moved_mean = mean + delta * (variance + delta * (third / 2 + delta * (fourth / 6)))
    inner = variance / 2 + delta * (third / 6 + delta * (fourth / 24))
    moved_value = value + delta * (mean + delta * inner)
    return (step + delta) * moved_mean - moved_value, moved_value, moved_mean, moved_variance


@triton.jit
def _first_guess(kl, bound, mean, square, old_mean, old_square):
    """`AnchoredCurve._first_guess`."""
    variance, old_variance = square - mean * mean, old_square - old_mean * old_mean
    slope = tl.sqrt(tl.maximum(old_variance, 0.0))
    end = tl.sqrt(2 * kl)
    third = variance / end - 2 * end + slope
    second = end - slope - third
    target = tl.sqrt(2 * bound)
    s = 2 * target / (slope + tl.sqrt(slope * slope + 4 * (end - slope) * target))
    for _ in range(2):
        value = s * (slope + s * (second + s * third))
        s -= (value - target) / (slope + s * (2 * second + s * 3 * third))
    s = tl.where((s > 0) & (s < 1), s, target / end)
    rise, bend = s * s * (3 - 2 * s), s * (1 - s)
    return s, old_mean + rise * (mean - old_mean) + bend * ((1 - s) * old_variance - s * variance)
