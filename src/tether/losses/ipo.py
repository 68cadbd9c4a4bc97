"""IPO: drop a token whose probability changed too much, in whichever direction."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import (
    LARGEST_LOG_RATIO,
    check_at_least,
    read_tokens,
    weighted_log_likelihood,
)


def ipo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    probability_bound: float = 0.3,
    ratio_cap: float = 1e4,
    kl_coef: float = 0.0,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-M sg(min(r, cap)) A log π + kl_coef (log r)^2, where M drops tokens with |new - old| above the bound.

    The sampler's arithmetic and the trainer's never agree on a token's probability, and least in ratio where
    it is rare. IPO (INTELLECT Policy Optimization) therefore compares probabilities, and drops on both sides,
    whatever the advantage: what moved far is not trusted in either direction.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        probability_bound: largest |new - old|; .3 by the authors' ablation, .1 in their first release.
        ratio_cap: largest weight of a kept token; `math.inf` for none.
        kl_coef: weight of the squared log-ratio on all tokens; 1e-3 in the first release, none since.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens dropped), `divergence_mean`, `divergence_max` (of
        |new - old|), `ratio_mean`, `ratio_max`. The loss is no surrogate: only its gradient means something.

    Raises:
        InvalidInputError: shapes that do not fit, or a setting outside its range.

    Source: prime-rl, its documentation of the IPO loss (docs.primeintellect.ai/prime-rl/ipo).

    Example:
        >>> import torch
        >>> old = torch.tensor([[0.5, 0.01]]).log()
        >>> new = torch.tensor([[0.9, 0.10]]).log()  # ratios 1.8 and 10
        >>> ipo(new, old, torch.tensor([-1.0]), torch.ones(1, 2)).metrics["clipped"].item()  # the first
        0.5
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("probability_bound", probability_bound, 0.0, "0.3 is usual")
    check_at_least("ratio_cap", ratio_cap, 0.0, "1e4 is usual, math.inf for none", above=True)
    check_at_least("kl_coef", kl_coef, 0.0, "0 is usual")
    with torch.no_grad():
        distance = tokens.probability_change
        too_far = distance > probability_bound
        ratio = tokens.ratio
    token_loss = weighted_log_likelihood(tokens, torch.where(too_far, 0.0, ratio.clamp_max(ratio_cap)))
    if kl_coef:
        token_loss = token_loss + kl_coef * tokens.log_ratio.clamp_min(-LARGEST_LOG_RATIO).square()
    loss = aggregate(token_loss, response_mask, loss_agg_mode, max_response_length=max_response_length)
    return PolicyLoss(loss, tokens.metrics(ratio, too_far, distance))
