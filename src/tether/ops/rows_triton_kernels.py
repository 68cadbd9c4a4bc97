"""The device code of `rows_triton.py`. A setting in capitals is compiled in."""

# Triton reads annotations, so they are not postponed.
import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """By exp, and by its series near zero, where that would lose digits of float32."""
    fall = tl.exp(-2 * tl.abs(x))
    far = (1 - fall) / (1 + fall)
    result = tl.where(x < 0, -far, far)
    if x.dtype == tl.float32:
        square = x * x
        series = -929569 / 638512875
        series = 21844 / 6081075 + square * series
        series = -1382 / 155925 + square * series
        series = 62 / 2835 + square * series
        series = -17 / 315 + square * series
        series = 2 / 15 + square * series
        series = -1 / 3 + square * series
        result = tl.where(tl.abs(x) < 0.55, x + x * (square * series), result)
    return result


@triton.jit
def _load_raw(raw, bias, columns, held, HAS_BIAS: tl.constexpr):
    """What the head puts out, zero where it is not to be read."""
    values = tl.load(raw + columns, mask=held, other=0.0)
    if HAS_BIAS:
        values += tl.load(bias + columns, mask=held, other=0.0).to(values.dtype)
    return values


@triton.jit
def _transform(values, SCALE: tl.constexpr, CAP: tl.constexpr):
    """`Head.transform_` without the bias and the padding."""
    logits = values * tl.full((), SCALE, values.dtype)
    if CAP > 0:
        logits = _tanh(logits) * tl.full((), CAP, values.dtype)
    return logits


@triton.jit
def _slope(values, SCALE: tl.constexpr, CAP: tl.constexpr):
    """`Head.slope` from the raw output: 1 - tanh^2 by exp, which keeps its digits in saturation."""
    slope = tl.full((), SCALE, values.dtype)
    if CAP > 0:
        fall = tl.exp(-2 * tl.abs(values * slope))
        slope = slope * tl.full((), CAP, values.dtype) * (4 * fall / ((1 + fall) * (1 + fall)))
    return slope


@triton.jit
def _load_logits(
    raw, bias, columns, real, SCALE: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Logits of a few columns of a row; -inf outside [0, real)."""
    held = (columns >= 0) & (columns < real)
    logits = _transform(_load_raw(raw, bias, columns, held, HAS_BIAS), SCALE, CAP)
    return tl.where(held, logits, float("-inf"))


@triton.jit
def reduce_kernel(
    raw, bias, ids, log_probs, maxima, largest, log_total, entropy, smallest, vocabulary, real,
    slots, groups,
    SCALE: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_IDS: tl.constexpr,
):  # fmt: skip
    """One program a row. Sums are relative to the largest logit so far, so nothing cancels."""
    row = tl.program_id(0).to(tl.int64)
    raw += row * vocabulary
    top = tl.full((), float("-inf"), raw.dtype.element_ty)
    total = tl.full((), 0.0, raw.dtype.element_ty)
    moment = tl.full((), 0.0, raw.dtype.element_ty)
    low = tl.full((), float("inf"), raw.dtype.element_ty)
    for start in range(0, vocabulary, BLOCK):
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        logits = _load_logits(raw, bias, columns, real, SCALE, CAP, HAS_BIAS)
        block_maxima = tl.max(logits, 1)
        tl.store(maxima + row * groups + group, block_maxima, mask=group < groups)
        new_top = tl.maximum(top, tl.max(block_maxima, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing but -inf so far
        fall = tl.where(top == float("-inf"), 0.0, top - base)
        if smallest is not None:
            low = tl.minimum(low, tl.min(tl.min(tl.where(columns < real, logits, float("inf")), 1), 0))
        shifted = logits - base
        weights = tl.exp(shifted)
        # 0 times -inf is 0.
        moment = (moment + total * fall) * tl.exp(fall) + tl.sum(weights * tl.maximum(shifted, -1e4))
        total = total * tl.exp(fall) + tl.sum(weights)
        top = new_top
    row_log_total = tl.log(total)
    tl.store(largest + row, top)
    tl.store(log_total + row, row_log_total)
    tl.store(entropy + row, row_log_total - moment / total)
    if smallest is not None:
        tl.store(smallest + row, low)
    for start in range(0, slots, BLOCK_IDS):
        slot = start + tl.arange(0, BLOCK_IDS)
        inside = slot < slots
        wanted = tl.load(ids + row * slots + slot, mask=inside, other=-1)
        logits = _load_logits(raw, bias, wanted, real, SCALE, CAP, HAS_BIAS)
        tl.store(log_probs + row * slots + slot, logits - top - row_log_total, mask=inside)


@triton.jit
def select_kernel(
    values, bias, groups, picked, picked_values, columns, real, chosen, count,
    SCALE: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The `count` largest values of a row, ties by lowest id, stored by rising id.

    GROUP = 0: among all columns; else among the columns of the `chosen` groups, given by rising id.
    The smallest value that is in is found by halving a range of float32, ordered as integers: from the
    smallest of the largest of PARTS parts, which at least PARTS >= count values reach, to the largest of all.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, WIDTH)
    if GROUP == 0:
        ids = position
        inside = ids < columns
    else:
        slot = position // GROUP
        ids = tl.load(groups + row * chosen + slot, mask=slot < chosen, other=0) * GROUP + position % GROUP
        inside = (slot < chosen) & (ids < columns)
    logits = _load_logits(values + row * columns, bias, tl.where(inside, ids, -1), real, SCALE, CAP, HAS_BIAS)
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 is no less than 0
    order = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x7FFFFFFF - 1)
    largest = tl.max(tl.reshape(order, (WIDTH // PARTS, PARTS)), 0)
    low = tl.maximum(tl.min(largest, 0).to(tl.int64), -0x7FFFFFFF)  # all that is inside, if a part is empty
    high = tl.max(largest, 0).to(tl.int64)
    held = tl.sum((order >= low).to(tl.int32), 0)
    while (low < high) & (held != count):
        middle = low + (high - low + 1) // 2
        above = tl.sum((order >= middle).to(tl.int32), 0)
        enough = above >= count
        held = tl.where(enough, above, held)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    larger = order > low
    tied = order == low
    missing = count - tl.sum(larger.to(tl.int32), 0)
    is_in = larger | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= missing))
    rank = tl.cumsum(is_in.to(tl.int32), 0) - 1
    tl.store(picked + row * count + rank, ids, mask=is_in)
    if GROUP > 0:
        tl.store(picked_values + row * count + rank, logits, mask=is_in)


@triton.jit
def gradient_kernel(
    raw, bias, grad, log_sum, entropy, total, grad_entropy, vocabulary, real,
    SCALE: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of raw logits but for what arrived at single ids; `grad` may be `raw`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    active = tl.load(total + row) != 0
    if grad_entropy is not None:
        active = active | (tl.load(grad_entropy + row) != 0)
    held = columns < tl.where(active, real, 0)  # rows without gradient read nothing
    values = _load_raw(raw + row * vocabulary, bias, columns, held, HAS_BIAS)
    result = taken(_transform(values, SCALE, CAP), row, log_sum, entropy, total, grad_entropy)
    result = tl.where(held, result * _slope(values, SCALE, CAP), 0.0)
    tl.store(grad + row * vocabulary + columns, result, mask=columns < vocabulary)


@triton.jit
def gradient_at_ids_kernel(
    raw, bias, ids, arrived, at_ids, log_sum, entropy, total, grad_entropy, vocabulary, real, slots,
    SCALE: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The whole gradient of raw logits at the given ids, to be put in place of what is there.

    An id may be given twice: each slot adds up what arrived for all of them, in the same order, so they
    hold the same number. Nothing is rounded in between and no order of writes matters.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    summed = tl.zeros((BLOCK,), arrived.dtype.element_ty)
    for start in range(0, slots, BLOCK):
        other_slot = start + tl.arange(0, BLOCK)
        other = tl.load(ids + row * slots + other_slot, mask=other_slot < slots, other=-2)
        sent = tl.load(arrived + row * slots + other_slot, mask=other_slot < slots, other=0.0)
        summed += tl.sum(tl.where(own[:, None] == other[None, :], sent[None, :], 0.0), 1)
    held = (own >= 0) & (own < real)
    values = _load_raw(raw + row * vocabulary, bias, own, held, HAS_BIAS)
    result = summed + taken(_transform(values, SCALE, CAP), row, log_sum, entropy, total, grad_entropy)
    tl.store(at_ids + row * slots + slot, result * _slope(values, SCALE, CAP), mask=slot < slots)


@triton.jit
def scatter_kernel(grad, ids, at_ids, vocabulary, real, slots, BLOCK: tl.constexpr):
    """Put the gradient at the given ids into its row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    held = (own >= 0) & (own < real)
    values = tl.load(at_ids + row * slots + slot, mask=held, other=0.0)
    tl.store(grad + row * vocabulary + own, values, mask=held)


@triton.jit
def taken(logits, row, log_sum, entropy, total, grad_entropy):
    """-p (total + (log p + H) g_H), the part of the gradient that every id has."""
    log_prob = logits - tl.load(log_sum + row)
    inner = tl.load(total + row)
    if grad_entropy is not None:
        # Far below what has a probability in float64, and finite: 0 times infinity is NaN.
        centred = tl.maximum(log_prob, -1e4) + tl.load(entropy + row)
        inner = inner + centred * tl.load(grad_entropy + row)
    return -tl.exp(log_prob) * inner


@triton.jit
def square_norm_kernel(
    weight, minus, minus_row, squares, width, stride, minus_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Squared norm of one row of ``weight - minus - minus_row``."""
    row = tl.program_id(0).to(tl.int64)
    dtype = squares.dtype.element_ty
    total = tl.full((), 0.0, dtype)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        values = tl.load(weight + row * stride + column, mask=inside, other=0.0).to(dtype)
        if minus is not None:
            values -= tl.load(minus + row * minus_stride + column, mask=inside, other=0.0).to(dtype)
        if minus_row is not None:
            values -= tl.load(minus_row + column, mask=inside, other=0.0).to(dtype)
        total += tl.sum(values * values, 0)
    tl.store(squares + row, total)
