"""DPPO: drop a token once the policy's divergence there is too large, whatever its ratio."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss, looks_at_distributions_if
from tether.losses.divergences import Distribution, outcomes, total_variation
from tether.losses.tokens import Tokens, check_at_least, read_tokens, weighted_log_likelihood
from tether.projection import kl_categorical
from tether.settings import check_choice

Divergence = Literal["binary-tv", "binary-kl", "top-k-tv", "top-k-kl"]

#: The authors' thresholds: .15 of probability, .05 nats.
_USUAL_BOUND = {"binary-tv": 0.15, "top-k-tv": 0.15, "binary-kl": 0.05, "top-k-kl": 0.05}


@looks_at_distributions_if(lambda options: str(options["divergence"]).startswith("top-k"))
def dppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    divergence: Divergence = "binary-tv",
    divergence_low: float | None = None,
    divergence_high: float | None = None,
    ratio_cap: float = 20.0,
    new: Distribution | None = None,
    old: Distribution | None = None,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-M sg(min(r, cap)) A log π, where M drops tokens that moved too far in the direction A pushes.

    PPO's ratio is large for rare tokens that hardly matter and small for common ones that do. DPPO
    measures the divergence itself: a token with A > 0 is dropped once it became more likely and its
    divergence exceeds `divergence_high`; one with A < 0 once it became less likely and exceeds
    `divergence_low`. With p, q the new and old probability of the sampled token:

    - ``binary-tv``: |p - q|, the total variation of "this token or another".
    - ``binary-kl``: KL(q ‖ p) of the same two outcomes, in nats.
    - ``top-k-tv``, ``top-k-kl``: the same between `new` and `old`, which as `SparseLogProbs` are K ids
      and one bucket for the rest, and as dense tensors exact.

    The gradient is that of the paper's objective M min(r, cap) A wherever r <= cap; above, that
    objective would be flat and this one, as in the authors' code, keeps a gradient of bounded weight.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        divergence: see above.
        divergence_low, divergence_high: thresholds; None for the authors': .15 for tv, .05 for kl.
        ratio_cap: largest weight of a token; `math.inf` for none.
        new, old: whole distributions, for top-k alone: log-probabilities [B, T, V], or `SparseLogProbs`
            [B, T, K] on the same ids.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens dropped), `divergence_mean`,
        `divergence_max`, `ratio_mean`, `ratio_max`. The loss is no surrogate: only its gradient means
        something.

    Raises:
        InvalidInputError: shapes that do not fit, an unknown divergence, a negative threshold, a cap
            that is not positive, or distributions that are missing or not asked for.

    Source: DPPO (arXiv 2602.04879, the divergence mask and its binary and top-K approximations).

    Example:
        >>> import torch
        >>> old = torch.tensor([[0.5, 0.01]]).log()
        >>> new = torch.tensor([[0.7, 0.10]]).log()  # ratios 1.4 and 10
        >>> result = dppo(new, old, torch.tensor([1.0]), torch.ones(1, 2))
        >>> result.metrics["clipped"].item()  # the first, which moved by .2
        0.5
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    low, high = _bounds(divergence, divergence_low, divergence_high)
    check_at_least("ratio_cap", ratio_cap, 0.0, "20 is usual, math.inf for none", above=True)
    with torch.no_grad():
        distance = _distance(tokens, divergence, new, old)
        moved = tokens.log_ratio
        up = (tokens.advantages > 0) & (moved > 0) & (distance > high)
        down = (tokens.advantages < 0) & (moved < 0) & (distance > low)
        too_far = up | down
        ratio = tokens.ratio
    loss = aggregate(
        weighted_log_likelihood(tokens, torch.where(too_far, 0.0, ratio.clamp_max(ratio_cap))),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    return PolicyLoss(loss, tokens.metrics(ratio, too_far, distance))


def _bounds(divergence: Divergence, low: float | None, high: float | None) -> tuple[float, float]:
    check_choice("divergence", divergence, get_args(Divergence))
    usual = _USUAL_BOUND[divergence]
    low, high = (usual if value is None else value for value in (low, high))
    check_at_least("divergence_low", low, 0.0, f"{usual} is usual for {divergence}")
    check_at_least("divergence_high", high, 0.0, f"{usual} is usual for {divergence}")
    return low, high


def _distance(
    tokens: Tokens, divergence: Divergence, new: Distribution | None, old: Distribution | None
) -> Tensor:
    if divergence.startswith("top-k"):
        new_rows, old_rows = outcomes(tokens, new, old)
        if divergence == "top-k-tv":
            return total_variation(new_rows, old_rows)
        return kl_categorical(old_rows, new_rows)
    if new is not None or old is not None:
        raise InvalidInputError(
            f"divergence={divergence!r} uses the sampled tokens alone, but new or old was given. Leave "
            'them out, or choose "top-k-tv" or "top-k-kl".'
        )
    if divergence == "binary-tv":
        return tokens.probability_change
    return _binary_kl(tokens.log_probs, tokens.old_log_probs)


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of (q, 1 - q) from (p, 1 - p), with the digits that 1 - p would lose."""
    log_p, log_q = log_p.clamp_max(0), log_q.clamp_max(0)  # rounding may leave a probability above 1
    rest_q = -log_q.expm1()
    rest = torch.where(rest_q > 0, rest_q * (_log_rest(log_q) - _log_rest(log_p)), 0.0)
    return (log_q.exp() * (log_q - log_p) + rest).clamp_min(0)


def _log_rest(log_p: Tensor) -> Tensor:
    """log(1 - p) by the form that keeps its digits (Maechler 2012), at least that of the smallest 1 - p which
    rounding leaves: log p of a token that is all but certain is often 0, and that is no impossibility."""
    log_rest = torch.where(log_p > -math.log(2), (-log_p.expm1()).log(), (-log_p.exp()).log1p())
    return log_rest.clamp_min(math.log(torch.finfo(log_p.dtype).eps))
