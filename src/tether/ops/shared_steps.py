"""One step for all tokens of a sequence, although their rows are never dense at the same time."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.ops.dense_rows import one_token_curves, read_off
from tether.ops.policy_pair import PolicyPair, rows_at_a_time
from tether.ops.token_state import TokenState
from tether.projection.solve import Root, may_ask, solve_increasing


def project_sequences(pair: PolicyPair, ids: Tensor, state: TokenState, kl_bound: float) -> None:
    """Project the sequences whose mean divergence exceeds the bound; every token's is in `state.kl`.

    Each evaluation of a mean divergence forms the logits of its tokens again: three to five times as a rule.

    Raises:
        InvalidInputError: a bias of -inf, under which a token may meet the bound by a jump.
    """
    sequences = pair.sequences
    assert sequences is not None
    for bias in (pair.bias, pair.old.bias):
        if bias is not None and may_ask(bias) and bool(torch.isneginf(bias[: pair.vocabulary]).any()):
            raise InvalidInputError(
                "one step a sequence needs finite logits, but the LM head's bias holds -inf. Leave out ids "
                "that cannot be sampled with vocabulary_size, or bound each token."
            )
    means = _SequenceMeans(sequences)
    kl = means(state.kl)
    active = kl > kl_bound
    rows = active[sequences].nonzero().squeeze(-1)
    if not rows.numel():
        return
    width = _widest_ratio(pair, rows, means.count, kl_bound)
    step, converged = _common_step(pair, rows, means, kl, active, width, kl_bound)
    for block in pair.blocks(rows):
        new, old = pair.new_logits(block)[:, : pair.vocabulary], pair.old_logits(block)
        for part in rows_at_a_time(new):
            at = block[part]
            geodesic = one_token_curves(new[part], old[part], state.kl[at], kl_bound)
            x = step[sequences[at]] * geodesic.scale
            constrained = torch.ones_like(x, dtype=torch.bool)
            met = converged[sequences[at]]
            projection = read_off(geodesic, x, constrained, met, new[part], ids[at])
            state.put(at, projection._replace(step=step[sequences[at]]))


class _SequenceMeans:
    """Means over the tokens of each sequence, [N] -> [G]."""

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences
        self.count = int(sequences.max()) + 1 if sequences.numel() else 0
        ones = torch.ones_like(sequences, dtype=torch.float64)
        self.tokens = ones.new_zeros(self.count).index_add_(0, sequences, ones).clamp_min(1)

    def __call__(self, values: Tensor) -> Tensor:
        total = values.new_zeros(self.count).index_add_(0, self.sequences, values)
        return total / self.tokens.to(values.dtype)


def _widest_ratio(pair: PolicyPair, rows: Tensor, count: int, kl_bound: float) -> Tensor:
    """The largest range of log-ratios among each sequence's tokens, [G]."""
    assert pair.sequences is not None
    width = pair.buffers.new_full((count,), torch.finfo(pair.buffers.dtype).tiny * 1e6)
    for block in pair.blocks(rows):
        difference = pair.new_logits(block)[:, : pair.vocabulary].sub_(pair.old_logits(block))
        ranges = difference.amax(-1) - difference.amin(-1)
        width.scatter_reduce_(0, pair.sequences[block], ranges, "amax")
    return width


def _common_step(
    pair: PolicyPair,
    rows: Tensor,
    means: _SequenceMeans,
    kl: Tensor,
    active: Tensor,
    width: Tensor,
    kl_bound: float,
) -> Root:
    """The step at which each active sequence's mean divergence meets the bound, [G]."""
    sequences = means.sequences

    def evaluate(step: Tensor) -> tuple[Tensor, Tensor]:
        divergence, slope = kl.new_zeros(sequences.shape), kl.new_zeros(sequences.shape)
        for block in pair.blocks(rows):
            new, old = pair.new_logits(block)[:, : pair.vocabulary], pair.old_logits(block)
            for part in rows_at_a_time(new):
                at = block[part]
                curve = one_token_curves(
                    new[part], old[part], torch.full_like(kl[sequences[at]], torch.inf), kl_bound
                )
                value, along = curve.kl_and_slope(step[sequences[at]] * curve.scale)
                divergence[at], slope[at] = value, along * curve.scale
        # A sequence inside the bound reports that it has state its root, so that no other waits for it.
        return torch.where(active, means(divergence), kl_bound), means(slope)

    bound = torch.full_like(kl, kl_bound)
    # KL(s) <= s^2 R^2 / 8 with R the widest range of log-ratios (Hoeffding).
    low = ((8 * bound * (1 - 1e-4)).sqrt() / width).clamp_max(1)
    return solve_increasing(
        evaluate, bound, low, torch.ones_like(kl), (bound / kl.clamp_min(kl_bound)).sqrt()
    )
