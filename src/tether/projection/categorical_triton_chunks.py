"""The device code of `categorical_triton.py` for rows too wide for registers: chunk by chunk.

Each function names what it repeats; the reasons are told there. A pass reads both rows once. Two tell whether
a row is inside; a projected one takes four more and one an evaluation of the divergence, its gradient two.
What describes a row's curve is kept between the kernels in `KNOWN` numbers.
"""

# Triton reads annotations, so they are not postponed.
import triton
import triton.language as tl

from tether.projection.categorical_triton_kernels import (
    FAR,
    MAX_ITERATIONS,
    VANISHING,
    first_guess,
    first_step,
    next_step,
    smallest_variance,
)

#: Numbers kept of each row: what normalises new and old, what becomes of new zeros (see `_treat_zeros`), the
#: ratio's centre and scale, x, what normalises the curve there and its mean.
KNOWN = 12
# Inside a kernel the first eight are a tuple, `curve`.


@triton.jit
def project_wide_kernel(
    new, old, bound, log_probs, step, kl, constrained, converged, known, outcomes,
    TOLERANCE: tl.constexpr, EPSILON: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_Project.forward` of one row."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * outcomes
    new += at
    old += at
    log_probs += at
    known += row * 12
    limit = tl.load(bound)
    new_largest, new_total = _partition(new, outcomes, BLOCK)
    old_largest, old_total = _partition(old, outcomes, BLOCK)
    # New zeros, if there are any, and the ratio as they are.
    zero = limit * 0
    curve = (new_largest, new_total, old_largest, old_total, zero, zero, zero, zero + 1)
    divergence, zeros = _kl_and_zeros(new, old, curve, outcomes, BLOCK)
    tl.store(kl + row, divergence)
    if divergence > limit:
        most, at_zeros, at_start = _treat_zeros(new, old, curve, zeros, limit, outcomes, BLOCK)
        curve = (new_largest, new_total, old_largest, old_total, most, at_zeros, zero, zero + 1)
        centre, scale = _centre_and_scale(new, old, curve, outcomes, TINY, BLOCK)
        curve = (new_largest, new_total, old_largest, old_total, most, at_zeros, centre, scale)
        spread = _variance_at_zero(new, old, curve, outcomes, BLOCK)
        end = divergence
        if divergence == float("inf"):
            end, _slope = _kl_and_slope(scale, new, old, curve, outcomes, BLOCK)
        x = scale
        met = limit > 0
        if end > limit:
            low = tl.minimum(tl.sqrt((limit - at_start) * 8 * (1 - 1e-4)), scale)
            x, met = _solve(
                new, old, curve, outcomes, limit, low, scale, first_guess(end, limit, scale, spread),
                TOLERANCE, EPSILON, BLOCK,
            )  # fmt: skip
        largest, total, mean, _square = _moments(x, new, old, curve, outcomes, BLOCK)
        for first in range(0, outcomes, BLOCK):
            column, start, ratio, _ = _chunk(new, old, curve, first, outcomes, BLOCK)
            tl.store(log_probs + column, start + x * ratio - largest - total, mask=column < outcomes)
        for i in tl.static_range(8):
            tl.store(known + i, curve[i])
        tl.store(known + 8, x)
        tl.store(known + 9, largest)
        tl.store(known + 10, total)
        tl.store(known + 11, mean)
        tl.store(step + row, x / scale)
        tl.store(constrained + row, (end > limit).to(tl.int8))
        tl.store(converged + row, met.to(tl.int8))
    else:
        for first in range(0, outcomes, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(
                log_probs + column, tl.load(new + column, mask=column < outcomes), mask=column < outcomes
            )
        tl.store(step + row, 1.0)
        tl.store(constrained + row, 0)
        tl.store(converged + row, 1)


@triton.jit
def project_wide_backward_kernel(
    new, old, bound, step, kl, constrained, known, upstream, grad, outcomes,
    EPSILON: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_implicit_gradient` of one row."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * outcomes
    new += at
    old += at
    upstream += at
    grad += at
    known += row * 12
    limit = tl.load(bound)
    if tl.load(kl + row) > limit:
        curve = (
            tl.load(known), tl.load(known + 1), tl.load(known + 2), tl.load(known + 3),
            tl.load(known + 4), tl.load(known + 5), tl.load(known + 6), tl.load(known + 7),
        )  # fmt: skip
        x = tl.load(known + 8)
        largest = tl.load(known + 9)
        total = tl.load(known + 10)
        mean = tl.load(known + 11)
        variance = mean * 0
        along = mean * 0
        arrived = mean * 0
        for first in range(0, outcomes, BLOCK):
            column, start, ratio, free = _chunk(new, old, curve, first, outcomes, BLOCK)
            pulled = tl.where(free, tl.load(upstream + column, mask=free, other=0.0), 0.0)
            probs = tl.exp(start + x * ratio - largest - total)
            centred = tl.where(column < outcomes, ratio - mean, 0.0) * x
            variance += tl.sum(probs * centred * centred, 0)
            along += tl.sum(pulled * centred, 0)
            arrived += tl.sum(pulled, 0)
        along = along / tl.maximum(variance, TINY)
        held = (tl.load(constrained + row) != 0) & (variance > smallest_variance(limit, EPSILON, TINY))
        along = tl.where(held, along, 0.0)
        s = tl.load(step + row)
        for first in range(0, outcomes, BLOCK):
            column, start, ratio, free = _chunk(new, old, curve, first, outcomes, BLOCK)
            pulled = tl.load(upstream + column, mask=free, other=0.0)
            probs = tl.exp(start + x * ratio - largest - total)
            inner = (pulled - arrived * probs - along * (x * (ratio - mean) * probs)) * s
            tl.store(grad + column, tl.where(free, inner, 0.0), mask=column < outcomes)
    else:
        for first in range(0, outcomes, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(
                grad + column, tl.load(upstream + column, mask=column < outcomes), mask=column < outcomes
            )


@triton.jit
def _partition(values, outcomes, BLOCK: tl.constexpr):
    """`log_partition`; NaN for a row without any probability."""
    largest = tl.full((), float("-inf"), values.dtype.element_ty)
    total = tl.full((), 0.0, values.dtype.element_ty)
    for first in range(0, outcomes, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logits = tl.load(values + column, mask=column < outcomes, other=float("-inf"))
        highest, weights, shrink = weights_so_far(largest, logits)
        total = total * shrink + tl.sum(weights, 0)
        largest = highest
    return largest, tl.where(largest > float("-inf"), tl.log(total), float("nan"))


@triton.jit
def weights_so_far(largest, logits):
    """The largest logit so far, exponentials relative to it, and what to multiply earlier sums by."""
    highest = tl.maximum(largest, tl.max(logits, 0))
    base = tl.where(highest > float("-inf"), highest, 0.0)
    return highest, tl.exp(logits - base), tl.exp(largest - base)


@triton.jit
def _normalised_chunk(new, old, curve, first, outcomes, BLOCK: tl.constexpr):
    """Log-probabilities of a chunk under both policies, -inf beyond the row."""
    column = first + tl.arange(0, BLOCK)
    inside = column < outcomes
    log_new = tl.load(new + column, mask=inside, other=float("-inf")) - curve[0] - curve[1]
    log_old = tl.load(old + column, mask=inside, other=float("-inf")) - curve[2] - curve[3]
    return column, log_new, log_old


@triton.jit
def _kl_and_zeros(new, old, curve, outcomes, BLOCK: tl.constexpr):
    """`rows_kl`, and whether the new policy has a zero where the old one has none."""
    kl = curve[0] * 0
    mass = kl * 0
    zeros = 0
    for first in range(0, outcomes, BLOCK):
        _, log_new, log_old = _normalised_chunk(new, old, curve, first, outcomes, BLOCK)
        probs = tl.exp(log_new)
        held = probs != 0
        terms = tl.where(held, log_new, 0.0) - tl.where(held, log_old, 0.0)
        kl += tl.sum(probs * terms, 0)
        mass += tl.sum(probs, 0)
        lost = (log_new == float("-inf")) & (log_old != float("-inf"))
        zeros += tl.sum(lost.to(tl.int32), 0)
    # NaN or +inf anywhere, or nothing but -inf, leaves no normaliser that is a number.
    normaliser = curve[1] + curve[3]
    return tl.where(normaliser == normaliser, tl.maximum(kl / mass, 0.0), normaliser), zeros


@triton.jit
def _treat_zeros(new, old, curve, zeros, bound, outcomes, BLOCK: tl.constexpr):
    """`Geodesic._treat_zeros`: at most how likely new zeros are where the curve starts (not at all, or
    as they are), their ratio, and the divergence there."""
    jump = bound * 0
    most = bound * 0 + float("inf")
    ratio = bound * 0
    if zeros > 0:
        largest = bound * 0 + float("-inf")
        total = bound * 0
        for first in range(0, outcomes, BLOCK):
            _, log_new, log_old = _normalised_chunk(new, old, curve, first, outcomes, BLOCK)
            held = tl.where(log_new == float("-inf"), float("-inf"), log_old)
            highest, weights, shrink = weights_so_far(largest, held)
            total = total * shrink + tl.sum(weights, 0)
            largest = highest
        jump = tl.where(largest > float("-inf"), tl.maximum(-largest - tl.log(total), 0.0), float("inf"))
        most = tl.where(jump < bound, -most, most)
        ratio = tl.where((jump >= bound) & (jump < float("inf")), VANISHING, ratio)
    return most, ratio, tl.where(jump < bound, jump, 0.0)


@triton.jit
def _chunk(new, old, curve, first, outcomes, BLOCK: tl.constexpr):
    """`Geodesic`: columns, where the curve starts, the ratio as far as centred and scaled, what is free."""
    column, log_new, log_old = _normalised_chunk(new, old, curve, first, outcomes, BLOCK)
    old_zero = log_old == float("-inf")
    new_zero = (log_new == float("-inf")) & ~old_zero
    free = (column < outcomes) & ~old_zero & ~new_zero
    start = tl.where(new_zero, tl.minimum(log_old, curve[4]), log_old)
    ratio = tl.where(free, log_new, 0.0) - tl.where(free, start, 0.0)
    ratio = tl.where(new_zero, curve[5], ratio)
    ratio = tl.minimum(tl.maximum(ratio, VANISHING), -VANISHING)
    ratio = tl.where(column < outcomes, (ratio - curve[6]) / curve[7], 0.0)
    return column, start, ratio, free


@triton.jit
def _centre_and_scale(new, old, curve, outcomes, TINY: tl.constexpr, BLOCK: tl.constexpr):
    """`_centre`, and the range of the ratio."""
    mean = curve[0] * 0
    mass = mean * 0
    most = mean * 0 - 1
    at_mode = mean * 0
    highest = mean * 0 + float("-inf")
    lowest = mean * 0 + float("inf")
    for first in range(0, outcomes, BLOCK):
        column, start, ratio, _ = _chunk(new, old, curve, first, outcomes, BLOCK)
        inside = column < outcomes
        probs = tl.exp(start)
        mean += tl.sum(ratio * probs, 0)
        mass += tl.sum(probs, 0)
        candidates = tl.where(inside & (ratio > VANISHING / 2), probs, -1.0)
        mode = tl.argmax(candidates, 0)
        value = tl.sum(tl.where(tl.arange(0, BLOCK) == mode, ratio, 0.0), 0)
        at_mode = tl.where(tl.max(candidates, 0) > most, value, at_mode)
        most = tl.maximum(most, tl.max(candidates, 0))
        highest = tl.maximum(highest, tl.max(tl.where(inside, ratio, float("-inf")), 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, ratio, float("inf")), 0))
    mean = mean / mass
    if tl.abs(mean) >= 8:
        mean = mean * 0
        for first in range(0, outcomes, BLOCK):
            column, start, ratio, _ = _chunk(new, old, curve, first, outcomes, BLOCK)
            limited = tl.minimum(tl.maximum(ratio - at_mode, -8.0), 8.0)
            mean += tl.sum(limited * tl.exp(start), 0)
        mean = at_mode + mean / mass
    return mean, tl.maximum(highest - lowest, TINY * 1e6)


@triton.jit
def _variance_at_zero(new, old, curve, outcomes, BLOCK: tl.constexpr):
    """Of the ratio, where the curve starts."""
    spread = curve[0] * 0
    mass = spread
    for first in range(0, outcomes, BLOCK):
        _, start, ratio, _ = _chunk(new, old, curve, first, outcomes, BLOCK)
        probs = tl.exp(start)
        spread += tl.sum(probs * ratio * ratio, 0)
        mass += tl.sum(probs, 0)
    return spread / mass


@triton.jit
def _moments(x, new, old, curve, outcomes, BLOCK: tl.constexpr):
    """What normalises the curve at x, and the ratio's first two moments there."""
    largest = x * 0 + float("-inf")
    total = x * 0
    mean = x * 0
    square = x * 0
    for first in range(0, outcomes, BLOCK):
        _, start, ratio, _ = _chunk(new, old, curve, first, outcomes, BLOCK)
        highest, weights, shrink = weights_so_far(largest, start + x * ratio)
        total = total * shrink + tl.sum(weights, 0)
        mean = mean * shrink + tl.sum(weights * ratio, 0)
        square = square * shrink + tl.sum(weights * ratio * ratio, 0)
        largest = highest
    return largest, tl.log(total), mean / total, square / total


@triton.jit
def _kl_and_slope(x, new, old, curve, outcomes, BLOCK: tl.constexpr):
    """`Geodesic.kl_and_slope`."""
    largest, total, mean, square = _moments(x, new, old, curve, outcomes, BLOCK)
    tilt = x * mean
    divergence = tilt - (largest + total)
    if tl.abs(tilt) > FAR:
        divergence = x * 0
        mass = x * 0
        for first in range(0, outcomes, BLOCK):
            _, start, ratio, _ = _chunk(new, old, curve, first, outcomes, BLOCK)
            log_pi = start + x * ratio - largest - total
            probs = tl.exp(log_pi)
            held = probs > 0
            terms = tl.where(held, log_pi, 0.0) - tl.where(held, start, 0.0)
            divergence += tl.sum(terms * probs, 0)
            mass += tl.sum(probs, 0)
        divergence = divergence / mass
    return divergence, x * tl.maximum(square - mean * mean, 0.0)


@triton.jit
def _solve(
    new, old, curve, outcomes, bound, low, high, guess,
    TOLERANCE: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`solve_increasing`."""
    x = first_step(guess, low, high)
    previous_error = bound * 0 + float("inf")
    done = bound < 0
    converged = bound < 0
    iteration = 0
    while (iteration < MAX_ITERATIONS) & ~done:
        value, slope = _kl_and_slope(x, new, old, curve, outcomes, BLOCK)
        x, low, high, previous_error, done, converged = next_step(
            x, value, slope, bound, low, high, previous_error, TOLERANCE, EPSILON
        )
        iteration += 1
    return tl.where(done, x, low), converged
