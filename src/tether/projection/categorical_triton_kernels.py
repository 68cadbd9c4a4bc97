"""The device code of `categorical_triton.py`: `geodesic.py` and `solve.py` for one row in registers.

Each function names what it repeats; the reasons are told there. Columns beyond the row hold an old
probability of zero and a log-ratio of zero, which change nothing.
"""

# Triton reads annotations, so they are not postponed.
import triton
import triton.language as tl

# The constants of `solve.py` and `geodesic.py`.
MAX_ITERATIONS: tl.constexpr = tl.constexpr(60)
_CONVERGED: tl.constexpr = tl.constexpr(100.0)
VANISHING: tl.constexpr = tl.constexpr(-1e30)
FAR: tl.constexpr = tl.constexpr(4.0)


@triton.jit
def project_kernel(
    new, old, bound, log_probs, step, kl, constrained, converged, outcomes,
    TOLERANCE: tl.constexpr, EPSILON: tl.constexpr, TINY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`_Project.forward` of one row."""
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < outcomes
    at = row.to(tl.int64) * outcomes + column
    new_row = tl.load(new + at, mask=inside, other=float("-inf"))
    old_row = tl.load(old + at, mask=inside, other=float("-inf"))
    limit = tl.load(bound)
    divergence = _row_kl(new_row, old_row, inside)
    tl.store(kl + row, divergence)
    if divergence > limit:
        start, ratio, scale, _, at_zero, spread = _geodesic(new_row, old_row, inside, limit, TINY)
        end, _ = _kl_and_slope(scale, start, ratio)
        end = tl.where(divergence == float("inf"), end, divergence)
        x = scale
        met = limit > 0
        if end > limit:
            low = tl.minimum(tl.sqrt((limit - at_zero) * 8 * (1 - 1e-4)), scale)
            x, met = _solve(
                start, ratio, limit, low, scale, first_guess(end, limit, scale, spread), TOLERANCE, EPSILON
            )
        moved, _ = _normalised(start + x * ratio)
        tl.store(log_probs + at, moved, mask=inside)
        tl.store(step + row, x / scale)
        tl.store(constrained + row, (end > limit).to(tl.int8))
        tl.store(converged + row, met.to(tl.int8))
    else:
        tl.store(log_probs + at, new_row, mask=inside)
        tl.store(step + row, 1.0)
        tl.store(constrained + row, 0)
        tl.store(converged + row, 1)


@triton.jit
def project_backward_kernel(
    new, old, bound, step, kl, constrained, upstream, grad, outcomes,
    EPSILON: tl.constexpr, TINY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`_implicit_gradient` of one row, which is formed again."""
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < outcomes
    at = row.to(tl.int64) * outcomes + column
    arrived = tl.load(upstream + at, mask=inside, other=0.0)
    limit = tl.load(bound)
    if tl.load(kl + row) > limit:
        new_row = tl.load(new + at, mask=inside, other=float("-inf"))
        old_row = tl.load(old + at, mask=inside, other=float("-inf"))
        start, ratio, scale, free, _, _ = _geodesic(new_row, old_row, inside, limit, TINY)
        s = tl.load(step + row)
        x = s * scale
        _, probs = _normalised(start + x * ratio)
        centred = tl.where(inside, ratio - tl.sum(probs * ratio, 0), 0.0) * x
        variance = tl.sum(probs * centred * centred, 0)
        pulled = tl.where(free, arrived, 0.0)
        along = tl.sum(pulled * centred, 0) / tl.maximum(variance, TINY)
        held = (tl.load(constrained + row) != 0) & (variance > smallest_variance(limit, EPSILON, TINY))
        along = tl.where(held, along, 0.0)
        inner = (pulled - tl.sum(pulled, 0) * probs - along * (centred * probs)) * s
        arrived = tl.where(free, inner, 0.0)
    tl.store(grad + at, arrived, mask=inside)


@triton.jit
def smallest_variance(bound, EPSILON: tl.constexpr, TINY: tl.constexpr):
    """`categorical.smallest_variance`."""
    return tl.maximum(bound * EPSILON, TINY * 1e6)


@triton.jit
def _normalised(logits):
    """`log_softmax` and softmax; NaN for a row without any probability."""
    shifted = logits - tl.max(logits, 0)
    weights = tl.exp(shifted)
    total = tl.sum(weights, 0)
    return shifted - tl.log(total), weights / total


@triton.jit
def _row_kl(new, old, inside):
    """`rows_kl`."""
    log_new, probs = _normalised(new)
    log_old, old_probs = _normalised(old)
    held = inside & (probs != 0)
    terms = tl.where(held, log_new, 0.0) - tl.where(held, log_old, 0.0)
    kl = tl.sum(probs * tl.where(held, terms, 0.0), 0) / tl.sum(probs, 0)
    # NaN or +inf anywhere, or nothing but -inf, leaves no sum that is a number.
    total = tl.sum(probs, 0) + tl.sum(old_probs, 0)
    return tl.where(total == total, tl.maximum(kl, 0.0), total)


@triton.jit
def _geodesic(new, old, inside, bound, TINY: tl.constexpr):
    """`Geodesic`: where the curve starts, the scaled log-ratio, its scale, which outcomes are free,
    the divergence at the start, and the ratio's variance there."""
    start, _ = _normalised(old)
    log_new, _ = _normalised(new)
    old_zero = start == float("-inf")
    new_zero = inside & (log_new == float("-inf")) & ~old_zero
    free = inside & ~old_zero & ~new_zero
    jump = _lost(start, free)
    jump = tl.where(tl.sum(new_zero.to(tl.int32), 0) > 0, jump, 0.0)  # but for rounding
    jump_to_zero = tl.where(new_zero, jump, -1.0)
    left_out = new_zero & (jump_to_zero < bound)
    vanishing = (jump_to_zero >= bound) & (jump_to_zero < float("inf"))
    at_zero = tl.where(jump < bound, jump, 0.0)
    start = tl.where(left_out, float("-inf"), start)
    ratio = tl.where(free, log_new, 0.0) - tl.where(free, start, 0.0)
    ratio = tl.where(vanishing, VANISHING, ratio)
    ratio = tl.minimum(tl.maximum(ratio, VANISHING), -VANISHING)
    _, probs = _normalised(start)
    ratio = tl.where(inside, ratio - _centre(ratio, probs, inside), 0.0)
    width = tl.max(tl.where(inside, ratio, float("-inf")), 0) - tl.min(
        tl.where(inside, ratio, float("inf")), 0
    )
    scale = tl.maximum(width, TINY * 1e6)
    ratio = ratio / scale
    return start, ratio, scale, free, at_zero, tl.sum(probs * ratio * ratio, 0)


@triton.jit
def _lost(log_probs, free):
    """-log of the probability the free outcomes hold; infinite if there are none."""
    held = tl.where(free, log_probs, float("-inf"))
    largest = tl.max(held, 0)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    lost = tl.maximum(-base - tl.log(tl.sum(tl.exp(held - base), 0)), 0.0)
    return tl.where(largest > float("-inf"), lost, float("inf"))


@triton.jit
def _centre(ratio, probs, inside):
    """`_centre`."""
    mean = tl.sum(ratio * probs, 0)
    candidates = tl.where(inside, tl.where(ratio > VANISHING / 2, probs, -1.0), -2.0)
    mode = tl.argmax(candidates, 0)
    at_mode = tl.sum(tl.where(tl.arange(0, ratio.shape[0]) == mode, ratio, 0.0), 0)
    limited = tl.minimum(tl.maximum(ratio - at_mode, -8.0), 8.0)
    return tl.where(tl.abs(mean) < 8, mean, at_mode + tl.sum(limited * probs, 0))


@triton.jit
def _kl_and_slope(x, start, ratio):
    """`Geodesic.kl_and_slope`."""
    curve = start + x * ratio
    largest = tl.max(curve, 0)
    weights = tl.exp(curve - largest)
    total = tl.sum(weights, 0)
    log_sum = tl.log(total)
    probs = weights / total
    mean = tl.sum(probs * ratio, 0)
    centred = ratio - mean
    variance = tl.sum(probs * centred * centred, 0)
    tilt = x * mean
    held = probs > 0
    terms = tl.where(held, curve - largest - log_sum, 0.0) - tl.where(held, start, 0.0)
    divergence = tl.where(tl.abs(tilt) > FAR, tl.sum(terms * probs, 0), tilt - (largest + log_sum))
    return divergence, x * variance


@triton.jit
def first_guess(end, bound, scale, variance_at_zero):
    """`Geodesic._first_guess`."""
    a = tl.sqrt(variance_at_zero)
    b = (tl.sqrt(2 * end) / scale - a) / scale
    target = tl.sqrt(2 * bound)
    return 2 * target / (a + tl.sqrt(a * a + 4 * b * target))


@triton.jit
def _solve(start, ratio, bound, low, high, guess, TOLERANCE: tl.constexpr, EPSILON: tl.constexpr):
    """`solve_increasing`, with the stopping rule of a device that can stop early: here every row can."""
    x = first_step(guess, low, high)
    previous_error = bound * 0 + float("inf")
    done = bound < 0
    converged = bound < 0
    iteration = 0
    while (iteration < MAX_ITERATIONS) & ~done:
        value, slope = _kl_and_slope(x, start, ratio)
        x, low, high, previous_error, done, converged = next_step(
            x, value, slope, bound, low, high, previous_error, TOLERANCE, EPSILON
        )
        iteration += 1
    return tl.where(done, x, low), converged


@triton.jit
def first_step(guess, low, high):
    """`_inside`."""
    return tl.where((guess > low) & (guess < high), guess, tl.sqrt(low) * tl.sqrt(high))


@triton.jit
def next_step(
    x, value, slope, bound, low, high, previous_error, TOLERANCE: tl.constexpr, EPSILON: tl.constexpr
):  # fmt: skip
    """One round of `solve_increasing`: x and its bracket, the error before, done, converged."""
    error = tl.abs(value / bound - 1)
    met = error <= TOLERANCE
    below = value < bound
    low = tl.where(below & ~met, x, low)
    high = tl.where(~below & ~met, x, high)
    root = tl.sqrt(tl.maximum(value, 0.0))
    newton = x - (root - tl.sqrt(bound)) * 2 * root / slope
    trusted = (newton > low) & (newton < high) & ~(error > 0.5 * previous_error)
    coefficient = tl.maximum(error / (previous_error * previous_error), 1.0)
    arrives = trusted & (previous_error < float("inf")) & (coefficient * error * error <= TOLERANCE)
    no_step = (error < 0.1) & (tl.abs(newton - x) <= 2 * EPSILON * x)
    exhausted = no_step | (high - low <= 2 * EPSILON * high)
    moved = tl.where(trusted, newton, tl.sqrt(low) * tl.sqrt(high))
    moved = tl.where(exhausted, tl.maximum(low, x - x * (2 * EPSILON)), moved)
    converged = met | arrives | (exhausted & (error <= _CONVERGED * TOLERANCE))
    previous_error = tl.where(trusted, error, float("inf"))
    return tl.where(met, x, moved), low, high, previous_error, met | arrives | exhausted, converged
