"""CPPO: DPPO's mask with less room early in a response and none once its prefix has spent the budget."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_at_least, check_share, read_tokens, weighted_log_likelihood

# The quantile of a response's divergences that its budget is read from (eq. 22).
_QUANTILE = 0.9


def cppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    probability_bound: float = 0.15,
    last_weight: float = 0.8,
    prefix_budget: float = 0.02,
    budget_growth: float = 2.0,
    ratio_cap: float = 20.0,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-M sg(min(r, cap)) A log π, where M tightens along a response as its prefix moves.

    An early token's change reaches every later one, and changes add up along a response; one threshold for
    all tokens sees neither. With D_t = |new - old| probability of the sampled token t of T, its weight
    w_t = w + (1 - w)(T - t)/(T - 1) falls from 1 to w = `last_weight`, and a token is kept if the update
    moves it back towards the policy that sampled, A (r - 1) <= 0, or if

        w_t D_t <= min(d, d + b W_{t-1} - S_{t-1}),

    where S and W sum w_j D_j and w_j over the tokens before it, d is `probability_bound` and b the budget a
    token: the response's own 90 % quantile of D, at least `prefix_budget`, at most `budget_growth` times it.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T]; positions are counted among the tokens that it counts.
        probability_bound: d; .15 in the paper's dense models, .2 in its mixture of experts.
        last_weight: w, in (0, 1]; .8 in the paper.
        prefix_budget: smallest budget a token; .02 in the paper.
        budget_growth: how many times that a response that moved further may have; 2 in the paper, 1 for a
            fixed budget.
        ratio_cap: largest weight of a token, as in DPPO; `math.inf` for none.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens dropped), `divergence_mean`, `divergence_max` (of
        D), `ratio_mean`, `ratio_max`. The loss is no surrogate: only its gradient means something.

    Raises:
        InvalidInputError: shapes that do not fit, or a setting outside its range.

    Source: CPPO (arXiv 2606.10968, eq. 8 to 11 and 22).

    Example:
        >>> import torch
        >>> old, new = torch.full((1, 4), 0.5).log(), torch.full((1, 4), 0.62).log()
        >>> result = cppo(new, old, torch.ones(1), torch.ones(1, 4))
        >>> result.metrics["clipped"].item()  # each moved by .12 < .15, and the first spends it
        0.75
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("probability_bound", probability_bound, 0.0, "0.15 is usual")
    check_share("last_weight", last_weight, "0.8 is usual")
    check_at_least("prefix_budget", prefix_budget, 0.0, "0.02 is usual")
    check_at_least("budget_growth", budget_growth, 1.0, "2 is usual, 1 for a fixed budget")
    check_at_least("ratio_cap", ratio_cap, 0.0, "20 is usual, math.inf for none", above=True)
    with torch.no_grad():
        distance = tokens.probability_change
        weight = _position_weights(response_mask, last_weight).to(distance)
        spent = weight * distance
        budget = _budget(distance, response_mask, prefix_budget, budget_growth)
        room = probability_bound + budget * _before(weight) - _before(spent)
        too_far = tokens.moves_away & (spent > room.clamp_max(probability_bound))
        ratio = tokens.ratio
    loss = aggregate(
        weighted_log_likelihood(tokens, torch.where(too_far, 0.0, ratio.clamp_max(ratio_cap))),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    return PolicyLoss(loss, tokens.metrics(ratio, too_far, distance))


def _position_weights(response_mask: Tensor, last_weight: float) -> Tensor:
    """From 1 at a response's first token to `last_weight` at its last; 0 where the mask is."""
    counted = (response_mask > 0).double()
    length = counted.sum(-1, keepdim=True)
    remaining = (length - counted.cumsum(-1)) / (length - 1).clamp_min(1)
    return counted * (last_weight + (1 - last_weight) * remaining)


def _budget(distance: Tensor, response_mask: Tensor, least: float, growth: float) -> Tensor:
    """[B, 1]: what a response's tokens may move on average."""
    if distance.numel() == 0:  # of which there is no quantile
        return distance.new_full((len(distance), 1), least)
    counted = torch.where(response_mask > 0, distance, torch.nan)
    quantile = counted.nanquantile(_QUANTILE, dim=-1, keepdim=True)
    return quantile.nan_to_num(nan=least).clamp(least, growth * least)


def _before(values: Tensor) -> Tensor:
    """Sums over the tokens before each."""
    return values.cumsum(-1) - values
