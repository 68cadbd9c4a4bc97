"""M2PO: leave out the tokens that moved most, until the second moment of the log-ratios is small."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_at_least, read_tokens
from tether.projection.tokens import masked_mean


def m2po(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    second_moment: float = 0.04,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-M r A, where M leaves out the fewest tokens for which mean (log r)^2 of the others is small enough.

    On stale data PPO's clip drops many tokens, and the surprising ones first, from which most is to be
    learnt. M2PO bounds a whole batch instead: among the tokens that an update pushes further away from the
    policy that sampled (A > 0 and r > 1, or A < 0 and r < 1) those of the largest |log r| are left out, until
    the mean of (log r)^2 over the rest of them is at most `second_moment`; of equals, the later ones. The
    others always learn. The averages still divide by all tokens.

    The bound holds for the tokens of one call: a micro-batch, where a trainer splits its batches. (The
    authors' released code clips instead at the |log r| where the clipped second moment of those tokens meets
    the budget, at 1 - .3 and 1 + .5 or further out; the paper's mask stands here.)

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        second_moment: largest mean of (log r)^2, in squared nats; the authors use .04 throughout.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens left out), `second_moment` (before any is),
        `ratio_mean`, `ratio_max`.

    Raises:
        InvalidInputError: shapes that do not fit, or a negative `second_moment`.

    Source: M2PO (arXiv 2510.01161, the mask on the batch's second moment and its objective).

    Example:
        >>> import torch
        >>> old = torch.full((1, 3), 0.2).log()
        >>> new = torch.tensor([[0.21, 0.22, 0.6]]).log()  # the last: (log 3)^2 = 1.2
        >>> m2po(new, old, torch.ones(1), torch.ones(1, 3)).metrics["clipped"].item()
        0.3333333432674408
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("second_moment", second_moment, 0.0, "0.04 is usual")
    with torch.no_grad():
        away = tokens.moves_away
        squared = tokens.log_ratio.square()
        left_out = away & ~_smallest(torch.where(away, squared, torch.inf), second_moment)
    ratio = tokens.ratio
    loss = aggregate(
        torch.where(left_out, 0.0, -ratio * tokens.advantages),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    metrics = tokens.metrics(ratio, left_out)
    metrics["second_moment"] = masked_mean(squared, away)
    return PolicyLoss(loss, metrics)


def _smallest(squared: Tensor, bound: float) -> Tensor:
    """As many of the smallest values as have a mean within the bound, as a mask; of equals the earlier."""
    ordered, order = squared.flatten().sort(stable=True)
    rank = torch.arange(len(ordered), device=squared.device)
    # Running means of ascending values ascend, so those within the bound come first.
    count = (ordered.cumsum(0) / (rank + 1) <= bound).sum()
    return torch.empty_like(order, dtype=torch.bool).scatter(0, order, rank < count).view_as(squared)
