"""VESPO: a smooth weight of the sequence's whole importance ratio."""

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
from tether.projection.tokens import masked_mean


def vespo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-sg(W^k e^(lambda (1 - W))) A log π, with W the product of a sequence's token ratios.

    W itself is the unbiased weight and has a variance that explodes with the length; GSPO's root of it
    is biased by the length. This weight is 1 on fresh data, fades as W^k when the sequence became
    unlikely and as e^(-lambda W) when it became likely, and is bounded for every W.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        k_pos, lambda_pos: for A >= 0; the paper's c1 and c2.
        k_neg, lambda_neg: for A < 0.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `weight_mean`, `ratio_mean` and `ratio_max` (of W). The loss is no
        surrogate: only its gradient means something.

    Raises:
        InvalidInputError: shapes that do not fit, or a shape parameter that is not positive.

    Source: VESPO (arXiv 2602.10693, eq. 20).

    Example:
        >>> import torch
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2)
        >>> new = torch.full((1, 2), 2.0).log() / 2  # W = 2: 4 e^-3 for A >= 0
        >>> round(vespo(new, old, torch.tensor([1.0]), mask).metrics["weight_mean"].item(), 4)
        0.1991
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    for name, value, usual in (
        ("k_pos", k_pos, "2 in the paper"),
        ("lambda_pos", lambda_pos, "3 in the paper"),
        ("k_neg", k_neg, "3 in the paper"),
        ("lambda_neg", lambda_neg, "2 in the paper"),
    ):
        check_at_least(name, value, 0.0, usual, above=True)
    with torch.no_grad():
        log_w = tokens.log_ratio.sum(-1, keepdim=True).expand_as(tokens.log_ratio)
        log_w = log_w.clamp_max(LARGEST_LOG_RATIO)
        encouraged = tokens.advantages >= 0
        power = torch.full_like(log_w, k_neg).masked_fill(encouraged, k_pos)
        decay = torch.full_like(log_w, lambda_neg).masked_fill(encouraged, lambda_pos)
        # In log space, where a stale sequence's W overflows only to a weight of zero.
        weight = (power * log_w - decay * log_w.expm1()).exp()
        ratio = log_w.exp()
    loss = aggregate(
        weighted_log_likelihood(tokens, weight),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    metrics = tokens.metrics(ratio)
    metrics["weight_mean"] = masked_mean(weight, response_mask)
    return PolicyLoss(loss, metrics)
