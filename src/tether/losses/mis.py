"""MIS: leave out whole responses that the network would hardly have written."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import (
    check_at_least,
    check_range,
    ratio_of,
    read_tokens,
    sequence_ratio,
    weighted_log_likelihood,
)
from tether.settings import check_choice

Level = Literal["sequence", "geometric"]

#: The usual bands: the product of a response's ratios, and their geometric mean.
_USUAL_BAND = {"sequence": (0.0, 2.0), "geometric": (0.99, 1.01)}


def mis(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    level: Level = "geometric",
    ratio_low: float | None = None,
    ratio_high: float | None = None,
    ratio_cap: float = 2.0,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-M sg(w) A log π with M = 1 for responses whose ratio lies in the band: masked importance sampling.

    Truncating a weight still learns from a response that the network would hardly have written, only less.
    MIS leaves it out. With ``level="sequence"`` the ratio is the product over the response and weighs it;
    long responses then leave any band. With ``"geometric"`` it is the T-th root of that product, which does
    not depend on the length, and what is left is weighted a token, by min(r, ratio_cap). Averages divide by
    all tokens or sequences, so that leaving out makes the update smaller. (Masking single tokens is
    `icepop`.)

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T]; old as the sampler reports them.
        advantages: [B] or [B, T].
        response_mask: [B, T].
        level: see above.
        ratio_low, ratio_high: the band; None for the usual, 0 to 2 for sequence, .99 to 1.01 for geometric.
        ratio_cap: geometric: largest weight of a token; `math.inf` for none.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens in responses left out), `ratio_mean`, `ratio_max`
        (of the weights before masking). The loss is no surrogate: only its gradient means something.

    Raises:
        InvalidInputError: shapes that do not fit, an unknown level, no band 0 <= low <= high, or a cap that
            is not positive.

    Source: Liu et al. 2025, "When Speed Kills Stability" (sequence-level and geometric masks); verl's
        rollout correction for the geometric mask with truncated tokens.

    Example:
        >>> import torch
        >>> old = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
        >>> new = torch.tensor([[0.502, 0.5], [0.6, 0.5]]).log()  # geometric means 1.002 and 1.095
        >>> mis(new, old, torch.ones(2), torch.ones(2, 2)).metrics["clipped"].item()
        0.5
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_choice("level", level, get_args(Level))
    usual = _USUAL_BAND[level]
    low = usual[0] if ratio_low is None else ratio_low
    high = usual[1] if ratio_high is None else ratio_high
    check_range("ratio", low, high, f"{usual[0]:g} and {usual[1]:g} are usual for {level}")
    check_at_least("ratio_cap", ratio_cap, 0.0, "2 is usual, math.inf for none", above=True)
    with torch.no_grad():
        if level == "sequence":
            ratio = weight = sequence_ratio(tokens)
        else:
            count = (response_mask > 0).sum(-1, keepdim=True).clamp_min(1)
            ratio = ratio_of(tokens.log_ratio.sum(-1, keepdim=True) / count)
            weight = tokens.ratio.clamp_max(ratio_cap)
        outside = ((ratio < low) | (ratio > high)).expand_as(response_mask)
    loss = aggregate(
        weighted_log_likelihood(tokens, torch.where(outside, 0.0, weight)),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    return PolicyLoss(loss, tokens.metrics(weight, outside))
