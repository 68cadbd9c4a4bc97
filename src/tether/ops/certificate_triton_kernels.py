"""The device code of `certificate_triton.py`."""

# Triton reads annotations, so they are not postponed.
import triton
import triton.language as tl


@triton.jit
def certify_kernel(
    logits, log_sum, ids, old_log_probs, old_tails, least, ratio_range, bound,
    lower_out, tail_mass_out, inside_out, uncertain_out, slots, vocabulary, stride,
    EPSILON: tl.constexpr, COARSER: tl.constexpr, SMALLEST: tl.constexpr, TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. What comes out NaN proves nothing."""
    row = tl.program_id(0).to(tl.int64)
    coarser = tl.full((), COARSER, tl.float64)
    limit = tl.load(bound)
    slot = tl.arange(0, BLOCK)
    own = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1).to(tl.int64)
    held = own >= 0
    new = tl.load(logits + row * stride + own, mask=held, other=float("-inf")) - tl.load(log_sum + row)
    new = new.to(tl.float64)
    old = tl.load(old_log_probs + row * slots + slot, mask=slot < slots, other=float("-inf")).to(tl.float64)
    # `SparseLogProbs.from_log_probs`: what is left to the tail, as the precision of the logits allows.
    held_mass = tl.sum(tl.exp(new), 0)
    kept = tl.minimum(tl.log(held_mass), -tl.full((), EPSILON, tl.float64))
    tail = tl.maximum(tl.log(1 - tl.exp(kept)), tl.full((), SMALLEST, tl.float64))
    whole = tl.sum(held.to(tl.int32), 0) >= vocabulary
    tail = tl.where(whole, float("-inf"), tail)
    old_tail = tl.load(old_tails + row).to(tl.float64)
    mass = tl.exp(tail)
    old_mass = tl.exp(old_tail)
    # `kl_categorical` of both with their tails.
    log_sum_new = tl.log(held_mass + mass)
    log_sum_old = tl.log(tl.sum(tl.exp(old), 0) + old_mass)
    kl = tl.sum(_term(new - log_sum_new, old - log_sum_old), 0)
    kl += _term(tail - log_sum_new, old_tail - log_sum_old)
    kl = tl.where(kl < 0, 0.0, kl)
    # `_bounds`.
    slack = 8 * coarser * (tl.full((), TERMS, tl.float64) + kl)
    empty = (tail == float("-inf")) & (old_tail == float("-inf"))
    error = tl.where(empty, 0.0, 32 * coarser)
    ratio = tl.where(mass == 0, 0.0, tail) - tl.where(old_mass == 0, 0.0, old_tail)
    slack += error * (1 + tl.abs(ratio) + mass / tl.maximum(old_mass, 32 * coarser))
    most = mass + error
    spread = tl.load(ratio_range + row)
    spread = spread * spread / 8
    upper = tl.minimum(kl + slack + most * spread, spread)
    sound = (kl == kl) & (spread == spread)
    if least is not None:
        at_least = tl.load(least + row).to(tl.float64)
        at_least -= 8 * coarser * (4 + tl.abs(at_least))
        sound &= at_least == at_least
        worst = tl.maximum(most * (tl.log(most) - at_least), 0.0)
        upper = tl.minimum(upper, kl - mass * ratio + slack + worst)
    upper = tl.where(empty, kl + slack, upper)
    impossible = kl == float("inf")
    lower = tl.where(impossible | ~sound, kl, tl.maximum(kl - slack, 0.0))
    inside = sound & ~impossible & (tl.maximum(upper, 0.0) <= limit)
    tl.store(lower_out + row, lower)
    tl.store(tail_mass_out + row, mass)
    tl.store(inside_out + row, inside.to(tl.int8))
    tl.store(uncertain_out + row, (~(inside | (lower > limit))).to(tl.int8))


@triton.jit
def _term(log_new, log_old):
    """p log(p / q), which is zero where p is."""
    prob = tl.exp(log_new)
    return tl.where(prob == 0, 0.0, prob * (log_new - log_old))
